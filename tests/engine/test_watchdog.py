"""A run ends with the process that launched it, and with nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from fedprune_app.launching.processes import LAUNCHER_VARIABLE, launcher_identity

WATCHED = """
import sys
from fedprune_app.launching.processes import watch_launcher
watch_launcher()
print("watched", flush=True)
sys.stdin.read()
print("went on")
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
LAUNCHER = """
import os, sys
from fedprune_app.launching.processes import LAUNCHER_VARIABLE, launcher_identity
print(launcher_identity(), flush=True)
sys.stdin.read()
"""


def watched(launcher: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WATCHED], env={**os.environ, LAUNCHER_VARIABLE: launcher}, **PIPES)


def test_a_run_goes_on_while_its_launcher_does():
    with watched(launcher_identity()) as process:
        assert process.stdout.readline() == "watched\n"
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)  # four looks at the launcher
        assert process.communicate("")[0] == "went on\n"
        assert process.returncode == 0


def test_a_run_ends_when_its_launcher_is_killed():
    with (
        subprocess.Popen([sys.executable, "-c", LAUNCHER], **PIPES) as launcher,
        watched(launcher.stdout.readline().strip()) as process,
    ):
        assert process.stdout.readline() == "watched\n"
        assert process.poll() is None
        launcher.kill()  # nobody waits for it, so it stays as a zombie
        assert process.wait(timeout=60) == 1


def test_a_later_process_with_the_launchers_number_is_not_the_launcher():
    pid, _, started = launcher_identity().partition(":")
    with watched(f"{pid}:{float(started) - 60}") as process:
        assert process.wait(timeout=60) == 1
