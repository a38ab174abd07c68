"""LP-FT against its two phases, written again in plain PyTorch."""

from __future__ import annotations

import pytest

from clients.context import NodeContext
from clients.task import Task
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State
from fedprune_app.testing import check_system, run_with
from tests.gallery import federations as small

pytestmark = pytest.mark.usefixtures("no_plugins")
HEAD = {"fc1.weight", "fc1.bias"}


@pytest.mark.parametrize("head_epochs", [0, 3])
def test_it_is_the_papers_two_phases_on_fedavgs_model(tmp_path, head_epochs):
    settings = {"lpft__head_epochs": head_epochs, "num_server_rounds": 2}
    config = small.config_of("lpft", **settings)
    finished = small.run(tmp_path / "run", "lpft", **settings)
    model, examples = small.network(config), small.examples(config)
    server = small.parameters(model)
    for _ in range(2):
        sent = [descend(model, server, part, config.learning_rate, [server.keys()] * 2) for part in examples]
        server = small.mean(sent, [len(labels) for _, labels in examples])
    assert small.close(small.global_model(finished), server)
    received = Payload(small.global_model(finished))
    for number, part in enumerate(examples):
        client = small.loaded("lpft").LPFTClient(config, NodeContext(number, small.CLIENTS, tmp_path / "state"))
        found = client.personal_model(Task(2, received), State())
        phases = [HEAD] * (head_epochs or 2) + [server.keys()] * 2
        assert small.close(found, descend(model, server, part, config.learning_rate, phases), 1e-5)


def descend(model, tensors, part, rate, steps):
    """The parameters after a step on each of these groups of names."""
    for moving in steps:
        slope = small.gradients(model, tensors, *part)
        tensors = {n: t - rate * slope[n] if n in moving else t for n, t in tensors.items()}
    return tensors


def test_it_sends_what_fedavg_sends(tmp_path):
    ours = small.run(tmp_path / "ours", "lpft").rounds
    theirs = {**small.settings_of("lpft"), "system": "fedavg"}
    del theirs["plugins"]
    fedavg = run_with(theirs, tmp_path / "theirs", clients=small.CLIENTS).rounds
    costs = ("paper_bytes_up", "paper_bytes_down", "flops")
    assert [[row[cost] for cost in costs] for row in ours] == [[row[cost] for cost in costs] for row in fedavg]


@pytest.mark.full
def test_it_keeps_the_laws():
    check_system("lpft", plugins=str(small.GALLERY / "lpft.py"))
