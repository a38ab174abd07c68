"""A run whose process is gone is told from one that goes on, by a reader of its folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fedprune_app.engine.store import exclusive
from fedprune_app.results.reader import LOCK, is_held, load_run, read_info
from fedprune_app.results.recorder import write_info
from fedprune_app.results.report import write_report
from tests.results.conftest import made_up_run

HOLD = (
    "import sys, time; from pathlib import Path; from fedprune_app.engine.store import exclusive\n"
    "with exclusive(Path(sys.argv[1])):\n"
    "    print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def running(tmp_path):
    """A run folder that says "running"."""
    folder = made_up_run(tmp_path / "run", rounds=2, clients=3)
    info = json.loads((folder / "run.json").read_text())
    write_info(folder, info | {"status": "running", "error": None, "final_sha256": None})
    return folder


@pytest.mark.full
def test_a_run_whose_process_is_killed_reads_as_interrupted(running, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(running)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    assert load_run(running).status == "running"
    page = write_report([running], tmp_path / "r.html").read_text()
    assert "Still going" in page
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path: path.stat().st_mtime_ns for path in running.iterdir()}
    info = read_info(running)
    assert (info["status"], info["error"]) == ("interrupted", "its process ended without a word")
    page = write_report([running], tmp_path / "r.html").read_text()
    assert "interrupted" in page
    assert "Still going" not in page
    assert {path: path.stat().st_mtime_ns for path in running.iterdir()} == before
    assert json.loads((running / "run.json").read_text())["status"] == "running"  # reading writes nothing


def test_an_export_says_that_such_a_run_was_interrupted(running, tmp_path):
    from fedprune_app.exports.formats import export_model

    with pytest.raises(ValueError, match="is interrupted, allowed: a completed run"):
        export_model(running, None, "safetensors", tmp_path / "x")


def test_a_copy_of_a_folder_is_held_by_nobody(running, tmp_path):
    with exclusive(running):
        shutil.copytree(running, tmp_path / "copy")
        shutil.copytree(running, tmp_path / "without", ignore=shutil.ignore_patterns(".*"))
        assert load_run(running).status == "running"
        assert [load_run(tmp_path / name).status for name in ("copy", "without")] == ["interrupted"] * 2
    assert not (tmp_path / "without" / LOCK).exists()


def test_a_folder_that_may_only_be_read_will_do(running):
    with exclusive(running):
        pass
    (running / LOCK).chmod(0o444)
    running.chmod(0o555)
    try:
        handle = os.open(running / LOCK, os.O_RDONLY)
        assert load_run(running).status == "interrupted"
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reading has let go of it again
        assert load_run(running).status == "running"
        os.close(handle)
    finally:
        running.chmod(0o755)


def test_where_nobody_can_tell_a_run_counts_as_going_on(running, monkeypatch):
    (running / LOCK).touch()

    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert load_run(running).status == "running"


def test_readers_do_not_keep_a_writer_out(running):
    (running / LOCK).touch()
    reader = os.open(running / LOCK, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    assert not is_held(running)  # two readers at once
    os.close(reader)
    with exclusive(running, patience_seconds=0):
        assert is_held(running)
