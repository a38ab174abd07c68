"""An interrupted test run leaves no process of its own behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import leftovers
from tests.e2e.deployed import PATIENCE_SECONDS, until

LEAVES_A_PROCESS = """
import subprocess, sys, time
from pathlib import Path
from tests.leftovers import pytest_configure, pytest_unconfigure

def test_that_is_interrupted():
    orphan = "import os, sys, time; os.fork() and sys.exit(); print(os.getpid(), flush=True); time.sleep(3600)"
    said = subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE, start_new_session=True)
    Path("orphan").write_bytes(said.stdout.readline())
    time.sleep(3600)
"""


@pytest.mark.programs
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_test_run_ends_orphans_of_its_tests(tmp_path, number):
    (tmp_path / "conftest.py").write_text("from tests.leftovers import pytest_configure, pytest_unconfigure\n")
    (tmp_path / "test_it.py").write_text(LEAVES_A_PROCESS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(leftovers.__file__).parents[1])}
    # whoever runs the tests in the background has SIGINT ignored, and so would the child
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, preexec_fn=listens)
    orphan = tmp_path / "orphan"
    until(lambda: run.poll() is not None or (orphan.exists() and orphan.read_text().endswith("\n")))
    assert run.poll() is None
    process = psutil.Process(int(orphan.read_text()))
    assert process.is_running()
    run.send_signal(number)
    run.wait(PATIENCE_SECONDS)
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
