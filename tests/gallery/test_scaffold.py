"""SCAFFOLD against its algorithm, written again in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.engine.store import read_tensors
from fedprune_app.testing import check_system
from tests.gallery import federations as small
from tests.refusing import refuses

pytestmark = pytest.mark.usefixtures("no_plugins")


def test_it_is_the_papers_algorithm_with_its_second_option(tmp_path):
    config = small.config_of("scaffold", num_server_rounds=3)
    finished = small.run(tmp_path, "scaffold", num_server_rounds=3)
    model, examples = small.network(config), small.examples(config)
    x = small.parameters(model)
    c = {name: torch.zeros_like(t) for name, t in x.items()}
    controls = [dict(c) for _ in examples]
    for _ in range(config.num_server_rounds):
        moved, changed = [], []
        for client, (images, labels) in enumerate(examples):
            y, own = dict(x), controls[client]
            for _ in range(config.local_epochs):
                slope = small.gradients(model, y, images, labels)
                y = {n: t - config.learning_rate * (slope[n] - own[n] + c[n]) for n, t in y.items()}
            steps = config.local_epochs * config.learning_rate
            controls[client] = {n: own[n] - c[n] + (x[n] - y[n]) / steps for n in x}
            moved.append({n: y[n] - x[n] for n in x})
            changed.append({n: controls[client][n] - own[n] for n in x})
        ones = [1] * len(examples)
        x = {n: t + small.mean(moved, ones)[n] for n, t in x.items()}
        c = {n: t + small.mean(changed, ones)[n] for n, t in c.items()}
    assert small.close(small.global_model(finished), x)
    for client, control in enumerate(controls):
        assert small.close(small.state_of(finished, client, "control"), control, 1e-4)


def test_the_server_counts_members_alone(tmp_path):
    """With all members in each round the server's control variate is the mean of theirs."""
    finished = small.run(tmp_path, "scaffold", num_server_rounds=3, holdout_clients=1)
    (held_out,) = [row["partition"] for row in finished.clients if row.get("accuracy_newcomer") is not None]
    members = [client for client in range(small.CLIENTS) if client != held_out]
    controls = [small.state_of(finished, client, "control") for client in members]
    checkpoint = max((finished.folder / "checkpoints").glob("round-*.safetensors"))
    assert small.close(read_tensors(checkpoint).group("control"), small.mean(controls, [1] * len(members)), 1e-4)


def test_momentum_is_refused(tmp_path):
    with refuses("momentum", 0.5):
        small.run(tmp_path, "scaffold", momentum=0.5)


@pytest.mark.full
def test_it_keeps_the_laws():
    check_system("scaffold", plugins=str(small.GALLERY / "scaffold.py"), settings={"momentum": 0.0})


@pytest.mark.parametrize("system", ["scaffold", "apfl"])
def test_norms_may_stay_with_each_client(tmp_path, system):
    more = {"model": "cnn-small-bn", "batch_norm": "local", "num_server_rounds": 2}
    assert small.run(tmp_path, system, **more).info["final_sha256"]
