"""What a user calls files and settings is printed as it is, whatever signs are in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.results.conftest import made_up_run

STRANGE = "[/red]x[bold]:smile:"  # as a path, a folder "[" and in it "red]x[bold]:smile:"
HERE = ["--engine", "inprocess", "--clients", "3", "num-server-rounds=1", "local-epochs=1", "system=fedavg"]


def test_a_run_and_a_report_in_a_folder_of_a_strange_name(fedprune, tmp_path):
    code, said = fedprune("run", *HERE, "--out", f"runs/{STRANGE}")
    assert code == 0, said
    assert f"results: runs/{STRANGE}" in said
    assert (tmp_path / "runs" / STRANGE / "run.json").exists()
    code, said = fedprune("report", f"runs/{STRANGE}", "-o", f"{STRANGE}.html")
    assert code == 0, said
    assert f"{STRANGE}.html" in said
    code, said = fedprune("run", *HERE, "--out", f"runs/{STRANGE}")
    assert code == 2
    assert f"runs/{STRANGE}' already holds a run" in said
    (tmp_path / "runs" / STRANGE / "rounds.jsonl").write_text(f"{STRANGE}\n")
    made_up_run(tmp_path / "runs" / "[" / "good", rounds=1)
    code, said = fedprune("report", "runs/[", "-o", f"{STRANGE}.html")
    assert code == 0, said
    assert f"left out: runs/{STRANGE}/rounds.jsonl line 1" in said


def test_a_sweep_in_a_folder_of_a_strange_name_with_a_run_that_fails(fedprune, tmp_path):
    (tmp_path / "[").mkdir()
    (tmp_path / STRANGE).write_text(
        "clients: 3\ncommon: {num-server-rounds: 1, local-epochs: 1}\n"
        "systems: [fedavg, {system: fedavg, learning-rate: 1e30}]\n"
    )
    code, said = fedprune("sweep", STRANGE, "--engine", "inprocess", "--out", f"runs/{STRANGE}")
    assert code == 1
    assert f"table: {tmp_path}/runs/{STRANGE}/table.md" in said
    assert said.splitlines()[-1] == "failed: 1 of 2 runs failed: fedavg-learning-rate1e_30-digits-seed0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", f"{STRANGE}=1"], f"unknown key '{STRANGE}'"),
        (["run", "-c", f"{STRANGE}.toml"], f"config file '{STRANGE}.toml' does not exist"),
        (["run", f"model={STRANGE}"], f"model is '{STRANGE}'"),
        (["run", "system=fedspallm", "dataset=stdlib", f"model={STRANGE}"], STRANGE),
        (["sweep", STRANGE], f"matrix '{STRANGE}' does not exist"),
        (["report", STRANGE], f"'{STRANGE}' is no run folder"),
        (["export", STRANGE, "-o", "x", "--global"], f"'{STRANGE}' is not a run folder"),
        (["run", f"--{STRANGE}"], STRANGE),
        (["run", "--clients", STRANGE], STRANGE),
        ([STRANGE], STRANGE),
    ],
)
def test_an_error_names_strange_things_as_they_are(fedprune, arguments, says):
    code, said = fedprune(*arguments)
    assert code == 2
    assert says in said
    assert "Traceback" not in said


def test_the_progress_bar_shows_what_a_server_says_as_it_is(tmp_path, capsys):
    from rich.console import Console

    from fedprune_app.config import parse_config
    from fedprune_app.experiment import _Progress

    row = {"round": 1, "failures": 2, "perplexity_by_text": {STRANGE: {"own": 3.0}}}
    with _Progress(parse_config({}), tmp_path, Console(width=300, force_terminal=True)) as progress:
        (tmp_path / "progress.json").write_text(json.dumps({"text": STRANGE}))
        progress.update()
        (tmp_path / "progress.json").write_text(json.dumps({"done": 1, "total": 2, "text": STRANGE}))
        (tmp_path / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    said = capsys.readouterr().out
    assert STRANGE in said
    assert "2 failed" in said


def test_a_terminal_without_greek_letters_shows_the_settings():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "fedprune_app.cli", "audit", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert r"lower bound on its \u03b5" in done.stdout
