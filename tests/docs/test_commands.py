"""Every command in README.md and docs/*.md is one that works: each is parsed, and those that can be are run."""

from __future__ import annotations

import re
import stat
import subprocess
import tomllib

import pytest

from fedprune_app.config import to_toml
from fedprune_app.sweeps.matrix import read_matrix, to_yaml
from fedprune_app.sweeps.sweep import best_matrix, effective
from tests.docs.blocks import ROOT, Block, Checker, blocks, spans
from tests.examples import full

NO_COMMANDS = {
    "runs/first/": "a tree of files",
    "cli    ": "who may import whom",
    "subfedavg: 2 rounds": "a transcript",
    "Should these sites federate?": "a transcript",
    "    --node-config": "a part of a command",
    "# /etc/fedprune/policy.toml": "a node's policy",
    "declined by policy: ": "a transcript",
    "[superlink.": "a configuration of Flower's",
    "fpk_": "whom a node trusts",
    "[project.entry-points": "a part of a pyproject.toml",
    "for reply in exchange(": "a part of a method",
    "# photos.yaml": "a matrix",
    "# search.yaml": "a search",
    "# tune.yaml": "a search",
}
COMMANDS = [(block, command) for block in blocks() if block.is_commands for command in block.commands]
SPANS = [(span, command) for span in spans() for command in span.commands]


def test_every_fenced_block_is_known_for_what_it_is():
    for block in blocks():
        if block.language == "python":
            compile(block.text, str(block), "exec")
        elif not block.is_commands:
            assert any(block.text.startswith(start) for start in NO_COMMANDS), f"{block} is no block of commands"
    assert {"README.md", "docs/deploy.md", "docs/privacy.md", "docs/results.md"} <= {
        block.page for block, _ in COMMANDS
    }


@pytest.fixture
def checker(monkeypatch, tmp_path, no_plugins) -> Checker:
    for block in blocks():
        if name := re.match(r"# (\w+\.(?:py|yaml))\n", block.text):  # files of the pages
            (tmp_path / name[1]).write_text(block.text)
    return Checker(monkeypatch, tmp_path)


def write_what_a_search_would(asked, folder):
    folder.mkdir(parents=True)
    searches = read_matrix(asked).searches
    best = [effective(search, {"learning-rate": 0.1}) for search in searches]
    (folder / "best.yaml").write_text(to_yaml(best_matrix(best, [0, 1], 20)))
    for search, settings in zip(searches, best, strict=True):
        (folder / search.file("best.toml")).write_text(to_toml(settings))


@pytest.mark.parametrize(
    ("block", "command"),
    [(full if str(block).startswith("docs/") else pytest.param)(block, command) for block, command in COMMANDS],
    ids=[f"{block}-{' '.join(command)[:50]}" for block, command in COMMANDS],
)
def test_every_command_of_a_block_could_start(checker, tmp_path, block, command):
    if any(word.startswith("runs/tuned/best") for word in command):
        write_what_a_search_would(tmp_path / "tune.yaml", tmp_path / "runs" / "tuned")
    checker.check(command)


SECRETS = [
    block for block in blocks() if block.is_commands and re.search(r"^(?:.*&& )?(?:head|openssl) .*>", block.text, re.M)
]


@pytest.mark.parametrize("block", SECRETS, ids=str)
def test_a_secret_that_a_block_makes_is_for_its_owner_alone(tmp_path, block):
    lines = [" ".join(command) for command in block.commands if command[0] in ("umask", "head", "openssl")]
    subprocess.run(["sh", "-ec", "\n".join(["umask 022", *lines])], cwd=tmp_path, check=True, timeout=1000)
    assert list(tmp_path.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.full
def test_every_command_in_a_sentence_is_one_of_ours(checker):
    for span, command in SPANS:
        if len(command) > 1 and "..." not in command:
            program, first = command[:2]
            if program == "make":
                checker.check(command)
            else:
                from tests.docs.blocks import cli, typer

                group = typer.main.get_command(cli.app)
                if first in {"--help", *(name for param in group.params for name in param.opts)}:
                    continue
                assert first.rstrip(",.") in group.commands, f"{span}: {span.text}"
                given = {word for word in command if word.startswith("--") and len(word) > 2}
                inner = group.commands[first]
                inner = inner.commands.get(" ".join(command[2:3]), inner) if hasattr(inner, "commands") else inner
                known = {option for each in inner.params for option in each.opts}
                assert given <= known, f"{span}: {span.text}"


@pytest.mark.parametrize(
    "text",
    [
        "fedprune run learning-rte=1",
        "fedprune run --enginee ray",
        "fedprune run -c configs/none.toml",
        "fedprune sweep configs/matrices/fedp3_small_mnist.yaml fedp3.layer-sett=1",
        "fedprune reprot runs/a",
        "flwr run . --federation-confg x",
        "flwr run . --run-config configs/none.toml",
        "flower-superlink --hosst 0.0.0.0",
        "ray start --haed",
        "make demoo",
        "docker compose -f none.yaml up",
    ],
)
def test_a_mistake_in_a_command_would_be_found(checker, text):
    (command,) = Block("page", 1, "", text).commands
    with pytest.raises((Exception, SystemExit)):
        checker.check(command)


def test_make_demo_installs_what_the_readme_promises_to_work_after_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (stamp,) = re.findall(r"^\$\(STAMP\):.*?^\ttouch", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert "--editable '.[all]'" in stamp
    (everything,) = extras["all"]
    installed = set(re.fullmatch(r"fedprune\[(.*)\]", everything)[1].split(","))
    assert installed == extras.keys() - {"all", "dev", "fuzz", "llamacpp"}
