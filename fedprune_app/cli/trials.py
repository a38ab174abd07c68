"""Commands that try to break a run's promises: ``audit`` and ``simulate-faults``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from fedprune_app.cli.terminal import Plugins, console, say
from fedprune_app.config import ConfigError, parse_config
from fedprune_app.errors import LaunchError
from fedprune_app.starting import Given, given_in
from fedprune_app.terminal import Terminal

app = typer.Typer()


@app.command()
def audit(
    settings: Annotated[list[str], typer.Argument(metavar="[CONFIG] [KEY=VALUE]...")],
    canaries: Annotated[
        int,
        typer.Option("--canaries", help="How many canaries. 0: half of the client's examples, at most 1000.", min=0),
    ] = 0,
    guesses: Annotated[int, typer.Option("--guesses", help="How many canaries to guess. 0: half of them.", min=0)] = 0,
    delta: Annotated[
        float, typer.Option("--delta", help="The δ of the bound and the claim. 0: dp.delta.", min=0, max=1)
    ] = 0.0,
    confidence: Annotated[float, typer.Option("--confidence", help="The confidence of the bound.")] = 0.95,
    client: Annotated[int, typer.Option("--client", help="The client whose data hold the canaries.")] = 0,
    clients: Annotated[int, typer.Option("--clients", help="How many clients to simulate.", min=1)] = 20,
    without_noise: Annotated[
        bool, typer.Option("--without-noise", help="Clip and charge, but add no noise. The audit should then fail.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the --json file even if no audit wrote it.")] = False,
    plugin: Plugins = None,
) -> None:
    """Attack a private configuration to find a lower bound on its ε.

    CONFIG is a run-config file, or the name of a shipped one.
    Each KEY=VALUE is a setting.
    The bound comes from one run.
    The command prints the bound beside the ε that the ledger claims.
    The exit code is 1 if the bound exceeds the claim.
    """
    from fedprune_app.audit import Question
    from fedprune_app.audit import audit as run_audit
    from fedprune_app.files import replace_file
    from fedprune_app.privacy.audit import JSON_KEYS
    from fedprune_app.registry import check_system
    from fedprune_app.results.ownership import check_json_file

    files = [Path(text) for text in settings if "=" not in text]
    given = given_in(files, [text for text in settings if "=" in text], plugin)
    config = parse_config(given.values)
    given.check_effects(config)
    check_system(config)
    question = Question(canaries, guesses, delta, confidence, client, clients, without_noise)
    if json_file is not None and not force:
        check_json_file(json_file.expanduser().resolve(), JSON_KEYS)
    with console.status(Text(f"auditing {config.system}: {config.num_server_rounds} rounds of {clients} clients")):
        found = run_audit(config, question)
    table = Table(box=None, show_header=False)
    for name, text in (
        ("lower bound on ε", f"{found.bound:.3f}"),
        ("ε that the ledger claims", f"{found.claim:.3f}"),
        ("δ", f"{found.delta:g}"),
        ("canaries", f"{found.canaries}"),
        ("guesses", f"{found.guesses}"),
        ("correct", f"{found.correct} ({found.correct / found.guesses:.1%})"),
        ("confidence", f"{found.confidence:.1%}"),
    ):
        table.add_row(name, text)
    Terminal().print(table)
    if json_file is not None:  # nothing is lost where it cannot be written
        replace_file(json_file.expanduser().resolve(), json.dumps(found.to_dict(), indent=1).encode())
    if not found.holds:
        raise LaunchError(found.verdict)
    say(f": {found.verdict}", "passed", "green")


@app.command()
def simulate_faults(
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    system: Annotated[
        list[str] | None, typer.Option("--system", help="A system to test; may be repeated. Default: subfedavg.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="The seeds, FIRST:END; END is not among them.")] = "0:50",
    processes: Annotated[
        int | None, typer.Option("--workers", help="How many processes run schedules. By default one per CPU core.")
    ] = None,
    table_file: Annotated[
        Path | None, typer.Option("--table", help="A CSV file to which a line for each system is added.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Show the schedule of one seed as a page, in this HTML file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another file that --report names.")] = False,
    plugin: Plugins = None,
) -> None:
    """Let simulated faults happen to runs, and check that they change nothing.

    Each KEY=VALUE is a setting of the runs.
    One seed is one schedule of faults.
    The process is killed, the power fails, or the disk is full.
    Files are damaged, and clients lose their states.
    Messages are lost, late, corrupt or doubled.
    The run is resumed each time.
    Its models and records must be those of the same run that was not
    interrupted.
    The exit code is 1 if a schedule breaks a law.
    """
    from fedprune_app.faults.campaign import COUNTED, Part, campaign, check_settings, check_table, write_rows

    first, _, end = seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--seeds is {seeds!r}, allowed: FIRST:END, such as 0:50")
    if processes is not None and processes < 1:
        raise ConfigError(f"--workers is {processes}, allowed: at least 1")
    if table_file is not None:
        check_table(table_file)
    given = given_in([], settings or [], plugin)
    names, chosen = list(dict.fromkeys(system or ["subfedavg"])), range(int(first), int(end))
    check_settings(names, given.values)
    if report is not None:
        _show_schedule(names, chosen, given, report, force)
        return
    done: dict[str, Part] = {}
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as progress:
        task = progress.add_task("schedules", total=len(names) * len(chosen))
        for part in campaign(names, chosen, given.values, processes or len(os.sched_getaffinity(0))):
            done[part.system] = done[part.system] + part if part.system in done else part
            for found in part.violations:
                say(f" {found.schedule.system}, seed {found.schedule.seed}: {found.law}", "violation:", "red")
                say(f"  smallest: {found.schedule}")
                for line in found.lines:
                    say(f"  {line}")
            progress.advance(task, len(part.seeds))
    table = Table(box=None, pad_edge=False)
    for column in ("system", "schedules", "faults", "processor seconds", "violations"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for part in (done[name] for name in names):
        faults = sum(part.happened[kind] for kind in COUNTED.values())
        counts = (len(part.seeds), faults, round(part.seconds), len(part.violations))
        table.add_row(part.system, *(f"{count:,}" for count in counts))
    Terminal().print(table)
    if table_file is not None:
        write_rows(table_file, (done[name] for name in names))
    if any(part.violations for part in done.values()):
        raise typer.Exit(1)


def _show_schedule(systems: list[str], seeds: range, given: Given, out: Path, force: bool) -> None:
    """Run one schedule and write its page."""
    from fedprune_app.faults.campaign import scratch_place
    from fedprune_app.faults.schedule import Schedule
    from fedprune_app.faults.simulation import Simulation
    from fedprune_app.faults.tour import write_tour
    from fedprune_app.files import scratch_folder
    from fedprune_app.results.ownership import check_report_file
    from fedprune_app.results.report import check_page_name

    if len(systems) != 1 or len(seeds) != 1:
        raise ConfigError("--report is given, allowed: with one --system and one seed, such as --seeds 3:4")
    check_page_name(out, "--report")
    if not force:
        check_report_file(out)
    schedule = Schedule.drawn(seeds.start, systems[0])
    with scratch_folder(scratch_place()) as folder:
        told = Simulation(folder, given.values).told(schedule)
    write_tour(schedule, told, out, force=force)
    for line in told.story.lines():
        say(f"  {line}")
    say(f": {out}", "page", "green")
    if told.law:
        raise typer.Exit(1)
