"""Nothing that fedprune did not write is removed or replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedprune_app.cli import demo
from fedprune_app.results.ownership import MARK, is_marked, mark
from fedprune_app.results.recorder import write_info
from tests.results.conftest import made_up_run

SMALL = ["num-server-rounds=1", "local-epochs=1", "evaluate-every=1", "system=fedavg"]
HERE = ["--engine", "inprocess", "--clients", "3"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path, **files: str) -> dict[str, bytes]:
    """Write files of a user's own; ``_`` in a name stands for a dot, ``__`` for a folder."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return contents(folder)


def assert_refused(done: tuple[int, str], *says: str) -> None:
    code, said = done
    assert code == 2, said
    assert said.count("\n") == 1
    for text in says:
        assert text in said


# --- run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clients_jsonl", "run_json", "checkpoints__mine"])
def test_a_run_begins_in_no_folder_with_a_users_files(fedprune, tmp_path, name):
    before = fill(tmp_path / "mine", **{name: "mine"})
    first = name.replace("_json", ".json").partition("__")[0]
    said = (f"holds '{first}'", "which fedprune did not write", "allowed: a new folder")
    assert_refused(fedprune("run", *SMALL, *HERE, "--out", "mine"), *said)
    assert contents(tmp_path / "mine") == before


def test_a_file_whose_name_begins_with_a_dot_hinders_no_run_and_stays(fedprune, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".gitignore").write_text("mine")
    code, said = fedprune("run", *SMALL, *HERE, "--out", "mine")
    assert code == 0, said
    assert (tmp_path / "mine" / ".gitignore").read_text() == "mine"


def test_the_server_looks_itself_for_a_run_that_flower_starts(federate, tmp_path):
    before = fill(tmp_path / "run", clients_jsonl="mine")
    with pytest.raises(ValueError, match=r"holds 'clients\.jsonl', which fedprune did not write"):
        federate(system="fedavg")
    after = contents(tmp_path / "run")
    after.pop(".lock")
    assert after == before


def test_a_run_that_was_killed_before_its_first_round_may_begin_anew(fedprune, tmp_path):
    folder = made_up_run(tmp_path / "a", rounds=1)
    info = json.loads((folder / "run.json").read_text())
    write_info(folder, info | {"status": "running", "rounds_completed": 0})
    code, said = fedprune("run", *SMALL, *HERE, "--out", "a")
    assert code == 0, said


# --- sweep --------------------------------------------------------------------------------------------------------

MATRIX = "clients: 3\ncommon: {num-server-rounds: 1, local-epochs: 1}\nsystems: [fedavg]\n"


def test_a_resumed_sweep_takes_no_folder_with_a_users_files(fedprune, tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    sweep = ["sweep", "m.yaml", "--engine", "inprocess", "--out", "mine", "--resume"]
    before = fill(tmp_path / "mine", table_md="mine")
    assert_refused(fedprune(*sweep), "holds 'table.md'", "allowed: a new folder")
    assert contents(tmp_path / "mine") == before
    (tmp_path / "mine" / "table.md").unlink()
    mark(tmp_path / "mine", "sweep")
    before = fill(tmp_path / "mine" / "fedavg-digits-seed0", rounds_jsonl="mine")
    assert_refused(fedprune(*sweep), "holds 'rounds.jsonl', which fedprune did not write")
    assert (tmp_path / "mine" / "fedavg-digits-seed0" / "rounds.jsonl").read_text() == "mine"


# --- report, audit, deployment ------------------------------------------------------------------------------------


def test_a_report_replaces_reports_alone(fedprune, tmp_path):
    made_up_run(tmp_path / "a", rounds=2)
    for name, text in (("page.html", "<html>mine</html>"), ("data", "a,b"), ("empty.htm", "")):
        (tmp_path / name).write_text(text)
        assert_refused(fedprune("report", "a", "-o", name), f"'{name}' exists and fedprune did not write it", "force")
        assert (tmp_path / name).read_text() == text
    assert_refused(fedprune("report", "a", "-o", "a"), "'a' is a folder, allowed: a file")
    assert_refused(fedprune("report", "a", "-o", "data.csv"), "'data.csv', allowed: a file that ends in .html")
    for arguments in (["report.html"], ["report.html"], ["data", "--force"]):
        code, said = fedprune("report", "a", "-o", *arguments)
        assert code == 0, said
        assert (tmp_path / arguments[0]).read_text().startswith("<!doctype html>")


@pytest.mark.full
def test_an_audit_replaces_audits_alone(fedprune, tmp_path):
    (tmp_path / "mine.json").write_text('{"bound": 1}')
    audit = ["audit", "system=fedavg", "dp.enabled=true", "dp.noise-multiplier=2", "--clients", "3"]
    assert_refused(fedprune(*audit, "--json", "mine.json"), "mine.json' exists and fedprune did not write it")
    audit += ["num-server-rounds=1", "local-epochs=1", "--json", "audit.json"]
    for _ in range(2):
        code, said = fedprune(*audit)
        assert code == 0, said


def test_a_deployment_does_not_begin_in_a_users_folder(fedprune, tmp_path):
    before = fill(tmp_path / "mine", deployment__web_yaml="mine")
    assert_refused(fedprune("deploy", "local", "--out", "mine"), "holds 'deployment', which fedprune did not write")
    assert contents(tmp_path / "mine") == before


# --- demo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_demo(monkeypatch):
    """The demo with runs of one system that are made up, on no engine."""
    from fedprune_app import running as session

    def run(session, prepared, folder):
        made_up_run(folder, prepared.config.system, rounds=1)
        return {}

    monkeypatch.setattr(demo, "DEMO_SYSTEMS", ("fedavg", "standalone"))
    monkeypatch.setattr(session.Session, "run", run)


def test_a_demo_refuses_a_folder_with_a_users_run(fedprune, quick_demo, tmp_path):
    made_up_run(tmp_path / "mine" / "standalone", "standalone", rounds=2)
    before = fill(tmp_path / "mine", standalone__notes_txt="mine", notes_txt="mine")
    assert_refused(fedprune("demo", "--out", "mine"), "holds a run that is no demo's")
    assert contents(tmp_path / "mine") == before


def test_a_demo_refuses_a_folder_that_is_itself_a_run(fedprune, quick_demo, tmp_path):
    made_up_run(tmp_path / "mine", rounds=2)
    before = contents(tmp_path / "mine")
    assert_refused(fedprune("demo", "--out", "mine"), "mine")
    assert contents(tmp_path / "mine") == before


@pytest.mark.parametrize("name", ["report_html", "fedavg__rounds_jsonl", "fedavg__models__global_safetensors"])
def test_a_demo_refuses_a_folder_with_a_users_files_in_its_way(fedprune, quick_demo, tmp_path, name):
    before = fill(tmp_path / "mine", **{name: "mine"})
    assert_refused(fedprune("demo", "--out", "mine"), "fedprune did not write")
    assert contents(tmp_path / "mine") == before


def test_a_second_demo_replaces_the_first_and_leaves_a_users_notes(fedprune, quick_demo, tmp_path):
    for _ in range(2):
        code, said = fedprune("demo", "--out", "demo")
        assert code == 0, said
        fill(tmp_path / "demo", fedavg__notes_txt="mine")
        assert {path.name for path in (tmp_path / "demo").iterdir()} == {"fedavg", "standalone", "report.html"}
    assert (tmp_path / "demo" / "fedavg" / "notes.txt").read_text() == "mine"


def test_a_demos_run_that_a_user_went_on_with_is_the_users(fedprune, quick_demo, tmp_path):
    fedprune("demo", "--out", "demo")
    code, said = fedprune("demo", "--out", "demo")
    assert code == 0, said
    folder = tmp_path / "demo" / "fedavg"
    write_info(folder, json.loads((folder / "run.json").read_text()) | {"resumed_after_rounds": [1]})
    before = contents(tmp_path / "demo")
    assert_refused(fedprune("demo", "--out", "demo"), "fedavg', which holds a run")
    assert contents(tmp_path / "demo") == before


def test_a_mark_is_of_one_command_and_a_users_file_of_that_name_is_none(tmp_path):
    mark(tmp_path / "a", "demo")
    assert is_marked(tmp_path / "a", "demo")
    assert not is_marked(tmp_path / "a", "sweep")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / MARK).write_text("mine")
    assert not is_marked(tmp_path / "b", "demo")
    assert not is_marked(tmp_path / "c", "demo")
