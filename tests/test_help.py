"""All that can be typed has help in whole sentences."""

from __future__ import annotations

from collections.abc import Iterator

import click
import typer

from devtools.faults.__main__ import app as faults
from fedprune_app import cli


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


def test_every_command_and_option_has_help_in_whole_sentences():
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    for name, command in [*commands(group), ("devtools.faults", typer.main.get_command(faults))]:
        said = command.help or ""
        assert said.splitlines()[0].endswith("."), name
        assert max(map(len, said.splitlines())) < 79, f"{name}: a terminal of 80 columns would break the line"
        for option in command.params:
            if isinstance(option, click.Option) and option.name != "help":
                assert (option.help or "").endswith("."), f"{name} {option.opts[0]}"
            elif isinstance(option, click.Argument):
                words = option.make_metavar(click.Context(command)).replace("[", " ").replace("]", " ").split()
                missing = [word for word in words if word.rstrip(".") not in said and word.strip(".")]
                assert not missing, f"{name}: its help does not say what {missing} is"
