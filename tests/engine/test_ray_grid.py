"""Ray's processes start whatever the path of Python, and messages count as at work once their process is there."""

from __future__ import annotations

import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedprune_app.engine import ray_grid
from fedprune_app.engine.simulation import Workers, _starting_ray, with_this_python


@pytest.mark.parametrize(
    "path", ["/tmp/my clone/bin/python", "/tmp/clone [x]/bin/python", "/tmp/it's $HOME/bin/python"]
)
def test_a_shell_finds_this_python_whatever_is_in_its_path(monkeypatch, path):
    given = {"env_vars": {"A": "b"}}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert with_this_python(given) == given
    monkeypatch.setattr(sys, "executable", path)
    quoted = with_this_python(given)
    assert shlex.split(quoted.pop("py_executable")) == [path]
    assert quoted == given
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")  # there it has another path
    assert with_this_python(None) == {}


def test_processes_of_our_own_ray_start_once_and_a_clusters_find_the_app(monkeypatch):
    assert Workers(2, 0).environment() == {}
    monkeypatch.setenv("PYTHONPATH", "/the/app")
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    assert Workers(0, 0).environment()["env_vars"]["PYTHONPATH"].endswith(":/the/app")


def test_clients_whose_process_has_not_started_are_not_at_work(monkeypatch):
    """Else those in the queue would wait for them, startup-seconds more for each cohort."""
    grid = object.__new__(ray_grid.RayGrid)
    replies = iter([None, (1, "a reply")])
    grid._at_work = {replies: ray_grid._Cohort("worker", ["4", "5"], {"4": "message", "5": "message"})}
    grid._replies, grid._forgotten = {}, {"5"}
    monkeypatch.setattr(ray_grid, "ray", SimpleNamespace(get=lambda each: each))
    assert grid.begun() == {}
    grid._collect_next(replies)
    assert grid.begun().keys() == {"4", "5"}
    grid._collect_next(replies)
    assert grid.begun().keys() == {"4"}


@pytest.mark.timeout(120)
def test_an_engine_that_does_not_start_in_time_ends_with_a_line():
    module = "fedprune_app.engine.simulation"
    code = f"import time; from {module} import _starting_ray\nwith _starting_ray(0.1): time.sleep(3600)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    line = "Ray did not start within startup-seconds = 0.1; --engine inprocess runs without Ray\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_an_error_of_an_engines_start_says_what_runs_without_it(monkeypatch):
    for address, line in (("local", "no room; --engine inprocess runs without Ray"), ("cluster:6379", "no room")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(RuntimeError, match=f"^{line}$"), _starting_ray(60):
            raise OSError("no room")
