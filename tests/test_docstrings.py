"""What is public says what it is: a docstring whose first line is one sentence, and help for all that can be typed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path

import click
import pytest
import typer

from devtools.faults.__main__ import app as faults
from fedprune_app import cli

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedprune_app", "strategies", "clients")
ROOMS = ["devtools.faults", *PACKAGES]
ROOMS += sorted(f"fedprune_app.{path.parent.name}" for path in ROOT.glob("fedprune_app/*/__init__.py"))
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules(room: str) -> list[str]:
    """Return the modules of a room, such as ``fedprune_app.core``; those of ``fedprune_app`` itself are its files."""
    folder = ROOT / room.replace(".", "/")
    paths = folder.glob("*.py") if room == "fedprune_app" else folder.rglob("*.py")
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return sorted(name.removesuffix(".__init__") for name in names)


@cache
def source(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    return (node for node in body if isinstance(node, Definition) and not node.name.startswith("_"))


def names_in(module: str) -> dict[str, tuple[str, str]]:
    """Return where each imported name of a module comes from: (module, name there)."""
    found = {}
    for node in ast.walk(source(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: (node.module, each.name) for each in node.names}
    return found


def overrides_documented(module: str, cls: ast.ClassDef, method: str) -> bool:
    """Return whether a base of the class, ours or a library's, has a docstring for the method."""
    for base in cls.bases:
        first, *rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")
        home, *names = *names_in(module).get(first, (module, first)), *rest
        if home.split(".")[0] not in PACKAGES:
            its = reduce(
                lambda found, name: getattr(found, name, None), [*names, method], importlib.import_module(home)
            )
            if its is not None and its.__doc__:
                return True
            continue
        for found in source(home).body:
            if isinstance(found, ast.ClassDef) and found.name == names[-1]:
                own = [node for node in definitions(found.body) if node.name == method]
                if any(map(ast.get_docstring, own)) or overrides_documented(home, found, method):
                    return True
    return False


def public(module: str) -> Iterator[tuple[str, str | None]]:
    """Yield (name, docstring) of a module that has content, its public classes and functions, and their methods."""
    tree = source(module)
    if tree.body:
        yield module, ast.get_docstring(tree)
    for node in definitions(tree.body):
        yield f"{module}.{node.name}", ast.get_docstring(node)
        # a protocol says what it wants of others' classes, whose methods have docstrings
        is_protocol = isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
        for method in definitions(node.body) if isinstance(node, ast.ClassDef) and not is_protocol else ():
            decorators = {ast.unparse(each) for each in method.decorator_list}
            if decorators & {f"{method.name}.setter", "overload"}:
                continue
            text = ast.get_docstring(method)
            if text is not None or not overrides_documented(module, node, method.name):
                yield f"{module}.{node.name}.{method.name}", text


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_public_has_a_docstring_that_begins_with_a_sentence_of_one_line(room):
    wrong = []
    assert modules(room)
    for module in modules(room):
        for name, text in public(module):
            first, *more = (text or "").splitlines() or [""]
            if not first.endswith(".") or (more and more[0]):
                wrong.append(f"{name}: {first or 'no docstring'}")
    assert not wrong, "\n".join(wrong)


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
