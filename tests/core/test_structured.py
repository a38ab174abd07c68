"""Channels that are removed: the small network against the masked one, and the way there and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedprune_app.core.rng import generator
from fedprune_app.core.structured import (
    ChannelGroup,
    Slice,
    channel_distance,
    choose_channels,
    coordinate_masks,
    full_channels,
    gather,
    scatter,
    shrink,
)
from fedprune_app.models.initial import channel_groups
from fedprune_app.models.vision import build_model
from tests.examples import in_test

SHAPES = {"lenet5-bn": (3, 32, 32), "cnn5-bn": (1, 28, 28), "vgg11-bn": (3, 32, 32), "resnet18-bn": (3, 16, 16)}


def seeded(name):
    """A network whose norms have scales and statistics as after some training, in double precision."""
    model = build_model(name, SHAPES[name], 10, rng=generator(0, "init")).double()
    rng = generator(0, "norms")
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.uniform_(0.2, 1.0, generator=rng)
            layer.bias.data.normal_(generator=rng)
            layer.running_mean.normal_(generator=rng)
            layer.running_var.uniform_(0.5, 2.0, generator=rng)
    return model


def tensors_of(model):
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers()) if t.dim()}


@pytest.fixture(scope="module", params=in_test(SHAPES, "lenet5-bn", "cnn5-bn"))
def case(request):
    """(full model, its groups, kept channels, the masked full model, the small model, images)."""
    model = seeded(request.param)
    groups = channel_groups(model, SHAPES[request.param])
    kept = choose_channels(groups, tensors_of(model), full_channels(groups), 0.45, 0.5)
    masks = coordinate_masks(groups, kept, {name: t.shape for name, t in tensors_of(model).items()})
    masked = copy.deepcopy(model)
    state = dict(masked.named_parameters()) | dict(masked.named_buffers())
    for name, mask in masks.items():
        state[name].data.mul_(mask)
    small = shrink(copy.deepcopy(model), groups, kept)
    images = torch.rand(6, *SHAPES[request.param], dtype=torch.float64, generator=generator(0, "images"))
    return model, groups, kept, masks, masked, small, images


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_the_small_network_computes_what_the_masked_one_does(case):
    *_, masked, small, images = case
    close(small.eval()(images), masked.eval()(images))


def test_gradients_and_training_steps_of_the_small_network_are_the_masked_ones(case):
    _, groups, kept, masks, masked, small, images = case
    masked, small = copy.deepcopy(masked).train(), copy.deepcopy(small).train()
    labels = torch.arange(6)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (masked, small)]
    for _ in range(3):
        for model, optimizer in zip((masked, small), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
        for name, parameter in masked.named_parameters():
            if name in masks:
                parameter.grad.mul_(masks[name])
        full_gradients = {name: p.grad for name, p in masked.named_parameters()}
        for name, gradient in gather(full_gradients, groups, kept).items():
            close(small.get_parameter(name).grad, gradient)
        for optimizer in optimizers:
            optimizer.step()
    trained = gather(tensors_of(masked), groups, kept)
    for name, tensor in tensors_of(small).items():
        close(tensor, trained[name])  # running statistics too


def test_the_small_network_is_really_small(case):
    model, groups, kept, masks, _, small, _ = case
    remaining = sum(p.numel() for p in small.parameters())
    assert remaining == sum(int(masks[n].sum()) if n in masks else p.numel() for n, p in model.named_parameters())
    assert remaining < 0.65 * sum(p.numel() for p in model.parameters())
    for group in groups:
        assert 0.5 * group.size <= int(kept[group.name].sum()) <= 0.56 * group.size


def test_scattering_undoes_gathering_but_for_what_is_gone(case):
    model, groups, kept, masks, *_ = case
    full = tensors_of(model)
    back = scatter(gather(full, groups, kept), groups, kept, {name: t.shape for name, t in full.items()})
    assert back.keys() == full.keys()
    for name, tensor in full.items():
        expected = torch.where(masks[name], tensor, 0) if name in masks else tensor
        assert torch.equal(back[name], expected)


def test_keeping_every_channel_changes_nothing(case):
    model, groups, *_, images = case
    everything = full_channels(groups)
    shapes = {name: t.shape for name, t in tensors_of(model).items()}
    assert all(mask.all() for mask in coordinate_masks(groups, everything, shapes).values())
    same = shrink(copy.deepcopy(model), groups, everything)
    assert torch.equal(same.eval()(images), model.eval()(images))


# --- choosing -----------------------------------------------------------------------------------------------------


def choose(scales, kept=None, fraction=0.45, floor=0.5):
    group = ChannelGroup("bn", len(scales), ("bn.weight",), (Slice("bn.weight", 0),))
    kept = torch.ones(len(scales), dtype=torch.bool) if kept is None else kept
    return choose_channels([group], {"bn.weight": torch.tensor(scales)}, {"bn": kept}, fraction, floor)["bn"]


def test_lenets_six_channels_become_three_and_its_sixteen_eight_in_one_step():
    assert choose([0.6, 0.1, -0.5, 0.2, 0.4, -0.3]).tolist() == [True, False, True, False, True, False]
    sixteen = choose([i / 16 for i in range(16)])
    assert sixteen.tolist() == [False] * 8 + [True] * 8


def test_a_layer_at_its_floor_stays_as_it_is():
    once = choose([0.6, 0.1, 0.5, 0.2, 0.4, 0.3])
    assert torch.equal(choose([0.6, 0.1, 0.5, 0.2, 0.4, 0.3], once), once)


def test_a_step_that_would_go_below_the_floor_is_not_taken():
    assert choose([0.1, 0.2, 0.3, 0.4], fraction=0.8).all()
    assert choose([0.1] * 4).all()  # equal scales are all at the threshold: none would stay
    assert choose([0.5]).all()


def test_removed_channels_are_not_ranked_and_never_come_back():
    kept = torch.tensor([True, False, True, True, True, True])
    chosen = choose([0.1, 9.0, 0.2, 0.3, 0.4, 0.5], kept, floor=0.1)
    assert chosen.tolist() == [False, False, False, False, True, True]


def test_the_distance_counts_every_channel_alike():
    a = {"x": torch.tensor([True, True]), "y": torch.tensor([True] * 6)}
    b = {"x": torch.tensor([True, False]), "y": torch.tensor([True] * 5 + [False])}
    assert channel_distance(a, b) == 2 / 8
    assert channel_distance({}, {}) == 0


@pytest.mark.parametrize(("fraction", "floor"), [(1.0, 0.5), (-0.1, 0.5), (0.4, 1.0), (0.4, -1.0)])
def test_fractions_out_of_range_are_refused(fraction, floor):
    with pytest.raises(ValueError, match="allowed: 0 to below 1"):
        choose([0.1, 0.2], fraction=fraction, floor=floor)


# --- networks -----------------------------------------------------------------------------------------------------


def test_a_residual_connection_joins_the_channels_on_both_of_its_ends():
    groups = {group.name: group for group in channel_groups(seeded("resnet18-bn"), SHAPES["resnet18-bn"])}
    joined = groups["layer2.0.bn2"]
    assert set(joined.scales) == {"layer2.0.bn2.weight", "layer2.0.downsample.1.weight", "layer2.1.bn2.weight"}
    assert groups["layer2.0.bn1"].scales == ("layer2.0.bn1.weight",)
    cut = [piece.tensor for group in groups.values() for piece in group.slices if piece.dim == 0]
    assert len(cut) == len(set(cut))  # no tensor's channels are in two groups


def test_a_linear_layer_behind_feature_maps_loses_a_block_of_columns_per_channel():
    groups = channel_groups(seeded("cnn5-bn"), SHAPES["cnn5-bn"])
    assert Slice("fc1.weight", 1, 16) in groups[-1].slices  # 4x4 maps
    groups = channel_groups(seeded("lenet5-bn"), SHAPES["lenet5-bn"])
    assert Slice("fc1.weight", 1, 25) in groups[-1].slices


@pytest.mark.parametrize("name", ["lenet5", "cnn-gn"])
def test_a_network_without_batch_norm_is_refused_on_one_line(name):
    model = build_model(name, (3, 32, 32), 10, rng=generator(0, "init"))
    with pytest.raises(ValueError, match="no BatchNorm to rank channels by, allowed: one whose name ends in -bn"):
        channel_groups(model, (3, 32, 32))
