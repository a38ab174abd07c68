"""The command that tries to break a run's promise of privacy: ``audit``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedprune_app.cli.terminal import Plugins, console, say
from fedprune_app.errors import LaunchError
from fedprune_app.preflight.given import given_in
from fedprune_app.preflight.placement import Placement
from fedprune_app.preflight.prepare import prepare
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
    from fedprune_app.files import replace_file
    from fedprune_app.privacy.audit import JSON_KEYS
    from fedprune_app.results.ownership import check_json_file
    from fedprune_app.trials.audit import Question
    from fedprune_app.trials.audit import audit as run_audit

    files = [Path(text) for text in settings if "=" not in text]
    given = given_in(files, [text for text in settings if "=" in text], plugin)
    prepared = prepare(given, Placement("inprocess", clients))
    config = prepared.config
    question = Question(canaries, guesses, delta, confidence, client, without_noise)
    if json_file is not None and not force:
        check_json_file(json_file.expanduser().resolve(), JSON_KEYS)
    with console.status(Text(f"auditing {config.system}: {config.num_server_rounds} rounds of {clients} clients")):
        finding = run_audit(prepared, question)
    table = Table(box=None, show_header=False)
    for name, text in (
        ("lower bound on ε", f"{finding.bound:.3f}"),
        ("ε that the ledger claims", f"{finding.claim:.3f}"),
        ("δ", f"{finding.delta:g}"),
        ("canaries", f"{finding.canaries}"),
        ("guesses", f"{finding.guesses}"),
        ("correct", f"{finding.correct} ({finding.correct / finding.guesses:.1%})"),
        ("confidence", f"{finding.confidence:.1%}"),
    ):
        table.add_row(name, text)
    Terminal().print(table)
    if json_file is not None:  # nothing is lost where it cannot be written
        replace_file(json_file.expanduser().resolve(), json.dumps(finding.to_dict(), indent=1).encode())
    if not finding.holds:
        raise LaunchError(finding.verdict)
    say(f": {finding.verdict}", "passed", "green")
