"""FedBN against its algorithm, written again in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.testing import check_system
from tests.gallery import federations as small
from tests.refusing import refuses

pytestmark = pytest.mark.usefixtures("no_plugins")
MODEL = {"model": "cnn-small-bn"}


def test_it_is_the_papers_algorithm(tmp_path):
    config = small.config_of("fedbn", **MODEL)
    finished = small.run(tmp_path, "fedbn", **MODEL)
    examples = small.examples(config)
    networks = [small.network(config) for _ in examples]
    for _ in range(config.num_server_rounds):
        for network, (images, labels) in zip(networks, examples, strict=True):
            network.train()
            optimiser = torch.optim.SGD(network.parameters(), config.learning_rate)
            for _ in range(config.local_epochs):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(network(images), labels).backward()
                optimiser.step()
        states = [network.state_dict() for network in networks]
        last = [{name: t.clone() for name, t in state.items()} for state in states]
        shared = [{name: t for name, t in state.items() if not name.startswith("bn")} for state in last]
        average = small.mean(shared, [len(labels) for _, labels in examples])
        for network in networks:
            network.load_state_dict(average, strict=False)
    assert small.close(small.global_model(finished), average)
    for client, state in enumerate(last):
        kept = small.state_of(finished, client, "weights")
        norms = [name for name in kept if name.startswith("bn")]
        assert len(norms) == 8
        assert all(torch.allclose(kept[name], state[name], atol=2e-6) for name in norms)


def test_a_network_without_norms_is_refused(tmp_path):
    with refuses("model", "cnn-small"):
        small.run(tmp_path, "fedbn")


@pytest.mark.full
def test_it_keeps_the_laws():
    check_system("fedbn", plugins=str(small.GALLERY / "fedbn.py"), settings=MODEL)
