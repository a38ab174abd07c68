"""Recovery: kept weights learn, pruned ones stay zero, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.core.payload import Payload
from fedprune_app.models.layer_pruning import Schedule, recovered
from fedprune_app.models.llm import LanguageModel
from tests.examples import full
from tests.models.tiny_llm import tiny_checkpoint, tokens

SCHEDULE = Schedule(steps=30, batch_size=2, learning_rate=0.02)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["llama", full("opt")])
def pruned(request, tmp_path):
    """A model, and two of its three layers at half of their weights."""
    model = LanguageModel(tiny_checkpoint(tmp_path / "model", request.param))
    layers = {}
    for layer in (0, 2):
        tensors = {name: model.layer_tensors(layer)[name] for name in model.prunable(layer)}
        masks = {name: torch.rand(tensor.shape, generator=generator(layer)) < 0.5 for name, tensor in tensors.items()}
        layers[layer] = Payload.pruned(tensors, masks)
    return model, layers


def test_kept_weights_learn_and_pruned_ones_stay_zero(pruned):
    model, layers = pruned
    segments = tokens(4, 24)
    found, first = recovered(model, layers, segments, SCHEDULE, generator())
    assert found.keys() == layers.keys()
    for layer, payload in found.items():
        for name, mask in layers[layer].masks.items():
            assert torch.equal(payload.masks[name], mask)
            assert not payload.tensors[name][~mask].any()
            changed = payload.tensors[name] != layers[layer].tensors[name]
            assert changed[mask].double().mean() > 0.9
    _, second = recovered(model, found, segments, SCHEDULE, generator())
    assert second < first


@pytest.mark.full
def test_the_same_draw_gives_the_same_weights(pruned):
    model, layers = pruned
    digests = [
        [payload.digest() for payload in recovered(model, layers, tokens(4, 24), SCHEDULE, generator(seed))[0].values()]
        for seed in (0, 0, 1)
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_dropout_draws_by_the_seed_alone(tmp_path):
    model = LanguageModel(tiny_checkpoint(tmp_path / "model", "opt", dropout=0.5))
    tensors = {name: model.layer_tensors(1)[name] for name in model.prunable(1)}
    layers = {1: Payload.pruned(tensors, {name: tensor > 0 for name, tensor in tensors.items()})}
    losses = []
    for seed in (0, 0, 1):
        torch.rand(3)  # another client's work in the same process
        losses.append(recovered(model, layers, tokens(2, 16), Schedule(1, 2, 1e-3), generator(seed))[1])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.full
def test_a_model_of_another_dtype_comes_back_in_it(tmp_path):
    model = LanguageModel(tiny_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16))
    tensors = {name: model.layer_tensors(1)[name] for name in model.prunable(1)}
    layers = {1: Payload.pruned(tensors, {name: tensor > 0 for name, tensor in tensors.items()})}
    found, _ = recovered(model, layers, tokens(2, 16), SCHEDULE, generator())
    assert {tensor.dtype for tensor in found[1].tensors.values()} == {torch.bfloat16}


def test_a_learning_rate_that_breaks_the_model_is_named(pruned):
    model, layers = pruned
    with pytest.raises(ValueError, match=r"the loss of recovery is .*\(fedspallm.recovery-learning-rate\)"):
        recovered(model, layers, tokens(4, 24), Schedule(30, 2, 1e30), generator())


def test_the_learning_rate_rises_and_falls():
    schedule = Schedule(steps=100, batch_size=1, learning_rate=1.0)
    rates = [schedule.rate(step) for step in range(100)]
    assert max(rates) == pytest.approx(rates[9]) == pytest.approx(1.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
