"""Steps on a part of the network: what is left out comes back, and a sliced network is the masked one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clients.fedp3 import OrderedDropout, UniformPruning, share_law
from fedprune_app.core.flops import forward_flops, training_flops
from fedprune_app.core.layers import layers_of
from fedprune_app.core.masks import random_masks
from fedprune_app.core.structured import LeadingCounts, hidden_groups, leading_count
from fedprune_app.learning.parts import Part
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.models import vision
from fedprune_app.models.vision import build_model, prunable_names
from tests.examples import full, in_test

SHAPES = {
    "lenet5": (3, 32, 32),
    "lenet5-bn": (3, 32, 32),
    "cnn-gn": (3, 16, 16),
    "mlp3": (1, 4, 4),
    "cnn5": (1, 28, 28),
}
HARD = SGD(0.1, momentum=0.6, weight_decay=0.02, batch_size=7, epochs=2, max_grad_norm=0.5)


def network(name):
    model = build_model(name, SHAPES[name], 10, rng=torch.Generator().manual_seed(3))
    layers = layers_of(list(vision.named_tensors(model)), prunable_names(model))
    shapes = {n: t.shape for n, t in vision.named_tensors(model).items()}
    return model, layers, hidden_groups(layers, shapes)


def ordered(name, model, groups, full=(), kept=(), share=0.5, seed=0, law=None):
    flops = forward_flops(model, SHAPES[name])
    return OrderedDropout(model, groups, full, dict(kept), law or (lambda _: share), np.random.default_rng(seed), flops)


def examples(name, count=20):
    rng = torch.Generator().manual_seed(4)
    return torch.randn(count, *SHAPES[name], generator=rng), torch.randint(0, 10, (count,), generator=rng)


def global_masks(model, own, layers):
    mine = {n for layer in own for n in layers[layer]}
    shapes = {n: p.shape for n, p in model.named_parameters() if n in prunable_names(model) and n not in mine}
    return random_masks(shapes, dict.fromkeys(shapes, 0.7), torch.Generator().manual_seed(5))


def block_masks(part, model):
    """Of every parameter, True in the leading block."""
    masks = {}
    for name, parameter in model.named_parameters():
        mask = torch.ones_like(parameter, dtype=torch.bool)
        for dim, reach in part.extents.get(name, {}).items():
            index = torch.arange(parameter.shape[dim]) < reach
            mask &= index.view(-1, *[1] * (parameter.dim() - dim - 1))
        masks[name] = mask
    return masks


def masked_training(model, images, labels, sgd, rng, kept, parts):
    """The full network with what a step leaves out multiplied by 0: slow, plain PyTorch."""
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, mask in kept.items():
        weights[name] *= mask
    velocity = {n: torch.zeros_like(w) for n, w in weights.items()}
    for _ in range(sgd.epochs):
        for batch in torch.randperm(len(labels), generator=rng).split(sgd.batch_size):
            at_work = parts()
            leaves = {n: (w * at_work.get(n, 1)).requires_grad_() for n, w in weights.items()}
            logits = torch.func.functional_call(model, leaves, (images[batch],))
            found = torch.autograd.grad(F.cross_entropy(logits, labels[batch]), list(leaves.values()))
            grads = {n: g * at_work.get(n, 1) for n, g in zip(leaves, found, strict=True)}
            norm = torch.stack([g.norm() for g in grads.values()]).norm()
            for n, g in grads.items():
                if sgd.max_grad_norm:
                    g = g * min(1.0, sgd.max_grad_norm / float(norm + 1e-6))
                g = g * kept.get(n, 1) + sgd.weight_decay * weights[n]
                moved = sgd.momentum * velocity[n] + g
                there = at_work.get(n, torch.ones_like(g, dtype=torch.bool))
                velocity[n] = torch.where(there, moved, velocity[n])
                weights[n] = torch.where(there, weights[n] - sgd.learning_rate * moved, weights[n])
    return weights


def close(actual, expected):
    torch.testing.assert_close(dict(actual), dict(expected), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", in_test(SHAPES, "lenet5", "cnn-gn"))
@pytest.mark.parametrize("position", [None, 0, full(1), full(-2)])
def test_a_sliced_step_is_a_step_of_the_masked_network(name, position):
    """Forward, gradients, and after ten clipped steps with momentum, weight decay and pruned weights."""
    model, layers, groups = network(name)
    own = [list(layers)[position]] if position is not None else []
    own.append(list(layers)[-1])
    full = {n.rpartition(".")[0] for layer in own for n in layers[layer]}
    kept = global_masks(model, own, layers)
    images, labels = examples(name)

    def dropout():
        return ordered(name, model, groups, full, kept, seed=1, law=share_law(0.3))

    seen = []

    def counted(num_examples, source=dropout()):  # noqa: B008 - one source for all calls
        seen.append(source(num_examples))
        return seen[-1]

    before = vision.state_tensors(model, include_buffers=True)
    reference_model = copy.deepcopy(model).train()
    again = dropout()
    order = torch.Generator().manual_seed(7)
    expected = masked_training(reference_model, images, labels, HARD, order, kept, lambda: block_masks(again(1), model))
    train(model, images, labels, HARD, rng=torch.Generator().manual_seed(7), masks=kept, part=counted)
    close(vision.state_tensors(model), expected)
    assert len(seen) == 6
    assert any(part.extents for part in seen)
    reached = [block_masks(part, model) for part in seen]
    for parameter, value in vision.state_tensors(model).items():  # what no step reached is as it was, to the bit
        reach = torch.stack([masks[parameter] for masks in reached]).any(0)
        start = before[parameter] * kept.get(parameter, True)
        assert torch.equal(value[~reach], start[~reach])
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_the_small_network_has_small_layers(name):
    """What a layer is given and gives is as narrow as the share says: nothing full is computed."""
    model, layers, groups = network(name)
    dropout = ordered(name, model, groups, {list(layers)[-1]})
    widths = {}
    for layer in layers:
        model.get_submodule(layer).register_forward_hook(
            lambda _, inputs, output, layer=layer: widths.update({layer: (inputs[0].shape[1], output.shape[1])})
        )
    images, labels = examples(name)
    train(model, images, labels, SGD(0.1, batch_size=20), rng=torch.Generator(), part=dropout)
    *hidden, last = layers
    for i, layer in enumerate(hidden):
        out, inputs = dict(model.named_parameters())[f"{layer}.weight"].shape[:2]
        cut = leading_count(out, 0.5, out // 4 if name == "cnn-gn" else 1)
        assert widths[layer] == (inputs if i == 0 else pytest.approx(inputs / 2, abs=inputs / 8), cut)
    assert widths[last][1] == 10
    assert dropout.flops < 0.75 * training_flops(forward_flops(model, SHAPES[name]), 20)


def test_a_share_of_one_is_the_whole_network_to_the_bit(own_form):
    outcomes = []
    for share in (None, 1.0):
        model, _, groups = network("lenet5")
        part = share and ordered("lenet5", model, groups, share=share)
        train(model, *examples("lenet5"), HARD, rng=torch.Generator().manual_seed(7), part=part or None)
        outcomes.append(vision.state_tensors(model))
        if part:
            assert part.flops == training_flops(forward_flops(model, SHAPES["lenet5"]), 40)
    close(outcomes[0], outcomes[1])
    assert all(torch.equal(outcomes[0][n], outcomes[1][n]) for n in outcomes[0])


def test_a_layer_between_two_own_ones_keeps_all_its_units():
    model, _, groups = network("lenet5")
    part = ordered("lenet5", model, groups, {"conv2", "fc1", "fc3"}).sized(0.5)
    # conv1 | conv2 = fc1 | fc2 | fc3: the units between conv2 and fc1 alone touch full layers only
    assert part.extents == {
        "conv1.weight": {0: 3},
        "conv1.bias": {0: 3},
        "conv2.weight": {1: 3},
        "fc1.weight": {0: 60},
        "fc1.bias": {0: 60},
        "fc2.weight": {0: 42, 1: 60},
        "fc2.bias": {0: 42},
        "fc3.weight": {1: 42},
    }


@pytest.mark.parametrize("name", ["lenet5", "cnn-gn"])
def test_weights_that_uniform_pruning_leaves_out_take_no_part_and_come_back(name):
    model, layers, _ = network(name)
    own = [list(layers)[1], list(layers)[-1]]
    kept = global_masks(model, own, layers)
    shapes = {n: mask.shape for n, mask in kept.items()}
    flops = forward_flops(model, SHAPES[name])

    def pruning():
        law = share_law(0.4)
        return UniformPruning(shapes, kept, law, np.random.default_rng(1), flops, torch.device("cpu"))

    again, used = pruning(), pruning()
    images, labels = examples(name)
    order, reference_model = torch.Generator().manual_seed(7), copy.deepcopy(model).train()
    expected = masked_training(reference_model, images, labels, HARD, order, kept, lambda: again(1).masks)
    train(model, images, labels, HARD, rng=torch.Generator().manual_seed(7), masks=kept, part=used)
    close(vision.state_tensors(model), expected)
    dense, globally = training_flops(flops, 40), training_flops(flops, 40, kept)
    assert 0.5 * globally < used.flops < globally < dense


def test_what_a_step_leaves_out_has_its_old_value_and_momentum_to_the_bit():
    model, _, _ = network("mlp3")
    before = vision.state_tensors(model)
    mask = torch.rand(before["fc2.weight"].shape, generator=torch.Generator().manual_seed(1)) < 0.5
    train(model, *examples("mlp3"), HARD, rng=torch.Generator(), part=lambda _: Part(masks={"fc2.weight": mask}))
    after = vision.state_tensors(model)["fc2.weight"]
    assert torch.equal(after[~mask], before["fc2.weight"][~mask])
    assert (after[mask] != before["fc2.weight"][mask]).float().mean() > 0.9


def test_the_bernoulli_masks_keep_the_share_they_were_asked_for():
    shapes = {"w": torch.Size((400, 500))}
    pruning = UniformPruning(shapes, {}, lambda _: 0.7, np.random.default_rng(2), {}, torch.device("cpu"))
    first, second = (pruning(1).masks["w"] for _ in range(2))
    for mask in (first, second):
        assert float(mask.float().mean()) == pytest.approx(0.7, abs=5 * (0.21 / 200_000) ** 0.5)
    assert float((first & second).float().mean()) == pytest.approx(0.49, abs=0.01)


def test_a_steps_share_is_uniform_from_the_least_on():
    draw = np.random.default_rng(0)
    uniform = [share_law(0.6)(draw) for _ in range(4000)]
    assert min(uniform) >= 0.6
    assert max(uniform) < 1
    assert np.mean(uniform) == pytest.approx(0.8, abs=0.01)


def test_counts_of_leading_blocks_are_those_of_counting():
    mask = torch.rand(7, 5, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.4
    counts = LeadingCounts(mask)
    assert counts.within(None) == int(mask.sum())
    assert counts.within({0: 3, 1: 2}) == int(mask[:3, :2].sum())
    assert counts.within({1: 4}) == int(mask[:, :4].sum())
    assert LeadingCounts(mask[..., 0, 0]).within({0: 6}) == int(mask[:6, :, 0, 0].sum())


def test_leading_counts_round_up_guard_float_noise_and_keep_groups_whole():
    assert leading_count(25, 0.28) == 7
    assert leading_count(64, 0.5) == 32
    assert leading_count(10, 1e-6) == 1
    assert leading_count(16, 0.3, multiple=4) == 8
    assert leading_count(6, 0.9, multiple=4) == 6
