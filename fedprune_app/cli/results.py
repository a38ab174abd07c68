"""Commands for the results and models of runs, and ``audit``, which attacks a private configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedprune_app.cli.options import Plugins, complete_run
from fedprune_app.config import ConfigError
from fedprune_app.core.named import ValueDict
from fedprune_app.errors import LaunchError
from fedprune_app.preflight.inputs import Placement, inputs_in, of_run, trusted_code
from fedprune_app.preflight.prepare import prepare
from fedprune_app.terminal import Terminal, console, echo, print_rows

if TYPE_CHECKING:
    from fedprune_app.exports.predict import Prediction
    from fedprune_app.results.groups import Group

app = typer.Typer()
Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", autocompletion=complete_run)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
_MOST_TOKENS = 64  # that `predict` adds to a text
_LOOK_SECONDS, _QUIET_LOOKS = 5, 3  # of `report --watch`


@app.command()
def report(
    folders: Folders,
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
    from fedprune_app.results.report import check_page_name, each_once, run_folders, write_report

    check_page_name(output)
    if watch:
        _watch(folders, output, force)
    runs = each_once(run for folder in folders for run in run_folders(folder))
    left_out: list[str] = []
    write_report(runs, output, force=force, on_left_out=left_out.append)
    for reason in left_out:
        echo(f" {reason}", "left out:", "yellow")
    count = len(runs) - len(left_out)
    echo(f"report of {count} run{'s' * (count != 1)}: {output.resolve()}")


@app.command()
def table(
    folders: Folders,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write this file: .tex, .csv or .md. Default: print it.")
    ] = None,
    columns: Annotated[
        str, typer.Option("--columns", help="The columns, with commas. Their names are those of a sweep's table.csv.")
    ] = "",
    intervals: Annotated[
        bool, typer.Option("--intervals/--deviations", help="Beside a mean: Student's 95 % interval, or ± SD.")
    ] = True,
    best_bold: Annotated[
        bool,
        typer.Option(
            "--best-bold", help="Bold: the most accurate, if others are clearly behind, and those that are not."
        ),
    ] = False,
    force: Force = False,
) -> None:
    """Write a table for a paper.

    By default the columns are the accuracy, upload, operations and density.
    Each DIR is a run folder, or a folder of run folders.
    """
    from fedprune_app.files import replace_file
    from fedprune_app.results.ownership import check_new_file
    from fedprune_app.results.tables import paper_rows, table_text

    suffix = ".md" if output is None else output.suffix
    if suffix not in (".tex", ".csv", ".md"):
        raise ConfigError("--output", output, "a file that ends in .tex, .csv or .md")
    if output is not None:
        check_new_file(output, force)
    keys = [key.strip() for key in columns.split(",") if columns]
    text = table_text(suffix, *paper_rows(_groups(folders), keys, intervals=intervals, best_bold=best_bold))
    if output is None:
        typer.echo(text, nl=False)
        return
    replace_file(output, text.encode())
    echo(f": {output.resolve()}", "written", "green")


@app.command()
def figure(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR... FIGURE", autocompletion=complete_run)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write this file: .pdf, .svg or .png.")],
    view: Annotated[str, typer.Option("--view", help="A view of the figure, such as Personal. Default: first.")] = "",
    force: Force = False,
) -> None:
    """Write a FIGURE of the report to a file, such as accuracy-by-bytes.

    Each DIR is a run folder, or a folder of run folders.
    """
    from fedprune_app.files import replace_file
    from fedprune_app.results.ownership import check_new_file
    from fedprune_app.results.paper import check_figure_file, drawn

    check_figure_file(output)
    check_new_file(output, force)
    groups = _groups(folders[:-1])
    replace_file(output, drawn(groups, str(folders[-1]), output.suffix[1:], view))
    if max(len(group.runs) for group in groups) == 1:
        echo(" no spread is shown, since each system has one seed", "note:", "yellow")
    echo(f": {output.resolve()}", "written", "green")


@app.command()
def paper(
    folders: Folders,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder for the files.")] = Path("paper"),
    force: Force = False,
) -> None:
    """Write what a paper takes from runs.

    The files are a figure, a table, a paragraph on the settings, and references.
    Each DIR is a run folder, or a folder of run folders.
    """
    from fedprune_app.results.paper import write_paper

    for path in write_paper(_groups(folders), output, force):
        echo(f": {path.resolve()}", "written", "green")


def _groups(folders: Iterable[Path]) -> list[Group]:
    from fedprune_app.results.groups import group_runs
    from fedprune_app.results.reader import load_run
    from fedprune_app.results.report import each_once, run_folders

    return group_runs([load_run(run) for run in each_once(run for folder in folders for run in run_folders(folder))])


def _watch(folders: list[Path], output: Path, force: bool) -> None:
    """Write a page that reloads itself, every few seconds, until no run in ``folders`` is running."""
    from fedprune_app.results.report import each_once, is_any_running, run_folders, write_report

    quiet = 0  # looks in a row without a running run: between the runs of a sweep there is none for a moment
    with suppress(KeyboardInterrupt), console.status(Text(f"watching; open {output.resolve()}")):
        while quiet < _QUIET_LOOKS:
            runs = each_once(run for folder in folders for run in run_folders(folder))
            write_report(runs, output, force=force, refresh_seconds=_LOOK_SECONDS)
            quiet = 0 if is_any_running(runs) else quiet + 1
            time.sleep(_LOOK_SECONDS if quiet < _QUIET_LOOKS else 0)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", autocompletion=complete_run)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write this file, or for a language model folder.")],
    client: Annotated[
        str | None, typer.Option("--client", help="Export the personal model of this client: a number or a name.")
    ] = None,
    is_global: Annotated[bool, typer.Option("--global", help="Export the global model.")] = False,
    format: Annotated[
        str,
        typer.Option("--format", help="safetensors or onnx; packed or gguf. Default: as the file's suffix says."),
    ] = "",
    type: Annotated[
        str,
        typer.Option("--type", help="Of a .gguf file's matrices, such as Q4_0. Default: the model's own dtype."),
    ] = "",
    imatrix: Annotated[
        bool, typer.Option("--imatrix", help="Write llama.cpp's importance matrix by kept sums, in place of the model.")
    ] = False,
    force: Force = False,
    state_dir: Annotated[
        str, typer.Option("--state-dir", help="Where the run's state-dir is now, if it has moved.")
    ] = "",
    data_dir: Annotated[
        str,
        typer.Option("--data-dir", help="Where the run's data-dir is now, if it has moved and data are read."),
    ] = "",
    plugin: Plugins = None,
) -> None:
    """Write the smallest model of a client, or the global model.

    RUN is the folder of a completed run.
    The command prints the model's costs beside those of the dense model.
    For a language model the format is packed, or gguf for llama.cpp and Ollama.
    RUN may then be a checkpoint of transformers whose pruned weights are zeros.
    """
    from fedprune_app.exports.formats import check_options, export_model, format_of, is_gguf, is_language_model

    if type and not is_gguf(output):
        raise ConfigError("--type", type, "none, since it has no effect", condition=f"with --output {str(output)!r}")
    if imatrix and (type or not is_gguf(output) or not is_language_model(folder)):
        raise ConfigError("--imatrix", True, "with RUN of a language model and -o FILE.gguf, without --type")
    if is_language_model(folder):
        check_options(output, client, format, state_dir=state_dir, data_dir=data_dir, plugin=plugin)
        if imatrix:
            _export_imatrix(folder, output.expanduser(), force)
        elif is_gguf(output):
            _export_gguf(folder, output.expanduser(), type, force)
        else:
            _export_language_model(folder, output, force)
        return
    format = format_of(output, format)
    if (client is None) != is_global:
        raise ConfigError("--client", ..., "one of them", which="and --global are both given, or none of them is")
    info, full, small = export_model(
        folder,
        client,
        format,
        output,
        force=force,
        state_dir=state_dir,
        data_dir=data_dir,
        trusted=trusted_code(plugin),
    )
    model_name = "global model" if client is None else f"client {client}"
    rows = [
        ("bytes on disk", full.file_bytes, small.file_bytes, ",.0f"),
        ("parameters kept", full.parameters, small.parameters, ",.0f"),
        ("FLOPs per example", full.flops, small.flops, ",.0f"),
        *((f"ms per batch of {size}", ms, small.milliseconds[size], ".3g") for size, ms in full.milliseconds.items()),
    ]
    table = _costs(f"{info.model} of {info.system}, {model_name}, after round {info.round}", format, rows)
    Terminal().print(table)
    if format == "onnx" and small.zeros:
        zeros = f"{small.zeros:,} pruned weights are zeros in the file, and its runtimes do not skip zeros"
        echo(f" {zeros}; system=subfedavg-hy removes channels, which saves bytes and time", "note:", "yellow")
    echo(f": {output.resolve()}", "exported", "green")


def _export_imatrix(folder: Path, output: Path, force: bool) -> None:
    from fedprune_app.exports.language import export_imatrix

    with console.status(Text(f"writing {output}")):
        segments = export_imatrix(folder, output, force=force)
    echo(f": {output.resolve()}, of {segments} segments that stayed with their clients", "exported", "green")
    echo(f"llama-quantize --imatrix {output} model.gguf model-q4.gguf Q4_K_M", "use:", "green")


def _export_language_model(folder: Path, output: Path, force: bool) -> None:
    from fedprune_app.exports.formats import pack_model

    with console.status(Text(f"packing {folder}")):
        packed_model = pack_model(folder, output.expanduser(), force=force)
    rows = [("bytes on disk", packed_model.dense_bytes, packed_model.packed_bytes, ",.0f")]
    Terminal().print(_costs(f"density {packed_model.density:.2f}", "packed", rows))
    echo(f": {output.resolve()}", "exported", "green")


def _export_gguf(folder: Path, output: Path, type: str, force: bool) -> None:
    from fedprune_app.exports.formats import machine
    from fedprune_app.exports.language import export_gguf
    from fedprune_app.models.gguf_keys import import_gguf

    with console.status(Text(f"writing {output}")):
        costs = export_gguf(folder, output, type, force=force)
    caption = f"ms of one thread in llama.cpp, in turns, on {machine()}; perplexity before weights are rounded"
    table = Table(title=output.name, caption=caption, box=None)
    for column in ("", "MB", "ms per token", "perplexity"):
        table.add_column(column, justify="right" if column else "left")
    for model, num_bytes, *numbers in costs:
        cells = ["-" if number is None else f"{number:.3g}" for number in numbers]
        table.add_row(model, f"{num_bytes / 1e6:,.2f}", *cells)
    Terminal().print(table)
    loaded = f'AutoModelForCausalLM.from_pretrained("{output.parent}", gguf_file="{output.name}")'
    ollama = f"echo FROM {output.resolve()} > Modelfile && ollama create {output.stem} -f Modelfile"
    here = f'fedprune predict {output} "Once upon a time"'
    ways = {"llama.cpp": f"llama-cli -m {output}", "Ollama": ollama, "transformers": loaded, "here": here}
    if any(tensor.name == "rope_freqs.weight" for tensor in import_gguf().GGUFReader(output).tensors):
        del ways["transformers"]  # which reads no scaled positions
    print_rows(ways.items())
    echo(f": {output.resolve()}", "exported", "green")


def _costs(title: str, form: str, rows: Iterable[tuple[str, float, float, str]]) -> Table:
    """Return a table of the costs of a dense model and an exported one; a row ends with its number format."""
    from fedprune_app.exports.formats import machine

    table = Table(title=title, caption=f"ms of one thread, median, in turns, on {machine()}", box=None)
    for column in ("", "dense", form, "share"):
        table.add_column(column, justify="right" if column else "left")
    for name, dense, small, number in rows:
        table.add_row(name, f"{dense:{number}}", f"{small:{number}}", f"{small / dense:.1%}")
    return table


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL")],
    files: Annotated[list[str], typer.Argument(metavar="FILE...")],
    top: Annotated[int, typer.Option("--top", help="How many classes to show for each example.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    build: Annotated[
        str, typer.Option("--build", help="FILE.py:FUNCTION that builds the network, for one of your own.")
    ] = "",
) -> None:
    """Classify images, or rows of tables, with an exported model.

    MODEL is a file of `fedprune export`: of safetensors, or of ONNX.
    If MODEL is a .gguf file, each FILE is a text, which llama.cpp continues.
    Otherwise a FILE is an image, which is resized for the model.
    For a model of tables, it is a CSV or Parquet table with the same columns.
    """
    from fedprune_app import plugins
    from fedprune_app.exports.formats import is_gguf
    from fedprune_app.exports.predict import predictions

    if is_gguf(model):
        _continue_texts(model, files, as_json)
        return
    function = plugins.function("build", str(Path(build).expanduser().absolute())) if build else None
    errors: list[ValueError] = []
    results = predictions(model, [Path(file) for file in dict.fromkeys(files)], top, function, errors.append)
    if as_json:
        by_file: ValueDict = {}
        for file, row, classes in results:
            if row is None:
                by_file[str(file)] = dict(classes)
            else:
                by_file.setdefault(str(file), []).append(dict(classes))
        typer.echo(json.dumps(by_file, indent=1))
    elif results:
        _print_predictions(results)
    for error in errors:
        echo(f" {error}", "error:", "red")
    if errors:
        raise typer.Exit(2)


def _continue_texts(model: Path, texts: Iterable[str], as_json: bool) -> None:
    from fedprune_app.exports.llama_cpp import LlamaCpp

    runtime = LlamaCpp(model)
    continued = {text: runtime.complete(text, _MOST_TOKENS).text for text in texts}
    if as_json:
        typer.echo(json.dumps(continued, indent=1))
        return
    for text, more in continued.items():
        Terminal().print(text + more, soft_wrap=True)


def _print_predictions(results: Sequence[Prediction]) -> None:
    of_rows = results[0].row is not None
    table = Table(box=None, pad_edge=False)
    for column in ("table", "row", "class", "probability") if of_rows else ("image", "class", "probability"):
        table.add_column(column, justify="right" if column in ("row", "probability") else "left")
    for file, row, classes in results:
        example = [str(file), str(row)] if of_rows else [str(file)]
        for name, share in classes:
            table.add_row(*example, name, f"{share:.1%}")
            example = [""] * len(example)
    Terminal().print(table)


@app.command()
def audit(
    settings: Annotated[list[str], typer.Argument(metavar="[CONFIG] [KEY=VALUE]...")],
    canaries: Annotated[
        int, typer.Option("--canaries", help="How many canaries. 0: all of the client's examples or groups.", min=0)
    ] = 0,
    delta: Annotated[
        float, typer.Option("--delta", help="The δ of the bound and the claim. 0: dp.delta.", min=0, max=1)
    ] = 0.0,
    confidence: Annotated[float, typer.Option("--confidence", help="The confidence of the bound.")] = 0.95,
    client: Annotated[
        str, typer.Option("--client", help="The client whose data hold the canaries: a number or a name.")
    ] = "0",
    clients: Annotated[
        int | None,
        typer.Option("--clients", help="How many clients to simulate: else 20, or as many as the run has.", min=1),
    ] = None,
    noise_share: Annotated[
        float,
        typer.Option(
            "--noise-share",
            help="Add this share of the noise that is charged. Below 1 the audit should fail.",
            min=0,
            max=1,
        ),
    ] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the --json file even if no audit wrote it.")] = False,
    plugin: Plugins = None,
) -> None:
    """Attack a private configuration to find a lower bound on its ε.

    CONFIG is a run-config file, the name of a shipped one, or a run's folder.
    Each KEY=VALUE is a setting.
    One client's noised sums in one run are looked at, step by step.
    The command prints the bound and the ε that the ledger claims.
    The exit code is 1 if the bound exceeds the claim.
    """
    from fedprune_app.data.splits import owner_names
    from fedprune_app.exports.release import settings_digest
    from fedprune_app.files import replace_file
    from fedprune_app.privacy.audit import JSON_KEYS
    from fedprune_app.results.ownership import check_json_file
    from fedprune_app.results.reader import client_number, read_info
    from fedprune_app.testing.audit import Question
    from fedprune_app.testing.audit import audit as run_audit

    files, overrides = [Path(text) for text in settings if "=" not in text], [text for text in settings if "=" in text]
    of, placement = None, Placement("inprocess", clients)
    if len(files) == 1 and (files[0] / "run.json").is_file():
        info = read_info(files.pop())
        of = None if overrides else info["final_sha256"]
        inputs = of_run(info, trusted_code(plugin))
        inputs = replace(inputs, on_command_line=inputs_in(None, overrides).on_command_line)
        placement = placement.resumed(info)
    else:
        inputs = inputs_in(files, overrides, plugin)
    prepared = prepare(inputs, placement)
    config = prepared.config
    number = client_number(owner_names(config), client)
    question = Question(canaries, delta, confidence, number, noise_share)
    if json_file is not None and not force:
        check_json_file(json_file.expanduser().resolve(), JSON_KEYS | {"settings", "run", "made"})
    with console.status(
        Text(f"auditing {config.system}: {config.num_server_rounds} rounds of {placement.clients} clients")
    ):
        finding = run_audit(prepared, question)
    table = Table(box=None, show_header=False)
    for name, text in (
        ("lower bound on ε", f"{finding.bound:.3f}"),
        ("ε that the ledger claims", f"{finding.claim:.3f}"),
        ("δ", f"{finding.delta:g}"),
        ("canaries", f"{finding.canaries}"),
        ("noised sums", f"{finding.tally.steps}"),
        ("found where they are in", f"{finding.tally.found} of {finding.tally.present}"),
        ("cleared where they are not", f"{finding.tally.cleared} of {finding.tally.absent}"),
        ("confidence", f"{finding.confidence:.1%}"),
    ):
        table.add_row(name, text)
    Terminal().print(table)
    content = {
        **finding.to_dict(),
        "settings": settings_digest(config),
        "run": of,
        "made": datetime.now(UTC).isoformat(),
    }
    if json_file is not None:  # nothing is lost where it cannot be written
        replace_file(json_file.expanduser().resolve(), json.dumps(content, indent=1).encode())
    if not finding.holds:
        raise LaunchError(finding.verdict)
    echo(f": {finding.verdict}", "passed", "green")


@app.command()
def release(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", show_default=False, autocompletion=complete_run)] = None,
    client: Annotated[
        int | None, typer.Option("--client", help="Release this client's model, not the common one.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write this new folder.")] = Path("pack"),
    audit_file: Annotated[
        Path | None, typer.Option("--audit", help="The file that `fedprune audit RUN --json FILE` wrote.")
    ] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help="The policy file of the sites' nodes.")] = None,
    ledger: Annotated[
        list[Path] | None,
        typer.Option(
            "--ledger",
            exists=True,
            help="A client's ledger that is not in the run's folder. You may repeat the option.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="Release in spite of this refusal, in red. You may repeat the option."),
    ] = None,
    verify: Annotated[Path | None, typer.Option("--verify", help="Check this pack, and write nothing.")] = None,
    plugin: Plugins = None,
) -> None:
    """Pack a private run's model for whoever decides whether it may leave.

    RUN is the folder of a completed run.
    The pack has the model, the promise, attacks and provenance.
    Its README.html is a page to read and sign.
    It is refused where something lacks, such as an audit of the settings.
    """
    from fedprune_app.exports import release as releases

    if verify is not None:
        for number, value in releases.verify(verify).items():
            echo(f" {number}: ε = {value:.4g}", "ledger", "green")
        echo(f": {verify.resolve()}", "verified", "green")
        return
    if run is None:
        raise ConfigError("RUN", ..., "a run folder, or --verify", which="is not given")
    for name in allow or ():
        if name not in releases.REFUSALS:
            raise ConfigError("--allow", name, ", ".join(releases.REFUSALS))
    question = releases.Question(run, client, audit_file, policy, ledger or (), allow or (), trusted_code(plugin))
    echo(f": {releases.release(question, output.expanduser()).resolve()}", "released", "green")
