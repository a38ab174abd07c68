"""The ``fedprune`` command, for tasks that Flower's own command line does not cover."""

import io
import logging
import os
import sys
from typing import Annotated

import click
import typer

from fedprune_app import __version__
from fedprune_app.cli import demo, deploying, results, running
from fedprune_app.config import OPTIONS, ConfigError
from fedprune_app.config.errors import OTHER_WORDS
from fedprune_app.core.texts import one_line
from fedprune_app.engine.printable import keep_logs_printable
from fedprune_app.errors import LaunchError, RunDetached
from fedprune_app.terminal import echo

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train, prune and compare personalised federated models.",
)
for _commands in (running, results, demo):
    app.add_typer(_commands.app)
app.add_typer(deploying.app, name="deploy", help="Deploy on real nodes, with TLS and keys; see docs/deploy.md.")
_INTERRUPTED = 130


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"fedprune {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, prune and compare personalised federated models."""


def main(commands: typer.Typer = app) -> None:
    """Run the command line of ``commands``, and print each error of a user in one line.

    The exit code is 2 for a wrong command or setting, and 1 for a failed run.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal without ε or Chinese names shows them as escapes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    keep_logs_printable()
    try:
        level = (os.environ.get("FEDPRUNE_LOG") or "ERROR").upper()  # the progress bar is enough
        if level not in logging.getLevelNamesMapping():
            raise ConfigError("FEDPRUNE_LOG", level, ", ".join(logging.getLevelNamesMapping()))
        logging.getLogger("flwr").setLevel(level)
        for argument in sys.argv[1:]:  # a variable of the shell was empty; as a path it would be the current folder
            if not argument or (argument.startswith("--") and argument.endswith("=")):
                raise ConfigError("argument", argument, "a text, or no such argument")
        code = commands(standalone_mode=False)  # Typer turns Ctrl-C into 130
    except click.NoSuchOption as error:
        key = error.option_name.lstrip("-")
        key = OTHER_WORDS.get(key, key)
        advice = f"; settings are given as KEY=VALUE: {key}=..." if key in OPTIONS else ""
        echo(f" there is no option {error.option_name}{advice}", "error:", "red")
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except RunDetached as error:
        echo(f" {one_line(error)}", "not followed any more:", "yellow")
        sys.exit(1)
    except LaunchError as error:
        echo(f" {one_line(error)}", "failed:", "red")
        sys.exit(1)
    except (ValueError, OSError) as error:
        echo(f" {one_line(error)}", "error:", "red")
        sys.exit(2)
    if code == _INTERRUPTED:
        echo(
            "; if the run had begun, `--resume` goes on from what is on disk (`advise` by itself)",
            "interrupted",
            "yellow",
        )
    sys.exit(code)
