"""Only a simulation's own processes let a client count as simulated."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedprune_app.engine.simulated_grid import is_simulated, simulated_client

ASKED = "from fedprune_app.engine.simulated_grid import is_simulated; print(is_simulated())"
ON_RAY = f"""
import subprocess, sys
import ray
from fedprune_app.engine.simulated_grid import is_simulated

@ray.remote
class Actor:
    def asked(self):
        beside = subprocess.run([sys.executable, "-c", {ASKED!r}], capture_output=True, text=True, check=True)
        return [is_simulated(), beside.stdout.strip()]

@ray.remote
def task():
    return is_simulated()

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
print(is_simulated(), *ray.get(Actor.remote().asked.remote()), ray.get(task.remote()))
"""


def test_a_client_is_simulated_while_a_grid_of_ours_lets_it_answer():
    assert not is_simulated()
    with simulated_client(shares_disk=True):
        assert is_simulated()
    assert not is_simulated()


@pytest.mark.programs
def test_of_processes_that_know_ray_an_actor_alone_is_simulated():
    """Neither the process that started Ray, nor a program that an actor starts, as a node's would be, nor a task."""
    done = subprocess.run([sys.executable, "-c", ON_RAY], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["False", "True", "False", "False"], done.stderr
