"""FedPer and FedRep against their algorithms, written again in plain PyTorch."""

from __future__ import annotations

import pytest

from fedprune_app.testing import check_system
from tests.gallery import federations as small

pytestmark = pytest.mark.usefixtures("no_plugins")
HEAD = {"fc1.weight", "fc1.bias"}


def reference(config):
    """The base layers and each client's head after the last round."""
    model, examples = small.network(config), small.examples(config)
    base = {name: t for name, t in small.parameters(model).items() if name not in HEAD}
    heads = [{name: small.parameters(model)[name] for name in sorted(HEAD)} for _ in examples]
    own = vars(config.own)
    for _ in range(config.num_server_rounds):
        sent = []
        for client, (images, labels) in enumerate(examples):
            tensors = base | heads[client]
            steps = [HEAD] * own["head_epochs"]
            steps += [(tensors.keys() - HEAD) if own["head_epochs"] else tensors.keys()] * config.local_epochs
            for moving in steps:
                slope = small.gradients(model, tensors, images, labels)
                tensors = {n: t - config.learning_rate * slope[n] if n in moving else t for n, t in tensors.items()}
            heads[client] = {name: tensors[name] for name in heads[client]}
            sent.append({name: tensors[name] for name in base})
        base = small.mean(sent, [len(labels) for _, labels in examples])
    return base, heads


@pytest.mark.parametrize("head_epochs", [0, 2])
def test_it_is_the_papers_algorithm(tmp_path, head_epochs):
    finished = small.run(tmp_path, "fedper", fedper__head_epochs=head_epochs)
    base, heads = reference(small.config_of("fedper", fedper__head_epochs=head_epochs))
    assert small.close(small.global_model(finished), base)
    for client, head in enumerate(heads):
        weights = small.state_of(finished, client, "weights")
        assert small.close({name: weights[name] for name in head}, head)


@pytest.mark.full
def test_it_keeps_the_laws():
    check_system("fedper", plugins=str(small.GALLERY / "fedper.py"))


def test_a_head_epoch_counts_without_the_bases_backward_pass(tmp_path):
    settings = {"fedper__personal_layers": 1, "num_server_rounds": 1}
    per, rep = (small.run(tmp_path / str(n), "fedper", fedper__head_epochs=n, **settings) for n in (0, 3))
    assert rep.rounds[0]["flops"] == pytest.approx(per.rounds[0]["flops"] * (2 + 3 / 3) / 2)
