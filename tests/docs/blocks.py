"""The fenced blocks of README.md and docs/*.md: what is in them, and whether a command in them could start."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from devtools.faults import __main__ as faults
from fedprune_app import cli
from fedprune_app.config import read_toml
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FEDPRUNE = ("fedprune", "python")
FLOWER = ("flwr", "flower-superlink", "flower-superexec", "flower-supernode")
# What else a block of commands may call.
SHELL = ("source", "umask", "head", "mkdir", "chown", "export", "openssl", "make", "ray", "docker", "pip")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`((?:fedprune|make) [^`]+)`")
_TARGETS = re.compile(r"^([a-z-]+):", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, the line it begins at, its language (mostly none), and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The command lines as lists of words, without comments and settings of the environment."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                found.append([word for i, word in enumerate(words[:end]) if not _is_setting(words, i)])
                words = words[end + 1 :]
        return found

    @property
    def is_commands(self) -> bool:
        """Whether each of its lines calls a program; a tree of files, a transcript and a configuration do not."""
        try:
            programs = [command[0] for command in self.commands]
        except (ValueError, IndexError):
            return False
        return bool(programs) and all(each in (*FEDPRUNE, *FLOWER, *SHELL) for each in programs)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _is_setting(words: list[str], place: int) -> bool:
    """Whether this word is a ``NAME=value`` before the program."""
    return all(re.fullmatch(r"[A-Za-z_]+=.*", word) for word in words[: place + 1])


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


def spans() -> list[Block]:
    """Commands within a sentence, `fedprune list --keys`."""
    found = []
    for page in PAGES:
        text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
        for match in _SPAN.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, "", " ".join(match[1].split())))
    return found


def _recorded_info(given: RunInputs, placement: Placement | None) -> dict[str, Any]:
    """The run.json of a run that a page resumes, whose settings are not known."""
    return {}


class Started(Exception):
    """A command would have begun its work."""


def _started(*arguments: Any, **more: Any) -> Any:
    raise Started


@dataclass(frozen=True)
class Checker:
    """Takes command lines as far as they go without starting anything, in a folder with the repository's configs."""

    monkeypatch: pytest.MonkeyPatch
    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "configs").symlink_to(ROOT / "configs")
        (self.folder / "docker").symlink_to(ROOT / "docker")
        (self.folder / "gallery").symlink_to(ROOT / "gallery")
        self.monkeypatch.chdir(self.folder)
        self.monkeypatch.setenv("HOME", str(self.folder))

        for name in (
            "preflight.can_start.prepare_models",
            "preflight.can_start.embedded_model",
            "preflight.can_start.warnings",
            "running.Session.run",
            "testing.audit.audit",
            "exports.formats.export_model",
            "exports.formats.pack_model",
            "exports.language.export_gguf",
            "exports.language.export_imatrix",
            "exports.compressed.combine",
            "exports.compressed.compress",
            "exports.predict.predictions",
            "exports.release.release",
            "exports.release.verify",
            "sweeps.sweep.find",
            "sweeps.advise.advise",
            "preflight.describe.data_found",
            "results.report.write_report",
            "results.reader.load_run",
            "launching.local.is_healthy",
            "launching.credentials.check_link",
            "launching.credentials.make_database",
            "launching.credentials.make_control_secret",
            "launching.credentials.log_in",
            "launching.local.superlink_command",
        ):
            self.monkeypatch.setattr(f"fedprune_app.{name}", _started)
        self.monkeypatch.setattr(faults, "campaign", _started)
        self.monkeypatch.setattr(faults, "_show_schedule", _started)
        self.monkeypatch.setattr("fedprune_app.preflight.prepare._recorded_info", _recorded_info)
        self.monkeypatch.setattr("fedprune_app.results.report.run_folders", lambda folder: [folder])
        self.monkeypatch.setattr(
            "fedprune_app.exports.formats.is_language_model",
            lambda folder: any(word in folder.name for word in ("smollm", "sums", "cut")),
        )
        self.monkeypatch.setattr("fedprune_app.preflight.inputs._check_ray_address", lambda address: None)
        self.monkeypatch.setattr(Path, "is_dir", _is_dir(Path.is_dir))

    def check(self, words: list[str]) -> None:
        """Raise what the command would say to a user, if it would not start."""
        program, *arguments = words
        if arguments[:1] == ["audit"] and not re.search("=|toml", arguments[1]):  # it takes a run, or files of settings
            (self.folder / arguments[1]).mkdir(parents=True)
            (self.folder / arguments[1] / "run.json").touch()
            self.monkeypatch.setattr("fedprune_app.results.reader.read_info", _started)
        if program == "fedprune":
            _until_started(cli.app, arguments)
        elif program == "python":
            assert arguments[:2] == ["-m", "devtools.faults"], arguments
            _until_started(faults.app, arguments[2:])
        elif program == "flwr":
            self._flwr(arguments)
        elif program in FLOWER:
            _flower_parser(program).parse_args(arguments)
        elif program == "make":
            targets = _TARGETS.findall((ROOT / "Makefile").read_text())
            given = [each for each in arguments if not re.match(r"[A-Z_]+=", each)]
            assert all(target in targets for target in given), arguments
        elif program == "ray":
            from ray.scripts.scripts import cli as ray

            _parse(ray, "ray", arguments)
        elif program == "docker":
            named = [arguments[place + 1] for place, word in enumerate(arguments[:-1]) if word == "-f"]
            for name in named:
                assert (self.folder / name).exists() or (ROOT / "docker" / "distributed" / name).exists(), name
        else:
            assert program in SHELL, program

    def _flwr(self, arguments: list[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own, of its typer
            from flwr.cli.app import app

            _parse(typer.main.get_command(app), "flwr", arguments)
        if "--run-config" in arguments:
            prepare(RunInputs(read_toml(Path(arguments[arguments.index("--run-config") + 1]))))


def _until_started(app: typer.Typer, arguments: list[str]) -> None:
    try:
        code = app(arguments, standalone_mode=False)
    except Started:
        return
    assert not code


def _is_dir(real: Any) -> Any:
    """/data of the examples is there."""
    return lambda path: str(path).startswith("/data/") or real(path)


def _flower_parser(program: str) -> Any:
    if program == "flower-superlink":
        from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as parser
    elif program == "flower-supernode":
        from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as parser
    else:
        from flwr.supercore.cli.flower_superexec import _parse_args as parser
    return parser()


def _parse(command: click.Command, name: str, arguments: list[str]) -> None:
    """Parse arguments as the program does, down to its last subcommand; raises click's errors."""
    parent = None
    while True:
        context = command.make_context(name, list(arguments), parent=parent)
        if not isinstance(command, click.Group):
            return
        found, inner, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        name, command, parent = str(found), inner, context


def copy_of_the_repository(folder: Path) -> Path:
    """What git tracks, copied."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder
