"""FedDST against its algorithms, written again with sorted lists of single weights."""

from __future__ import annotations

import math

import pytest
import torch

from fedprune_app import plugins
from fedprune_app.config import check_resumable, parse_config
from fedprune_app.testing import check_system
from tests.gallery import federations as small
from tests.refusing import refuses

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {
    "density": 0.2,
    "feddst__rounds_between": 1,
    "feddst__prune_rate": 0.8,
    "num_server_rounds": 6,
    "local_epochs": 3,
}


@pytest.mark.parametrize("system", ["feddst", "fedrts", "dadpfl"])
def test_a_run_goes_on_with_the_rounds_by_which_its_masks_move(system):
    given = {"system": system, "plugins": str(small.file_of(system))}
    plugins.load(given)
    began = parse_config(given).to_dict()
    check_resumable(began, parse_config(given))
    with refuses("num-server-rounds", 30):
        check_resumable(began, parse_config({**given, "num-server-rounds": 30}))


def erk_counts(shapes, density):
    """How many weights each layer keeps: RigL's rule, by halving the interval that has its scale."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    low, high = 0.0, 1e6
    for _ in range(200):
        scale = (low + high) / 2
        kept = {name: min(1.0, scale * sum(shape) / sizes[name]) * sizes[name] for name, shape in shapes.items()}
        low, high = (scale, high) if sum(kept.values()) < density * sum(sizes.values()) else (low, scale)
    return {name: math.floor(count + 1e-6) for name, count in kept.items()}


def positions(scores, count, allowed):
    """The positions of the largest scores among those allowed; of equal ones the first."""
    return set(sorted(allowed, key=lambda i: (-scores[i], i))[:count])


def masked(tensors, kept):
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, where in kept.items():
        flat = found[name].view(-1)
        flat[[i for i in range(len(flat)) if i not in where]] = 0
    return found


def test_it_is_the_papers_algorithm(tmp_path):
    config = small.config_of("feddst", **SETTINGS)
    finished = small.run(tmp_path, "feddst", **SETTINGS)
    model, examples = small.network(config), small.examples(config)
    server = small.parameters(model)
    shapes = {name: tensor.shape for name, tensor in server.items() if name.endswith("weight")}
    counts = erk_counts(shapes, config.density)

    def largest(tensors):
        flat = {name: tensors[name].abs().view(-1).tolist() for name in shapes}
        return {name: positions(scores, counts[name], range(len(scores))) for name, scores in flat.items()}

    kept = largest(server)
    server = masked(server, kept)
    moved = 0
    for number in range(1, config.num_server_rounds + 1):
        share = 0.8 / 2 * (1 + math.cos(math.pi * (number - 1) / 3)) if number <= 3 else 0.0
        sent = []
        for images, labels in examples:
            tensors, own = server, kept
            for epoch in range(3):
                slope = small.gradients(model, tensors, images, labels)
                tensors = masked({n: t - config.learning_rate * slope[n] for n, t in tensors.items()}, own)
                if epoch == 1 and share:
                    slope = small.gradients(model, tensors, images, labels)
                    own = {name: set(where) for name, where in own.items()}
                    for name, where in own.items():
                        if len(where) == shapes[name].numel():
                            continue
                        size, weight = math.ceil(share * len(where) - 1e-6), tensors[name].abs().view(-1)
                        where -= positions((-weight).tolist(), size, where)
                        off = set(range(len(weight))) - where
                        where |= positions(slope[name].abs().view(-1).tolist(), size, off)
                    tensors = masked(tensors, own)
            sent.append((tensors, own, len(labels)))
        mean = {}
        for name, tensor in server.items():
            total, weight = torch.zeros_like(tensor), torch.zeros_like(tensor)
            for tensors, own, num_examples in sent:
                there = torch.ones_like(tensor)
                if name in own:
                    there = masked({name: there}, {name: own[name]})[name]
                total, weight = total + num_examples * there * tensors[name], weight + num_examples * there
            mean[name] = total / weight.clamp(min=1)
        before, kept = kept, largest(mean) if share else kept
        moved += sum(len(before[name] - kept[name]) for name in kept)
        server = masked(mean, kept)
    found = small.global_model(finished)
    assert moved > 50
    assert small.close(found, server, 1e-5)
    for name, where in kept.items():
        assert set(found[name].view(-1).nonzero().view(-1).tolist()) <= where


def test_masks_move_in_the_rounds_of_the_released_code_which_counts_them_from_0():
    """Its condition: ``(round − 1) % interval == 0``, and a share that is above 0."""
    config, alpha = small.config_of("feddst", num_server_rounds=60), 0.5
    shares = {}
    for number in range(60):
        decay = 0 if number >= 30 else alpha / 2 * (1 + math.cos(number * math.pi / 30))
        if (number - 1) % 10 == 0 and decay > 0:
            shares[number + 1] = decay
    share_replaced = small.loaded("feddst").share_replaced
    found = {number: share_replaced(config, number) for number in range(1, 61)}
    assert {number: share for number, share in found.items() if share} == pytest.approx(shares)
    assert list(shares) == [2, 12, 22]


def test_the_dense_gradient_of_a_batch_is_charged(tmp_path):
    settings = {"density": 0.2, "feddst__rounds_between": 2, "num_server_rounds": 4, "local_epochs": 2}
    rounds = small.run(tmp_path, "feddst", **settings).rounds
    examples = small.examples(small.config_of("feddst", **settings))
    one_example = 3 * 2 * (64 * 9 * 16 + 16 * 9 * 16 * 32 + 1280)  # forward and backward, of cnn-small's three layers
    dense = one_example * sum(len(labels) for _, labels in examples)
    assert rounds[1]["flops"] - rounds[0]["flops"] == pytest.approx(dense, rel=1e-6)


@pytest.mark.full
def test_it_keeps_the_laws():
    settings = {"density": 0.2, "local-epochs": 2, "feddst.rounds-between": 1}
    check_system("feddst", plugins=str(small.GALLERY / "feddst.py"), settings=settings)
