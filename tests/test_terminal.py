"""What a user calls files and settings is printed as it is, whatever signs are in it."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedprune_app.cli.results import _print_predictions
from fedprune_app.config import parse_config
from fedprune_app.engine.printable import keep_logs_printable
from fedprune_app.exports.predict import Prediction
from fedprune_app.running import RunProgress
from fedprune_app.terminal import Terminal, echo, print_rows
from tests.results.conftest import made_up_run

RED, SHOWN = "\x1b[31m\u202e", r"\x1b[31m\u202e"  # a command to the terminal, and what is shown of it
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
    assert f"runs/{STRANGE}', which already holds a run" in said
    (tmp_path / "runs" / STRANGE / "rounds.jsonl").write_text(f"{STRANGE}\n")
    made_up_run(tmp_path / "runs" / "[" / "good", rounds=1)
    code, said = fedprune("report", "runs/[", "-o", f"{STRANGE}.html")
    assert code == 0, said
    assert f"left out: runs/{STRANGE}/rounds.jsonl is damaged or cut" in said


def test_a_sweep_in_a_folder_of_a_strange_name_with_a_run_that_fails(fedprune, tmp_path):
    (tmp_path / "[").mkdir()
    (tmp_path / STRANGE).write_text(
        "clients: 3\ncommon: {num-server-rounds: 1, local-epochs: 1}\n"
        "systems: [fedavg, {system: fedavg, learning-rate: 1e30}]\n"
    )
    code, said = fedprune("sweep", STRANGE, "--engine", "inprocess", "--out", f"runs/{STRANGE}")
    assert code == 1
    assert f"table: {tmp_path}/runs/{STRANGE}/table.md" in said
    assert said.splitlines()[-1].startswith("failed: 1 of 2 runs failed: fedavg-learning-rate1e30-digits-seed0: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", f"{STRANGE}=1"], f"setting is '{STRANGE}'"),
        (["run", "-c", f"{STRANGE}.toml"], f"config file is '{STRANGE}.toml'"),
        (["run", f"model={STRANGE}"], f"model is '{STRANGE}'"),
        (["run", "system=fedspallm", "dataset=stdlib", f"model={STRANGE}"], STRANGE),
        (["sweep", STRANGE], f"matrix is '{STRANGE}'"),
        (["report", STRANGE], f"run folder is '{STRANGE}'"),
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
    row = {"round": 1, "failures": 2, "perplexity_by_text": {f"{STRANGE}{RED}": {"own": 3.0}}}
    with RunProgress(parse_config({}), tmp_path, Terminal(width=300, force_terminal=True)) as progress:
        (tmp_path / "progress.json").write_text(json.dumps({"text": f"{STRANGE}{RED}"}))
        progress.update()
        (tmp_path / "progress.json").write_text(json.dumps({"done": 1, "total": 2, "text": STRANGE}))
        (tmp_path / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    said = capsys.readouterr().out
    assert f"{STRANGE}{SHOWN}" in said
    assert RED not in said
    assert "2 failed" in said


def test_progress_says_of_which_round_an_older_number_is_and_counts_the_bytes_of_before_a_resume(tmp_path, capsys):
    rows = [{"round": n, "bytes_up": 1e6, "bytes_down": 1e6} for n in (1, 2, 3)]
    rows[1]["accuracy_personal_mean"] = 0.5
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "rounds.jsonl").write_text(lines[0])
    config = parse_config({"resume-from": str(tmp_path), "num-server-rounds": 3})
    with RunProgress(config, tmp_path, Terminal(width=300)) as progress:
        for count in (2, 3):
            (tmp_path / "rounds.jsonl").write_text("".join(lines[:count]))
            progress.update()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "subfedavg: round 2 of 3  personal 50.0 %  4.0 MB"
    assert said[1] == "subfedavg: round 3 of 3  personal 50.0 % (round 2)  6.0 MB"


def test_what_strangers_call_their_classes_and_files_does_not_command_the_terminal(tmp_path, capsys):
    print_rows([("classes", f"a, b{RED}")])
    _print_predictions([Prediction(tmp_path / f"{RED}.png", None, [(f"b{RED}", 1.0)])])
    echo(f" no class b{RED}", "error:", "red")
    said = capsys.readouterr()
    assert f"a, b{SHOWN}" in said.out
    assert f"error: no class b{SHOWN}" in said.err
    assert "\x1b" not in said.out + said.err
    assert "\u202e" not in said.out + said.err


def test_a_log_has_no_command_for_the_terminal_in_a_message_or_in_a_traceback():
    keep_logs_printable()
    log, text = logging.getLogger("flwr"), io.StringIO()  # Flower logs what a client raises
    handler = logging.StreamHandler(text)
    log.addHandler(handler)
    try:
        raise ValueError(f"no class b{RED}")
    except ValueError as error:
        log.error("the client %s fails", RED, exc_info=error)
        logging.getLogger("flwr.fedprune").error("%s", error)
    finally:
        log.removeHandler(handler)
    lines = text.getvalue().splitlines()
    assert lines[0] == f"the client {SHOWN} fails"
    assert lines[-2:] == [f"ValueError: no class b{SHOWN}", f"no class b{SHOWN}"]


def test_there_is_no_other_console_than_the_terminal_that_makes_text_printable():
    for path in sorted((Path(__file__).parents[1] / "fedprune_app").rglob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert "Console" not in {call.id for call in calls if isinstance(call, ast.Name)}, path


def test_a_terminal_without_greek_letters_shows_the_settings():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "fedprune_app.cli", "audit", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert r"lower bound on its \u03b5" in done.stdout
