"""Commands that start runs: ``run``, ``check``, ``check-data`` and ``sweep``."""

from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.text import Text

from fedprune_app.cli.options import (
    AcceptLoss,
    Configs,
    Engine,
    Out,
    Overrides,
    Plugins,
    RayAddress,
    Workers,
    complete_run,
)
from fedprune_app.config import ConfigError
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.errors import LaunchError
from fedprune_app.files import LATEST, folder_for
from fedprune_app.preflight.inputs import Placement, inputs_in
from fedprune_app.preflight.prepare import Prepared, prepare
from fedprune_app.terminal import console, echo, print_rows

app = typer.Typer()
_MOST_LINES = 10  # of one kind that are printed at the end of a run


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
        str,
        typer.Option("--superlink", help="Run on real nodes. This is the name of a SuperLink in Flower's config.toml."),
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    accept_loss: AcceptLoss = False,
    plugin: Plugins = None,
) -> None:
    """Run one federation and write its results to a run folder.

    Each KEY=VALUE is a setting; `fedprune list --keys` shows all of them.
    """
    placement = Placement(engine, clients, workers, ray_address=ray_address, superlink=superlink)
    if superlink and out is None:
        raise ConfigError("--out", "", "a folder of the server")
    is_new = not (superlink or resume)
    with folder_for(out, is_new) as folder:
        inputs = inputs_in(config, overrides, plugin)
        inputs = inputs.for_run_in(folder, resume=resume, accept_loss=accept_loss)
        run_once(prepare(inputs, placement), folder, LATEST if out is None and is_new else None)


@app.command(name="check")
def check_run(
    overrides: Overrides = None,
    config: Configs = None,
    clients: Annotated[int, typer.Option("--clients", help="How many clients to simulate.", min=1)] = 20,
    plugin: Plugins = None,
) -> None:
    """Check a run without starting it, and describe its data, network and device.

    Each KEY=VALUE is a setting; `fedprune list --keys` shows all of them.
    The command reads the data, deals them, and builds the network and the server.
    """
    from fedprune_app.preflight.describe import described

    prepared = prepare(inputs_in(config, overrides, plugin), Placement("inprocess", clients))
    print_notes(prepared.notes)
    print_rows(described(prepared))
    echo(": a run can start with these settings", "checked", "green")


@app.command(name="check-data")
def check_data(overrides: Overrides = None, config: Configs = None, plugin: Plugins = None) -> None:
    """Read the data of a run, and describe them.

    Each KEY=VALUE is a setting, such as dataset=image-folder data-dir=DIR.
    With system=fedspallm they are texts, which the run's model cuts into tokens.
    `fedprune list` describes the data-dir of each dataset.
    """
    from fedprune_app.preflight.describe import data_found

    settings = prepare(inputs_in(config, overrides, plugin)).config
    with console.status(Text(f"reading {settings.dataset}")):
        rows, warnings = data_found(settings)
    print_rows(rows)
    print_notes(warnings)


@app.command()
def sweep(
    matrix: Annotated[Path, typer.Argument(metavar="FILE.yaml")],
    overrides: Overrides = None,
    out: Out = Path("runs/sweep"),
    clients: Annotated[
        int | None,
        typer.Option(
            "--clients",
            help="How many clients to simulate: else as many as a resumed sweep has, as FILE.yaml says, or 20.",
        ),
    ] = None,
    workers: Workers = None,
    engine: Engine = "ray",
    ray_address: RayAddress = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the sweep in --out stopped.")] = False,
    plugin: Plugins = None,
) -> None:
    """Run a matrix of experiments and write tables of their results.

    FILE.yaml lists systems, datasets and seeds, or settings to search among.
    Each KEY=VALUE is a setting of all runs; `fedprune list --keys` shows all.
    Runs that have finished before are skipped.
    The tables are written as markdown, csv and LaTeX.
    """
    from fedprune_app.sweeps.matrix import read_matrix

    parsed_matrix = read_matrix(matrix)
    inputs = inputs_in(None, overrides, plugin).for_run_in(out, resume=resume)
    from fedprune_app.sweeps.sweep import sweep as make

    outcome = make(parsed_matrix, inputs, Placement(engine, clients, workers, ray_address=ray_address), console)
    for path in outcome.tables:
        echo(f"table: {path}")
    if outcome.best:
        echo(f"best settings, as a matrix with new seeds: {outcome.best}")
    outcome.check()


NewFolder = Annotated[Path, typer.Option("-o", "--output", help="The folder for the new model.")]
SumsRun = Annotated[Path, typer.Argument(metavar="RUN", autocompletion=complete_run)]
ClientsRun = Annotated[Path, typer.Argument(metavar="CLIENTS", autocompletion=complete_run)]


@app.command()
def advise(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option("--minutes", help="How long it may take, in about.")] = 20.0,
    epsilon: Annotated[
        float, typer.Option("--epsilon", help="Run private methods too, with this ε for each example.", min=0)
    ] = 0.0,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder for page, models and runs.")] = Path(
        "advice"
    ),
    engine: Engine = "inprocess",
) -> None:
    """Say whether to federate, how to prune, and what privacy costs, on your data.

    DIR has <site>/<class>/* (images), or train.csv with a column of sites.
    Each KEY=VALUE is a setting of all runs, such as owner-column=clinic.
    A few methods run with three seeds.
    """
    from fedprune_app.results.advice import write_advice
    from fedprune_app.results.report import write_report
    from fedprune_app.sweeps.advise import advise as make

    output = output.expanduser().resolve()
    found = make(
        folder.expanduser().resolve(),
        inputs_in(None, overrides).chosen,
        output,
        console,
        minutes=minutes,
        epsilon=epsilon,
        engine=engine,
    )
    runs = [run.folder for group in found.methods.values() for run in group.runs]
    write_report(runs, output / "report.html")
    page = write_advice(found, output / "advice.html")
    for answer in found.answers:
        print_rows([(answer.question, answer.answer), *(("", detail) for detail in answer.details)])
    print_notes(found.notes)
    echo(f": open {page}", "done", "green")


@app.command()
def compress(folder: SumsRun, output: NewFolder, overrides: Overrides = None) -> None:
    """Make another model of the sums that a run kept, without its clients.

    RUN is the folder of a completed run with fedspallm.keep-sums=true.
    KEY=VALUE is of density, fedspallm.bits, .pattern or .refine.
    """
    from fedprune_app.exports.compressed import compress as made

    _print_made(made(folder, inputs_in(None, overrides).on_command_line, output), output)


@app.command()
def join(folder: SumsRun, clients: ClientsRun, output: NewFolder) -> None:
    """Add clients to the sums that a run kept, and make its model anew.

    RUN is the folder of a completed run with fedspallm.keep-sums=true.
    CLIENTS is the folder of another one, in which these clients took part.
    The model is the one that a run of all of them makes.
    """
    from fedprune_app.exports.compressed import combine

    _print_made(combine(folder, clients, output), output)


@app.command()
def forget(folder: SumsRun, clients: ClientsRun, output: NewFolder) -> None:
    """Take clients out of the sums that a run kept, and make its model anew.

    RUN is the folder of a completed run with fedspallm.keep-sums=true.
    CLIENTS is the folder of a run in which they alone sent the same sums again.
    The model is the one that a run of the others makes.
    """
    from fedprune_app.exports.compressed import combine

    info = combine(folder, clients, output, forgets=True)
    _print_made(info, output)
    numbers = ", ".join(map(str, info["forgotten"]))
    echo(
        f" that client {numbers} took part, in {output / 'run.json'}, and models that were given away",
        "left:",
        "yellow",
    )
    echo(f" all of {numbers} until you delete the folders {folder} and {clients}", "left:", "yellow")


def _print_made(info: Values, output: Path) -> None:
    for name, value in info["perplexity"].items():
        echo(f" {value:.2f} on {name}, dense {info['dense_perplexity'][name]['value']:.2f}", "perplexity:", "green")
    if info["epsilon_paid"] is not None:
        echo(f" {info['epsilon_paid']:.2f} at most was paid for the sums, and nothing for this model", "ε:", "green")
    echo(f"models: sha256 {info['final_sha256'][:16]}…")
    print_sizes(info, output)


def run_once(prepared: Prepared, out: Path, link: Path | None = None) -> None:
    """Run one federation, and print how the run ended. ``link`` is made before the run begins."""
    from fedprune_app.launching.processes import read_json
    from fedprune_app.running import run as run_prepared

    try:
        info = run_prepared(prepared, prepared.folder, console, link)
    except LaunchError as error:
        left = read_json(prepared.folder / "run.json")
        if left.get("status") == "failed" and left.get("rounds_completed"):
            raise LaunchError(f"{error}; --resume continues after round {left['rounds_completed']}") from error
        raise
    for kind, key in (("note", "notes"), ("lost", "losses"), ("left out", "clients_left_out")):
        lines = [line for line in info.get(key) or [] if line not in prepared.notes]
        for line in lines[:_MOST_LINES]:
            echo(f" {line}", f"{kind}:", "yellow")
        if (num_more := len(lines) - _MOST_LINES) > 0:
            echo(f" and {num_more} more, see run.json", f"{kind}:", "yellow")
    echo(f" {info['rounds_completed']} rounds in {info.get('seconds', 0):.0f} s", "completed", "green")
    if "final_sha256" in info:
        echo(f"final models: sha256 {info['final_sha256'][:16]}…  results: {out}")
        print_sizes(info, out)
        _print_next_steps(out)
    else:
        echo("results: in the ServerApp's run folder, on its machine")


def _print_next_steps(out: Path) -> None:
    from fedprune_app.results.columns import traffic_of
    from fedprune_app.results.reader import load_run
    from fedprune_app.results.texts import progress_line

    run = load_run(out)
    last: ValueDict = {}
    for row in run.rounds:
        last |= {name: value for name, value in row.items() if value is not None}
    echo(f"{progress_line(last)}{(traffic_of(run) or 0) / 1e6:,.1f} MB of training traffic")
    whose = "-o model" if run.headline.startswith("perplexity") else "--client 0 -o client-0.onnx"
    echo(f"next: fedprune report {quote(str(out))} -o report.html")
    echo(f"      fedprune export {quote(str(out))} {whose}")


def print_notes(notes: Iterable[str]) -> None:
    for line in notes:
        echo(f" {line}", "note:", "yellow")


def print_sizes(info: Values, out: Path) -> None:
    """Print the folder of a language model and the size of its weights."""
    for name, key in (("global", "checkpoint_bytes"), ("global-packed", "packed_bytes")):
        if size := (info.get("final_model") or {}).get(key):
            echo(f"{out / 'models' / name}: {size / 1e6:,.2f} MB of weights")
