"""The command that simulates faults, from a checkout.

python -m devtools.faults --system dispfl --seeds 0:10
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from devtools.faults.campaign import (
    COUNTED,
    Part,
    campaign,
    check_settings,
    check_table,
    drawn_settings,
    scratch_place,
    write_rows,
)
from devtools.faults.schedule import Schedule
from devtools.faults.simulation import Simulation
from devtools.faults.tour import write_tour
from fedprune_app.cli import main
from fedprune_app.cli.options import Plugins
from fedprune_app.config import ConfigError
from fedprune_app.files import scratch_folder
from fedprune_app.preflight.inputs import RunInputs, inputs_in
from fedprune_app.results.ownership import check_report_file
from fedprune_app.results.report import check_page_name
from fedprune_app.terminal import Terminal, console, echo

app = typer.Typer(pretty_exceptions_enable=False)


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
    first, _, end = seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError("--seeds", seeds, "FIRST:END, such as 0:50")
    if processes is not None and processes < 1:
        raise ConfigError("--workers", processes, "at least 1")
    if table_file is not None:
        check_table(table_file)
    given = inputs_in([], settings or [], plugin)
    names, chosen = list(dict.fromkeys(system or ["subfedavg"])), range(int(first), int(end))
    check_settings(names, given.chosen)
    if report is not None:
        _show_schedule(names, chosen, given, report, force)
        return
    done: dict[str, Part] = {}
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as progress:
        task = progress.add_task("schedules", total=len(names) * len(chosen))
        for part in campaign(names, chosen, given.chosen, processes or len(os.sched_getaffinity(0))):
            done[part.system] = done[part.system] + part if part.system in done else part
            for found in part.violations:
                echo(f" {found.schedule.system}, seed {found.schedule.seed}: {found.law}", "violation:", "red")
                echo(f"  smallest: {found.schedule}")
                for line in found.lines:
                    echo(f"  {line}")
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


def _show_schedule(systems: list[str], seeds: range, given: RunInputs, out: Path, force: bool) -> None:
    """Run one schedule and write its page."""
    if len(systems) != 1 or len(seeds) != 1:
        raise ConfigError("--report", out, condition="with one --system and one seed, such as --seeds 3:4")
    check_page_name(out, "--report")
    if not force:
        check_report_file(out)
    schedule = Schedule.drawn(seeds.start, systems[0])
    with scratch_folder(scratch_place()) as folder:
        told = Simulation(folder, drawn_settings(schedule.system, schedule.seed, given.chosen)).told(schedule)
    write_tour(schedule, told, out, force=force)
    for line in told.story.lines():
        echo(f"  {line}")
    echo(f": {out}", "page", "green")
    if told.law:
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
