"""The ``fedprune`` command does what Flower's own command line does not do."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from fedprune_app import __version__
from fedprune_app.config import (
    OPTIONS,
    Config,
    ConfigError,
    Option,
    Scalar,
    is_used,
    parse_config,
    toml_value,
)
from fedprune_app.config.meant import not_allowed, unknown_key
from fedprune_app.errors import LaunchError, LeftGoing
from fedprune_app.numbered import LATEST, next_folder, point_to
from fedprune_app.starting import Given, check_accept_loss, given_in, placed, recorded

if TYPE_CHECKING:
    from fedprune_app.experiment import Placement

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train, prune and compare personalised federated models.",
)
_AS_IT_IS: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}  # paths and errors hold no markup
console = Console(stderr=True, **_AS_IT_IS)
_INTERRUPTED = 130
_LOOK_SECONDS, _QUIET_LOOKS = 5, 3  # of `report --watch`

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]
Configs = Annotated[
    list[Path] | None,
    typer.Option(
        "-c",
        "--config",
        help="Read settings from this run-config file, or from the shipped one of this name, such as subfedavg. "
        "You may repeat the option. A later file wins over an earlier one, and KEY=VALUE over both.",
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        help="Load this module or file.py, which adds systems, networks, datasets or partitions. You may repeat the "
        "option.",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="The folder for the results.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", help="How many processes hold clients (ray). By default one per GPU, or per CPU core."),
]
RayAddress = Annotated[str, typer.Option("--ray-address", help="Simulate on the Ray cluster at HOST:PORT.")]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="With --resume, go on even if a damaged file changes the result.")
]
Engine = Annotated[
    str,
    typer.Option("--engine", help="Run on ray, on flower (Flower's own simulation), or inprocess for debugging."),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Remove or replace what is in the way, even if fedprune did not write it. `run` keeps an earlier run.",
    ),
]


def _say(text: str, label: str = "", style: str = "") -> None:
    """Print one line to the terminal: a coloured ``label``, then ``text`` as it is."""
    console.print(Text.assemble((label, style), text), soft_wrap=True)


def _say_idle(given: Given, config: Config) -> None:
    if idle := given.idle(config):
        _say(f" without effect with system {config.system!r}: {', '.join(idle)}", "note:", "yellow")


def _named(plugin: list[str] | None) -> list[str]:
    """Load the plug-ins that the command line names, and return them with absolute paths."""
    from fedprune_app.plugins import names_in

    return names_in(given_in(None, None, plugin).values)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedprune {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, prune and compare personalised federated models."""


@app.command()
def run(
    overrides: Overrides = None,
    config: Configs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The folder for the results: else runs/1, runs/2, ..., and runs/latest links there."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option("--clients", help="How many clients to simulate: else 20, or as many as the resumed run has."),
    ] = None,
    workers: Workers = None,
    engine: Engine = "ray",
    ray_address: RayAddress = "",
    superlink: Annotated[
        str, typer.Option("--superlink", help="Run on real nodes, by the name of a connection of Flower's.")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    force: Force = False,
    accept_loss: AcceptLoss = False,
    plugin: Plugins = None,
) -> None:
    """Run one federation and write its results to a run folder.

    Each KEY=VALUE is a setting; `fedprune list --keys` shows all of them.
    """
    if force and superlink:
        raise ConfigError("--force is given, allowed with --superlink: nothing; the folder is on the server")
    if clients is not None and clients < 1:
        raise ConfigError(f"--clients is {clients}, allowed: at least 1")
    numbered = out is None and not superlink
    if out is None:
        out = LATEST if resume or superlink else next_folder(LATEST.parent)
    check_accept_loss(accept_loss, resume)
    before = recorded(out.expanduser().resolve(), superlink) if resume else None
    given = given_in(config, overrides, plugin)
    settings = placed(given, out, before, force=force, is_here=not superlink, accept_loss=accept_loss)
    _say_idle(given, settings)
    known = len((before or {}).get("partition") or [])
    if clients is None:
        clients = known or 20
    is_another = clients > known > 0 and not (before or {}).get("clients_left_out")
    if (clients < known or is_another) and not superlink:
        raise ConfigError(f"--clients is {clients}, allowed when resuming: {known}, as the run began")
    from fedprune_app.experiment import Placement

    placement = Placement(engine, clients, workers, ray_address=ray_address, superlink=superlink)
    link = LATEST if numbered and not resume else None
    _run_once(placement, settings, out, force and not resume, link)


@app.command(name="check")
def check_run(
    overrides: Overrides = None,
    config: Configs = None,
    clients: Annotated[int, typer.Option("--clients", help="How many clients to simulate.", min=1)] = 20,
    plugin: Plugins = None,
) -> None:
    """Check a run without starting it, and say what it would work with.

    Each KEY=VALUE is a setting; `fedprune list --keys` shows all of them.
    The command reads the data, deals them, and builds the network and the server.
    """
    given = given_in(config, overrides, plugin)
    settings = parse_config(given.values)
    from fedprune_app.registry import check_names, check_system

    check_names(settings)
    given.check_effects(settings)
    check_system(settings)
    _say_idle(given, settings)
    from fedprune_app.checked import described
    from fedprune_app.experiment import Placement, Session

    with Session(Placement("inprocess", clients), console) as session:
        session.check(settings)
    _print_rows(described(settings, clients))
    _say(": a run can start with these settings", "checked", "green")


@app.command(name="check-data")
def check_data(overrides: Overrides = None, config: Configs = None, plugin: Plugins = None) -> None:
    """Read the data of a run, and say what is in them.

    Each KEY=VALUE is a setting, such as dataset=image-folder data-dir=DIR.
    `fedprune list` says what data-dir holds for each dataset.
    """
    given = given_in(config, overrides, plugin)
    settings = parse_config(given.values)
    from fedprune_app.registry import SYSTEMS, check_names

    check_names(settings)
    given.check_effects(settings)
    if SYSTEMS[settings.system].data == "text":
        raise ConfigError(f"system is {settings.system!r}, allowed with check-data: one that learns from examples")
    from fedprune_app.checked import data_found

    with console.status(Text(f"reading {settings.dataset}")):
        rows, doubts = data_found(settings)
    _print_rows(rows)
    for doubt in doubts:
        _say(f" {doubt}", "note:", "yellow")


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for subject, words in rows:
        table.add_row(Text(subject, "bold"), words)
    Console(**_AS_IT_IS).print(table)


def _run_once(placement: Placement, settings: Config, out: Path, force: bool, link: Path | None = None) -> None:
    """Run one federation, and say how the run ended; ``force`` first removes what is in its way.

    The ``link`` will lead to the run's folder, from before the run begins.
    """
    from fedprune_app.demo import prepare_models
    from fedprune_app.experiment import Session
    from fedprune_app.results.ownership import clear_the_way

    if not placement.superlink:  # real nodes have models of their own
        prepare_models([settings], console)
    folder = Path(settings.out_dir)

    def make_way() -> None:
        if force:
            clear_the_way(folder)
        if link is not None:
            point_to(link, folder)

    with Session(placement, console) as session:
        info = session.run(settings, folder, once_checked=make_way)
    for kind, key in (("note", "notes"), ("lost", "losses")):
        for line in info.get(key, []):
            _say(f" {line}", f"{kind}:", "yellow")
    _say(f" {info['rounds_completed']} rounds in {info.get('seconds', 0):.0f} s", "completed", "green")
    if "final_sha256" in info:
        _say(f"final models: sha256 {info['final_sha256'][:16]}…  results: {out}")
        _say_sizes(info, out)
    else:
        _say("results: in the ServerApp's run folder, on its machine")


def _say_sizes(info: Mapping[str, Any], out: Path) -> None:
    """Say where a language model was written, and how large its weights are."""
    for name, key in (("global", "checkpoint_bytes"), ("global-packed", "packed_bytes")):
        if size := (info.get("final_model") or {}).get(key):
            _say(f"{out / 'models' / name}: {size / 1e6:,.2f} MB of weights")


@app.command()
def sweep(
    matrix: Annotated[Path, typer.Argument(metavar="FILE.yaml")],
    overrides: Overrides = None,
    out: Out = Path("runs/sweep"),
    clients: Annotated[
        int | None,
        typer.Option("--clients", help="How many clients to simulate: else as FILE.yaml says, or 20."),
    ] = None,
    workers: Workers = None,
    engine: Engine = "ray",
    ray_address: RayAddress = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the sweep in --out stopped.")] = False,
    force: Force = False,
    plugin: Plugins = None,
) -> None:
    """Run a matrix of experiments and write tables of their results.

    FILE.yaml lists systems, datasets and seeds, or settings to search among.
    Each KEY=VALUE is a setting of all runs; `fedprune list --keys` shows all.
    Runs that have finished before are skipped.
    The tables are written as markdown, csv and LaTeX.
    """
    from fedprune_app.matrices import read_matrix

    read = read_matrix(matrix)
    settings = given_in(None, overrides, plugin).on_command_line
    for key in settings:
        if key not in OPTIONS:
            raise unknown_key(key, OPTIONS)
    from fedprune_app.experiment import Placement
    from fedprune_app.matrices import Matrix
    from fedprune_app.sweeping import run_matrix, run_search

    placement = Placement(engine, clients or read.num_clients or 20, workers, ray_address=ray_address)
    place = out.expanduser().resolve(), settings, placement, console, lambda label, text: _say(text, label, "red")
    if isinstance(read, Matrix):
        swept = run_matrix(read, *place, resume=resume, force=force)
    else:
        swept = run_search(read, *place, resume=resume, force=force)
    for path in swept.tables:
        _say(f"table: {path}")
    swept.check()


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write this HTML file.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file even if it is no report.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the file anew every few seconds, until no run is going on.")
    ] = False,
) -> None:
    """Compare runs in one self-contained HTML file.

    Each DIR is a run folder, or a folder of run folders.
    A run folder that is damaged is left out, and the report names it.
    """
    from fedprune_app.results.report import write_report

    if output.suffix.lower() not in ("", ".html", ".htm"):
        raise ConfigError(f"--output is {str(output)!r}, allowed: a file that ends in .html")
    if watch:
        _watch(folders, output, force)
    found = list(dict.fromkeys(each for folder in folders for each in _run_folders(folder)))
    _say_unsealed(found)
    left_out: list[str] = []
    write_report(found, output, force=force, on_left_out=left_out.append)
    for reason in left_out:
        _say(f" {reason}", "left out:", "yellow")
    count = len(found) - len(left_out)
    _say(f"report of {count} run{'s' * (count != 1)}: {output.resolve()}")


def _watch(folders: list[Path], output: Path, force: bool) -> None:
    """Write a page that a browser loads anew, again and again, until no run in ``folders`` is going on."""
    from fedprune_app.results.report import is_any_running, write_report

    quiet = 0  # so many times in a row no run was going on: between the runs of a sweep there is none for a moment
    with suppress(KeyboardInterrupt), console.status(Text(f"watching; open {output.resolve()}")):
        while quiet < _QUIET_LOOKS:
            found = list(dict.fromkeys(each for folder in folders for each in _run_folders(folder)))
            write_report(found, output, force=force, refresh_seconds=_LOOK_SECONDS)
            quiet = 0 if is_any_running(found) else quiet + 1
            time.sleep(_LOOK_SECONDS if quiet < _QUIET_LOOKS else 0)


def _say_unsealed(folders: list[Path]) -> None:
    """Name the runs of earlier versions, whose files have no digests."""
    from fedprune_app.results.reader import is_sealed

    for folder in folders:
        if not is_sealed(folder):
            text = f"{folder} was written by an earlier version: nothing shows whether its files are damaged"
            _say(f" {text}", "note:", "yellow")


def _run_folders(folder: Path) -> list[Path]:
    if (folder / "run.json").exists():
        return [folder]
    below = sorted(path.parent for path in folder.glob("*/run.json"))
    if not below:
        raise ConfigError(f"{str(folder)!r} is no run folder, nor does it hold any (no run.json)")
    return below


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write this file, or for a language model folder.")],
    client: Annotated[int | None, typer.Option("--client", help="Export the personal model of this client.")] = None,
    is_global: Annotated[bool, typer.Option("--global", help="Export the global model.")] = False,
    format: Annotated[
        str,
        typer.Option("--format", help="safetensors, sparse, onnx or torch-export. Default: as the file's suffix says."),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    state_dir: Annotated[
        str, typer.Option("--state-dir", help="Where the run's state-dir is now, if it has moved.")
    ] = "",
    data_dir: Annotated[str, typer.Option("--data-dir", help="Where the run's data-dir is now, if it has moved.")] = "",
    plugin: Plugins = None,
) -> None:
    """Write the smallest model of a client, or the global model.

    RUN is the folder of a completed run.
    The command prints what the model saves, compared with the dense model.
    With a format of sparse, a CPU computes with the kept weights alone.
    For a language model the format is sparse.
    RUN may then be a checkpoint of transformers whose pruned weights are zeros.
    """
    from fedprune_app.exporting import export_model, format_of, machine
    from fedprune_app.packing import is_language_model

    if is_language_model(folder):
        _export_language_model(folder, client, format, output, force)
        return
    format = format_of(output, format)
    if (client is None) != is_global:
        raise ConfigError("export needs one of --client K and --global")
    _say_unsealed([folder])
    info, full, small = export_model(
        folder, client, format, output, force=force, state_dir=state_dir, data_dir=data_dir, trusted=_named(plugin)
    )
    whose = "global model" if client is None else f"client {client}"
    table = Table(
        title=f"{info.model} of {info.system}, {whose}, after round {info.round}",
        caption=f"ms of one thread, median, in turns, on {machine()}",
        box=None,
    )
    for column in ("", "dense", format, "share"):
        table.add_column(column, justify="right" if column else "left")
    rows = [
        ("bytes on disk", full.file_bytes, small.file_bytes),
        ("parameters kept", full.parameters, small.parameters),
        ("FLOPs per example", full.flops, small.flops),
    ]
    for name, before, after in rows:
        table.add_row(name, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.1%}")
    for batch, milliseconds in full.milliseconds.items():
        after = small.milliseconds[batch]
        cells = f"{milliseconds:.3g}", f"{after:.3g}", f"{after / milliseconds:.1%}"
        table.add_row(f"ms per batch of {batch}", *cells)
    Console(**_AS_IT_IS).print(table)
    _say(f": {output.resolve()}", "exported", "green")


def _export_language_model(folder: Path, client: int | None, format: str, output: Path, force: bool) -> None:
    from fedprune_app.exporting import machine
    from fedprune_app.packing import pack_model

    if client is not None or format not in ("", "sparse"):
        wrong = f"--client is {client}" if client is not None else f"--format is {format!r}"
        raise ConfigError(f"{wrong}, allowed with a language model: --global --format sparse")
    if (folder / "run.json").exists():
        _say_unsealed([folder])
    with console.status(Text(f"packing {folder}")):
        found = pack_model(folder, output.expanduser(), force=force)
    dense, sparse = found.dense, found.sparse
    table = Table(
        title=f"density {found.density:.2f}",
        caption=f"ms of one thread, median, in turns, on {machine()}",
        box=None,
    )
    for column in ("", "dense", "sparse", "share"):
        table.add_column(column, justify="right" if column else "left")
    for name, before, after, form in (
        ("bytes on disk", dense.disk, sparse.disk, ",.0f"),
        ("bytes in memory", dense.memory, sparse.memory, ",.0f"),
        ("ms per token", dense.milliseconds, sparse.milliseconds, ".3g"),
    ):
        table.add_row(name, f"{before:{form}}", f"{after:{form}}", f"{after / before:.1%}")
    table.add_row("sparse linear layers", "0", str(found.sparse_layers), f"of {found.layers}")
    Console(**_AS_IT_IS).print(table)
    _say(f": {output.resolve()}", "exported", "green")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...")],
    top: Annotated[int, typer.Option("--top", help="How many classes to show for each image.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    build: Annotated[
        str, typer.Option("--build", help="FILE.py:FUNCTION that builds the network, for one of your own.")
    ] = "",
) -> None:
    """Classify images with an exported model.

    MODEL is a file that `fedprune export --format safetensors` wrote.
    Each IMAGE is a file. An image of another size is brought to the model's size.
    """
    from fedprune_app import plugins
    from fedprune_app.predicting import predictions

    function = plugins.function("build", str(Path(build).expanduser().absolute())) if build else None
    found = predictions(model, images, top, function)
    if as_json:
        typer.echo(json.dumps({str(path): dict(best) for path, best in found}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("image", "class", "probability"):
        table.add_column(column, justify="right" if column == "probability" else "left")
    for path, best in found:
        for place, (name, share) in enumerate(best):
            table.add_row("" if place else str(path), name, f"{share:.1%}")
    Console(**_AS_IT_IS).print(table)


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
    if json_file is not None:
        replace_file(json_file.expanduser().resolve(), json.dumps(found.to_dict(), indent=1).encode())
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
    Console(**_AS_IT_IS).print(table)
    if not found.holds:
        raise LaunchError(found.verdict)
    _say(f": {found.verdict}", "passed", "green")


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
    The process is killed, the power goes, or the disk is full.
    Files are damaged, and clients lose their states.
    Messages are lost, late, corrupt or doubled.
    The run is resumed each time.
    Its models and records must be those of the same run that was not
    interrupted.
    The exit code is 1 if a schedule breaks a law.
    """
    from fedprune_app.faults.campaign import COUNTED, Part, campaign, check_table, write_rows

    first, _, end = seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--seeds is {seeds!r}, allowed: FIRST:END, such as 0:50")
    if processes is not None and processes < 1:
        raise ConfigError(f"--workers is {processes}, allowed: at least 1")
    if table_file is not None:
        check_table(table_file)
    given = given_in([], settings or [], plugin)
    if report is not None:
        _show_schedule(system or ["subfedavg"], range(int(first), int(end)), given, report, force)
        return
    names, chosen = list(dict.fromkeys(system or ["subfedavg"])), range(int(first), int(end))
    done: dict[str, Part] = {}
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as progress:
        task = progress.add_task("schedules", total=len(names) * len(chosen))
        for part in campaign(names, chosen, given.values, processes or len(os.sched_getaffinity(0))):
            done[part.system] = done[part.system] + part if part.system in done else part
            for found in part.violations:
                _say(f" {found.schedule.system}, seed {found.schedule.seed}: {found.law}", "violation:", "red")
                _say(f"  smallest: {found.schedule}")
                for line in found.lines:
                    _say(f"  {line}")
            progress.advance(task, len(part.seeds))
    table = Table(box=None, pad_edge=False)
    for column in ("system", "schedules", "faults", "processor seconds", "violations"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for part in (done[name] for name in names):
        faults = sum(part.happened[kind] for kind in COUNTED.values())
        counts = (len(part.seeds), faults, round(part.seconds), len(part.violations))
        table.add_row(part.system, *(f"{count:,}" for count in counts))
    Console(**_AS_IT_IS).print(table)
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

    if len(systems) != 1 or len(seeds) != 1:
        raise ConfigError("--report is given, allowed: with one --system and one seed, such as --seeds 3:4")
    if not force:
        check_report_file(out)
    schedule = Schedule.drawn(seeds.start, systems[0])
    with scratch_folder(scratch_place()) as folder:
        told = Simulation(folder, given.values).told(schedule)
    write_tour(schedule, told, out, force=force)
    for line in told.story.lines():
        _say(f"  {line}")
    _say(f": {out}", "page", "green")
    if told.law:
        raise typer.Exit(1)


@app.command(name="list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="List all settings with default, meaning, range and choices.")
    ] = False,
    system: Annotated[str, typer.Argument(metavar="[SYSTEM]")] = "",
    plugin: Plugins = None,
) -> None:
    """List the systems, datasets, partitions and models that there are to choose.

    With --keys and SYSTEM: the settings that have an effect with that system.
    """
    from fedprune_app.data.names import DATASETS, PARTITIONS, TEXTS
    from fedprune_app.models.names import MODELS
    from fedprune_app.plugins import installed
    from fedprune_app.registry import SYSTEMS

    if plugin or system not in ("", *SYSTEMS):
        given_in(None, [f"system={system}"] if system else None, plugin)
    if system and (not keys or system not in SYSTEMS):
        raise not_allowed("SYSTEM", system, SYSTEMS if keys else ("nothing without --keys",))
    options = {
        key: each
        for key, each in OPTIONS.items()
        if not system or system in each.needs.get("system", [system]) or is_used(system, key)
    }
    kinds = {
        "systems": {name: system.summary for name, system in SYSTEMS.items()},
        "datasets": {**DATASETS, **TEXTS},
        "partitions": dict(PARTITIONS),
        "models": dict(MODELS),
    }
    for key, names in installed().items():
        for name, module in names.items():
            kinds[f"{key}s"].setdefault(name, f"of the installed plug-in {module}")
    if as_json:
        settings = {
            key: {"default": each.default, "help": each.help, "range": each.range, "choices": dict(each.choices)}
            for key, each in options.items()
        }
        typer.echo(json.dumps({**kinds, "keys": settings}, indent=1))
        return
    out = Console(**_AS_IT_IS)
    if keys:
        out.print(_keys_table(options))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for kind, entries in kinds.items():
        table.add_row(Text(kind, "bold"), "")
        for name, line in entries.items():
            table.add_row(f"  {name}", line)
    out.print(table)


def _keys_table(options: Mapping[str, Option]) -> Table:
    """Return a table of these settings with default, meaning, range and choices."""
    table = Table(box=None, pad_edge=False)
    table.add_column("key = default", no_wrap=True)
    table.add_column("meaning")
    for key, each in options.items():
        table.add_row(f"{key} = {toml_value(each.default)}", _meaning(each))
    return table


def _meaning(option: Option) -> Group:
    allowed = f" Allowed: {option.range}." if option.range else ""
    choices = Table.grid(padding=(0, 1))
    choices.add_column(no_wrap=True)
    for choice, words in option.choices.items():
        choices.add_row(f"  {choice}:", words)
    return Group(Text(option.help + allowed), *([choices] if option.choices else []))


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    workers: Workers = None,
    llm: Annotated[bool, typer.Option("--llm", help="Run FedSpaLLM on a small language model.")] = False,
    force: Force = False,
) -> None:
    """Run four systems on the embedded digits and write a report on them.

    The systems are Standalone, FedAvg, Sub-FedAvg and Dis-PFL.
    With --llm the demo runs FedSpaLLM at two densities instead.
    Its language model is first trained here, on Python's own sources.
    The runs of an earlier demo in --out are replaced.
    Any other run there is replaced only with --force.
    """
    from fedprune_app.demo import (
        DEMO_CLIENTS,
        DEMO_SYSTEMS,
        LLM_CLIENTS,
        LLM_DENSITIES,
        check_replaceable,
        demo_settings,
        embedded_model,
        llm_settings,
    )
    from fedprune_app.experiment import Placement, Session
    from fedprune_app.results.ownership import check_report_file, mark, remove_run
    from fedprune_app.results.recorder import holds_run
    from fedprune_app.results.report import write_report

    out = out.expanduser().resolve()
    cells = {system: demo_settings(system) for system in DEMO_SYSTEMS}
    if llm:
        cells = {f"fedspallm-density{density}": llm_settings(density) for density in LLM_DENSITIES}
    page = out / ("report-llm.html" if llm else "report.html")
    if holds_run(out):
        raise ConfigError(f"--out {str(out)!r} holds a run, allowed: a folder for all runs of the demo")
    if not force:
        check_report_file(page)
    for name in cells:
        check_replaceable(out / name, force)
    if llm:
        _say(f"embedded model: {embedded_model(console)}")
    folders = []
    with Session(Placement("ray", LLM_CLIENTS if llm else DEMO_CLIENTS, workers), console) as session:
        for name, settings in cells.items():
            folder = out / name
            remove_run(folder)
            mark(folder, "demo")
            _say_sizes(session.run(placed(Given([], settings), folder, before=None), folder), folder)
            folders.append(folder)
    write_report(folders, page, force=force)
    _say(f": open {page}", "done", "green")


deploy_app = typer.Typer(
    no_args_is_help=True, help="Deploy on real nodes, over gRPC with TLS and keys; see docs/deploy.md."
)
app.add_typer(deploy_app, name="deploy")


@deploy_app.command()
def local(
    overrides: Overrides = None,
    config: Configs = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", help="How many SuperNodes to start: else 3, or one per folder of --data-dirs."),
    ] = None,
    data_dirs: Annotated[
        str, typer.Option("--data-dirs", help="Folders with each node's own data, in place of a partition: 'A,B,C'.")
    ] = "",
    capacities: Annotated[
        str, typer.Option("--capacities", help="The density that each node can bear: '0.3 0.6 1'.")
    ] = "",
    policies: Annotated[
        str, typer.Option("--policies", help="Files with each node's own policy, see docs/deploy.md: 'A,B,C'.")
    ] = "",
    out: Out = Path("runs/deployed"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with the same nodes.")] = False,
    force: Force = False,
    accept_loss: AcceptLoss = False,
    plugin: Plugins = None,
) -> None:
    """Rehearse a deployment with all its programs on this machine.

    A SuperLink, an executor and SuperNodes run as processes here.
    They use TLS and registered keys, as on real machines.
    Each KEY=VALUE is a setting; `fedprune list --keys` shows all of them.
    """
    from fedprune_app.experiment import Placement
    from fedprune_app.node_policy import POLICY_FILE, read_policy
    from fedprune_app.plugins import code_in
    from fedprune_app.results.ownership import check_marked

    check_accept_loss(accept_loss, resume)
    before = recorded(out.expanduser().resolve()) if resume else None
    given = given_in(config, overrides, plugin)
    settings = placed(given, out, before, force=force, accept_loss=accept_loss)
    _say_idle(given, settings)
    folders, files = _paths(data_dirs), _paths(policies)
    if nodes is None:
        nodes = len(folders) or len(files) or 3
    if nodes < 1:
        raise ConfigError(f"--nodes is {nodes}, allowed: at least 1")
    if folders and len(folders) != nodes:
        raise ConfigError(f"--data-dirs has {len(folders)} folders, allowed: one per node, {nodes}")
    for each in folders:
        if not each.is_dir():
            raise ConfigError(f"--data-dirs has {str(each)!r}, allowed: folders")
    if files and len(files) != nodes:
        raise ConfigError(f"--policies has {len(files)} files, allowed: one per node, {nodes}")
    for each in files:
        read_policy({POLICY_FILE: str(each)})
    try:
        borne = [float(word) for word in capacities.split()]
    except ValueError:
        raise ConfigError(f"--capacities is {capacities!r}, allowed: numbers separated by spaces") from None
    if borne and len(borne) != nodes:
        raise ConfigError(f"--capacities has {len(borne)} numbers, allowed: one per node, {nodes}")
    places: list[dict[str, Scalar]] = [{"data-dir": str(each)} for each in folders]
    places = places or [{"partition-id": k, "num-partitions": nodes} for k in range(nodes)]
    if settings.dp.enabled and not (folders or files):  # a rehearsal, with the hash of the same run in this process
        places = [{**place, "secure-rng": settings.dp.secure_rng} for place in places]
    code = ",".join(dict.fromkeys(each.target for each in code_in(settings.to_dict())))
    if code and not files:  # the nodes of a rehearsal are the user's own; a policy says for itself what it allows
        places = [{**place, "allowed-plugins": code} for place in places]
    for place, capacity in zip(places, borne, strict=False):
        place["capacity"] = capacity
    for place, file in zip(places, files, strict=False):
        place[POLICY_FILE] = str(file)
    folder = Path(settings.out_dir) / "deployment"
    placement = Placement(num_clients=nodes, nodes=tuple(places), deployment=folder)
    if not force:
        check_marked(folder, "deployment")
    _run_once(placement, settings, out, force and not resume)


def _paths(text: str) -> list[Path]:
    return [Path(each.strip()).expanduser().resolve() for each in text.split(",") if each.strip()]


@deploy_app.command()
def certificates(
    hosts: Annotated[
        list[str], typer.Option("--host", help="A name or address of the SuperLink. You may repeat the option.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder for the three files.")] = Path("certificates"),
    days: Annotated[int, typer.Option("--days", help="How many days the certificates are valid.", min=1)] = 365,
) -> None:
    """Make a certificate authority and the SuperLink's certificate.

    Give ca.crt to nodes and users. Give the private key to nobody.
    """
    from fedprune_app.deploy import make_certificates, valid_until

    made = make_certificates(out.expanduser(), hosts, days)
    for path in (made.ca, made.certificate, made.key):
        _say(f": {path}", "made", "green")
    _say(f"valid until {valid_until(made.certificate):%Y-%m-%d}")


@deploy_app.command(name="node-key")
def node_key(
    path: Annotated[Path, typer.Argument(metavar="FILE")],
) -> None:
    """Make a SuperNode's key pair.

    FILE gets the private key, and FILE.pub gets the public key.
    The node's operator keeps the private key.
    The SuperLink's operator registers the public key.
    """
    from fedprune_app.deploy import make_node_key

    public = make_node_key(path.expanduser())
    _say(f": {path} and {public}", "made", "green")
    _say(f"register it: flwr supernode register {public} NAME")


@deploy_app.command()
def database(
    path: Annotated[Path, typer.Argument(metavar="FILE")],
) -> None:
    """Make the SuperLink's database.

    FILE is what flower-superlink gets as --database.
    Only the owner of the file can read it.
    The file shrinks when messages are deleted.
    """
    from fedprune_app.deploy import make_database

    console.print(f"[green]made[/]: {make_database(path.expanduser())}", highlight=False, soft_wrap=True)


@deploy_app.command(name="control-secret")
def control_secret(
    path: Annotated[Path, typer.Argument(metavar="FILE")],
) -> None:
    """Make the secret that users show to the SuperLink's Control API.

    Only the owner of FILE can read it.
    `fedprune deploy superlink` asks users for the secret.
    `fedprune deploy login` lets a user's commands show it.
    """
    from fedprune_app.deploy import make_control_secret

    _say(f": {make_control_secret(path.expanduser())}", "made", "green")


@deploy_app.command()
def login(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
    secret: Annotated[Path, typer.Option("--secret", help="The file with the secret, from the SuperLink's operator.")],
) -> None:
    """Let this user's commands show the secret to a SuperLink's Control API.

    HOST:PORT is the address in the user's Flower configuration.
    The secret is written to credentials.yaml in the folder FLWR_HOME.
    Without FLWR_HOME the folder is ~/.flwr.
    """
    from fedprune_app.deploy import log_in

    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    _say(f": {log_in(address, secret.expanduser(), home)}", "written", "green")


@deploy_app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(
    context: typer.Context,
    secret: Annotated[Path, typer.Option("--control-secret", help="The file of `fedprune deploy control-secret`.")],
) -> None:
    """Start Flower's SuperLink, whose Control API then asks users for the secret.

    All other options are those of flower-superlink.
    Without the secret everybody who reaches the Control API may start runs.
    """
    from fedprune_app.deploy import superlink_command
    from fedprune_app.engine.superlink import SECRET_VARIABLE

    command = superlink_command(context.args)
    if not secret.expanduser().is_file():
        raise ConfigError(f"--control-secret is {str(secret)!r}, allowed: a file")
    os.execve(command[0], command, {**os.environ, SECRET_VARIABLE: str(secret.expanduser())})


@deploy_app.command()
def check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
    ca: Annotated[Path, typer.Option("--root-certificates", help="The ca.crt from the SuperLink's operator.")],
) -> None:
    """Check that a SuperLink answers and that its certificate is trusted.

    HOST:PORT is the address at which nodes reach the SuperLink.
    The exit code is 1 if nothing answers there with a trusted certificate.
    Call this command before you start a node.
    """
    from fedprune_app.deploy import check_link

    until = check_link(address, ca.expanduser())
    console.print(f"{address} speaks TLS, its certificate is valid until {until:%Y-%m-%d}", highlight=False)


@deploy_app.command()
def healthy(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
) -> None:
    """Ask a SuperLink, SuperExec or SuperNode whether it serves.

    HOST:PORT is the program's --health-server-address.
    The exit code is 1 if the program does not serve.
    The command is for healthchecks.
    """
    from fedprune_app.deploy import is_healthy

    if not is_healthy(address):
        raise LaunchError(f"{address} does not serve")


def main() -> None:
    """Run the command line, and tell each error of a user in one line.

    The exit code is 2 for a wrong command or setting, and 1 for a failed run.
    """
    logging.getLogger("flwr").setLevel(os.environ.get("FEDPRUNE_LOG", "ERROR"))  # the progress bar shows what matters
    try:
        code = app(standalone_mode=False)  # Typer turns Ctrl-C into 130
    except click.NoSuchOption as error:
        key = error.option_name.lstrip("-")
        meant = f"; settings are given as KEY=VALUE: {key}=..." if key in OPTIONS else ""
        _say(f" there is no option {error.option_name}{meant}", "error:", "red")
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LeftGoing as error:
        _say(f" {_one_line(error)}", "not followed any more:", "yellow")
        sys.exit(1)
    except LaunchError as error:
        _say(f" {_one_line(error)}", "failed:", "red")
        sys.exit(1)
    except (ValueError, OSError) as error:
        _say(f" {_one_line(error)}", "error:", "red")
        sys.exit(2)
    if code == _INTERRUPTED:
        _say("; what is finished is on disk, `--resume` goes on from there", "interrupted", "yellow")
    sys.exit(code)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
