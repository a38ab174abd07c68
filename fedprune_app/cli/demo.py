"""Commands for a first look: ``list`` and ``demo``, which takes three minutes on two cores."""

import inspect
import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedprune_app.cli.options import Out, Plugins, Workers, names_by_key, values_of
from fedprune_app.cli.running import print_sizes
from fedprune_app.config import OPTIONS, ConfigError, Option, Scalar, is_used, toml_value
from fedprune_app.config.toml import gallery_systems
from fedprune_app.files import replace_file
from fedprune_app.preflight.combinations import unknown_name
from fedprune_app.preflight.inputs import Placement, RunInputs, inputs_in
from fedprune_app.preflight.prepare import check_out, prepare
from fedprune_app.results.ownership import check_free, is_marked
from fedprune_app.results.reader import read_info
from fedprune_app.terminal import Terminal, console, echo

DEMO_CLIENTS = 20
DEMO_SYSTEMS = ("standalone", "fedavg", "subfedavg", "dispfl")
LLM_CLIENTS = 4
LLM_DENSITIES = (0.5, 0.3)
_COMMON = (
    "num-server-rounds", "local-epochs", "learning-rate", "density", "dataset", "partition", "model",
)  # fmt: skip


def demo_settings(system: str) -> dict[str, Scalar]:
    """Return the settings of one system's demo run: the embedded digits, label shares of each client by Dirichlet(0.3).

    A client has 72 images of several classes, so it gains from a federation, but little from gossip at density 0.5.
    """
    return {
        "system": system,
        "evaluate-every": 2,
        "partition": "dirichlet-client",
        "num-server-rounds": 20,
        "fraction-train": 0.5,
        **({"density": 0.8, "dispfl.growth": "random"} if system == "dispfl" else {}),
    }


def llm_settings(density: float) -> dict[str, Scalar]:
    """Return the settings of one run on the embedded language model; clients have packages of the standard library."""
    return {
        "system": "fedspallm",
        "dataset": "stdlib",
        "num-server-rounds": 1,
        "fraction-train": 1.0,
        "density": density,
        "batch-size": 64,
        "fedspallm.deal": "one",
        "fedspallm.block-size": 16,  # an eighth of the model's width
        "fedspallm.segments": 32,
        "fedspallm.test-windows": 256,
    }


def check_replaceable(folder: Path) -> None:
    """Raise :class:`ConfigError` unless a demo may run in ``folder`` and replace its content.

    A demo may replace an earlier demo's run, unless that run was resumed.
    """
    check_out(folder)
    check_free(folder)
    is_there = (folder / "run.json").exists()
    if is_there and (not is_marked(folder, "demo") or read_info(folder).get("resumed_after_rounds")):
        raise ConfigError("--out", folder, "another folder", which="holds a run that is no demo's")


# --- the commands -----------------------------------------------------------------------------------------------------


app = typer.Typer()


@app.command(name="list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="List all settings with default, meaning, range and choices.")
    ] = False,
    system: Annotated[str, typer.Argument(metavar="[SYSTEM]", autocompletion=lambda: values_of("system"))] = "",
    plugin: Plugins = None,
) -> None:
    """List all systems, datasets, partitions and models.

    With SYSTEM: what it is, and its twelve most common settings.
    With --keys and SYSTEM: all settings that have an effect with that system.
    """
    from fedprune_app.registry import SYSTEMS
    from fedprune_app.results import system_metrics

    if plugin or system not in ("", *SYSTEMS):
        inputs_in(None, [f"system={system}"] if system else None, plugin)
    if system and system not in SYSTEMS:
        raise unknown_name("system", system, SYSTEMS)
    options = {
        key: option
        for key, option in OPTIONS.items()
        if not system or system in option.needs.get("system", [system]) or is_used(system, key)
    }
    kinds = {f"{key}s": names for key, names in names_by_key().items()}
    metrics = {name: system_metrics.described(name) for name in SYSTEMS if system_metrics.of_system(name)}
    if as_json:
        settings = {
            key: {
                "default": option.default,
                "help": option.help,
                "range": option.range,
                "choices": dict(option.choices),
            }
            for key, option in options.items()
        }
        typer.echo(json.dumps({**kinds, "measures": metrics, "keys": settings}, indent=1))
        return
    out = Terminal()
    if system and not keys:
        page = inspect.getdoc(sys.modules[SYSTEMS[system].strategy.__module__]) or ""
        out.print(page.replace("``", "").replace("**", "") + "\n", soft_wrap=True)
        own = sorted(options, key=lambda key: (key not in _COMMON, not key.startswith(f"{system}.")))
        options = {key: options[key] for key in own[:12]}
    if keys or system:
        table = Table(box=None, pad_edge=False)
        table.add_column("key = default", no_wrap=True)
        table.add_column("meaning")
        for key, option in options.items():
            table.add_row(f"{key} = {toml_value(option.default)}", _meaning(option))
        out.print(table)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for kind, entries in kinds.items():
        table.add_row(Text(kind, "bold"), "")
        for name, line in entries.items():
            table.add_row(f"  {name}", line)
            if kind == "systems" and name in metrics:
                table.add_row("", f"own numbers: {', '.join(metric['name'] for metric in metrics[name])}")
    table.add_row(Text("gallery", "bold"), "systems of other papers, each with --plugin FILE")
    for name, file in gallery_systems().items():
        summary = file.read_text(encoding="utf-8").splitlines()[0].strip('"')
        table.add_row(f"  {name}", Text(f"{summary}\n{file}", overflow="fold"))
    out.print(table)


def _meaning(option: Option) -> Group:
    allowed = f" Allowed: {option.range}." if option.range else ""
    choices = Table.grid(padding=(0, 1))
    choices.add_column(no_wrap=True)
    for choice, words in option.choices.items():
        choices.add_row(f"  {choice}:", words)
    return Group(Text(option.help + allowed), *([choices] if option.choices else []))


@app.command()
def new(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Make a plug-in to start from: a system that prunes, its test, and a matrix.

    NAME is the name of the system, and of the new folder.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or Path(name).exists() or name in values_of("system"):
        raise ConfigError("NAME", name, "lower-case letters, digits and dashes, and no folder or system that exists")
    module = name.replace("-", "_")
    files = {"plugin.txt": f"{module}.py", "test.txt": f"test_{module}.py", "matrix.txt": "matrix.yaml"}
    for template, file in files.items():
        text = resources.files("fedprune_app.plugins").joinpath("new", template).read_text(encoding="utf-8")
        text = text.replace("MODULE", module).replace("half", name).replace("Half", name.title().replace("-", ""))
        replace_file(Path(name) / file, text.encode())
    echo(f": {name}; next: cd {name} && pytest test_{module}.py", "made", "green")


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    workers: Workers = None,
    llm: Annotated[bool, typer.Option("--llm", help="Run FedSpaLLM on a small language model.")] = False,
) -> None:
    """Run four systems on the embedded digits and write a report on them.

    The systems are Standalone, FedAvg, Sub-FedAvg and Dis-PFL.
    With --llm the demo runs FedSpaLLM at two densities instead.
    Its language model is first trained here, on Python's own sources.
    The runs of an earlier demo in --out are replaced.
    """
    from fedprune_app.preflight.can_start import embedded_model
    from fedprune_app.results.ownership import check_report_file, mark, remove_run
    from fedprune_app.results.recorder import holds_run
    from fedprune_app.results.report import write_report
    from fedprune_app.running import Session

    out = out.expanduser().resolve()
    cells = {system: demo_settings(system) for system in DEMO_SYSTEMS}
    if llm:
        cells = {f"fedspallm-density{density}": llm_settings(density) for density in LLM_DENSITIES}
    page = out / ("report-llm.html" if llm else "report.html")
    if holds_run(out):
        raise ConfigError("--out", out, "a folder for all runs of the demo", which="holds a run")
    check_report_file(page)
    for name in cells:
        check_replaceable(out / name)
    if llm:
        echo(f"embedded model: {embedded_model(console)}")
    placement = Placement("ray", LLM_CLIENTS if llm else DEMO_CLIENTS, workers)
    with Session(console) as session:
        for name, settings in cells.items():
            folder = out / name
            remove_run(folder)
            mark(folder, "demo")
            prepared = prepare(RunInputs(on_command_line=settings, out=folder), placement)
            print_sizes(session.run(prepared, folder), folder)
    write_report([out / name for name in cells], page)
    echo(f": open {page}", "done", "green")
