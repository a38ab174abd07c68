from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.masks import (
    erk_densities,
    full_masks,
    keep_count,
    magnitude_masks_across,
    mask_distance,
    prune_and_grow,
    prune_percent,
    random_masks,
    relative_threshold_masks,
    uniform_densities,
)
from fedprune_app.core.rng import generator
from tests.examples import examples


@settings(deadline=None)
@given(st.integers(0, 10**7), st.integers(0, 100))
def test_a_whole_percentage_keeps_its_exact_share(n, percent):
    assert keep_count(n, percent / 100) == n * percent // 100


@pytest.mark.parametrize("density", [-0.1, 1.1, float("nan")])
def test_a_density_outside_zero_to_one_is_refused(density):
    with pytest.raises(ValueError, match="density is"):
        keep_count(10, density)


def test_random_masks_keep_exactly_their_count_and_depend_on_the_generator_alone():
    shapes = {"a": (7, 9), "b": (100,)}
    draw = lambda seed: random_masks(shapes, {"a": 0.5, "b": 0.13}, generator(seed, "masks"))  # noqa: E731
    masks = draw(0)
    assert [int(m.sum()) for m in masks.values()] == [31, 13]
    assert all(torch.equal(masks[k], draw(0)[k]) for k in shapes)
    assert not torch.equal(masks["b"], draw(1)["b"])


def test_the_largest_of_all_tensors_together_stay_and_of_equal_ones_the_first():
    weights = {"a": torch.tensor([[1.0, -9.0], [2.0, 3.0]]), "b": torch.tensor([-3.0, 8.0, 0.5, 0.0])}
    masks = magnitude_masks_across(weights, 0.375)
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "a": [[False, True], [False, True]],
        "b": [False, True, False, False],
    }
    assert sum(int(mask.sum()) for mask in magnitude_masks_across(weights, 0.0).values()) == 0


def test_pruning_removes_the_smallest_of_the_remaining_weights():
    weights = {"w": torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 4.0, 0.0, 9.0])}
    masks = {"w": torch.tensor([True] * 7 + [False])}  # 9.0 is not ours any more, and the 0 is kept but not alive
    # alive magnitudes .1 .2 .3 3 4 5: their 40th percentile is .3 (position 2 of 0..5), removed is what is below it
    pruned = prune_percent(weights, masks, 40)
    assert pruned["w"].tolist() == [False, True, False, True, True, True, False, False]


@settings(deadline=None)
@given(st.integers(1, 400), st.floats(0, 100).map(lambda percent: round(percent, 3)), st.integers(0, 2**31))
def test_pruning_never_brings_a_coordinate_back_and_takes_about_its_percentage(n, percent, seed):
    rng = generator(seed, "test")
    weights = {"w": torch.randn(n, generator=rng)}
    masks = {"w": torch.rand(n, generator=rng) < 0.7}
    pruned = prune_percent(weights, masks, percent)["w"]
    assert not (pruned & ~masks["w"]).any()
    alive = int(masks["w"].sum())
    removed = alive - int(pruned.sum())
    # the threshold sits at position p(n-1) of the sorted magnitudes: everything strictly below it goes
    assert removed == (int(np.ceil(round(percent / 100 * (alive - 1), 9))) if alive else 0)


def test_a_tensor_without_alive_weights_is_left_alone():
    masks = {"w": torch.tensor([True, False])}
    assert torch.equal(prune_percent({"w": torch.zeros(2)}, masks, 50)["w"], masks["w"])


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_percentage_outside_its_range_is_refused(percent):
    with pytest.raises(ValueError, match=r"[Pp]ercentile"):
        prune_percent({"w": torch.ones(2)}, {"w": torch.ones(2).bool()}, percent)


def test_the_mask_distance_counts_each_tensor_alike():
    a = full_masks({"small": (2,), "large": (1000,)})
    b = {"small": torch.tensor([True, False]), "large": a["large"]}
    assert mask_distance(a, b) == 0.25
    assert mask_distance(a, a) == 0.0


def test_masks_of_different_tensors_have_no_distance():
    with pytest.raises(ValueError, match="different tensors"):
        mask_distance(full_masks({"a": (2,)}), full_masks({"b": (2,)}))


def resnet18_shapes(num_classes: int = 10) -> dict[str, tuple[int, ...]]:
    """ResNet-18 for 32 x 32 images: 3 x 3 stem, GroupNorm, 1 x 1 shortcuts."""

    def conv(name, out, into, size):
        return {f"{name}.weight": (out, into, size, size), f"{name}.gn.weight": (out,), f"{name}.gn.bias": (out,)}

    shapes, into = conv("conv1", 64, 3, 3), 64
    for stage, out in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            shapes |= conv(f"{name}.conv1", out, into, 3) | conv(f"{name}.conv2", out, out, 3)
            if into != out:
                shapes |= conv(f"{name}.shortcut", out, into, 1)
            into = out
    return shapes | {"linear.weight": (num_classes, 512), "linear.bias": (num_classes,)}


DEEP = ["layer3.0.conv2", "layer3.1.conv1", "layer3.1.conv2"]
DEEPEST = ["layer4.0.conv2", "layer4.1.conv1", "layer4.1.conv2"]


def test_the_resnet18_written_out_here_is_that_of_the_paper():
    assert sum(map(math.prod, resnet18_shapes().values())) == 11_173_962


def test_erk_densities_of_resnet18_at_one_half_are_those_of_the_released_code():
    densities = erk_densities(resnet18_shapes(), 0.5)
    expected = dict.fromkeys(DEEP, 0.7197) | {"layer4.0.conv1": 0.5377} | dict.fromkeys(DEEPEST, 0.3578)
    sparse = {name.removesuffix(".weight"): value for name, value in densities.items() if value != 1}
    assert sparse == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("num_classes", "layer1_is_dense"), [(10, True), (100, False)])
def test_erk_densities_of_resnet18_at_one_fifth_leave_only_the_small_layers_dense(num_classes, layer1_is_dense):
    shapes = resnet18_shapes(num_classes)
    dense = {name for name, value in erk_densities(shapes, 0.2).items() if value == 1}
    small = {name for name in shapes if len(shapes[name]) == 1 or "shortcut" in name}
    layer1 = {name for name in shapes if name.startswith("layer1")}
    assert dense == small | {"conv1.weight", "linear.weight"} | (layer1 if layer1_is_dense else set())


def test_erk_densities_by_hand():
    # ratios 1, 1, .2: of 109 coordinates 54.5 are to be kept, 9 of them dense, so 45.5 of the last tensor's 100
    assert erk_densities({"a": (2, 2), "b": (5,), "c": (10, 10)}, 0.5) == {"a": 1, "b": 1, "c": pytest.approx(0.455)}


SHAPES = st.dictionaries(
    st.text("abcdef", min_size=1), st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple), max_size=8
)


@settings(deadline=None)
@given(SHAPES, st.floats(0, 1))
def test_erk_densities_keep_the_whole_models_density_and_follow_the_ratios(shapes, density):
    densities = erk_densities(shapes, density)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    assert list(densities) == list(shapes)
    assert all(0 <= value <= 1 for value in densities.values())
    kept = sum(densities[name] * sizes[name] for name in shapes)
    assert kept == pytest.approx(density * sum(sizes.values()), rel=1e-9, abs=1e-9)
    factors = [densities[name] * sizes[name] / sum(shapes[name]) for name in shapes if densities[name] < 1]
    assert factors == pytest.approx([factors[0]] * len(factors) if factors else [])
    for name in shapes:  # what is dense is so because its ratio is larger than any sparse tensor's
        if factors and densities[name] == 1:
            assert factors[0] * sum(shapes[name]) >= sizes[name] * (1 - 1e-9)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([0.0, 1.0]))
def test_a_model_of_density_zero_or_one_has_only_tensors_of_that_density(shapes, density):
    assert erk_densities(shapes, density) == dict.fromkeys(shapes, density)


def test_a_single_tensor_has_the_density_of_the_model():
    assert erk_densities({"w": (7, 5, 3)}, 0.3) == {"w": pytest.approx(0.3)}


def test_a_scalar_counts_as_a_bias_and_an_empty_tensor_disturbs_nothing():
    densities = erk_densities({"temperature": (), "none": (0, 4), "w": (20, 20)}, 0.5)
    assert densities == {"temperature": 1, "none": 1, "w": pytest.approx((0.5 * 401 - 1) / 400)}
    assert erk_densities({"none": (0,)}, 0.5) == {"none": 0.5}
    assert erk_densities({}, 0.5) == {}


def test_uniform_densities_spare_everything_that_is_not_a_weight():
    shapes = {"conv": (4, 3, 3, 3), "gn": (4,), "linear": (2, 4), "scale": ()}
    assert uniform_densities(shapes, 0.2) == {"conv": 0.2, "gn": 1, "linear": 0.2, "scale": 1}


@pytest.mark.parametrize("density", [-0.1, 1.1, float("nan")])
def test_densities_outside_zero_to_one_are_refused(density):
    with pytest.raises(ValueError, match="density is"):
        erk_densities({"w": (2, 2)}, density)


def reference_prune_and_grow(weights, gradients, mask, count):
    """The rule as it reads, on flat lists: sort, cut, sort, take."""
    kept = [i for i, on in enumerate(mask) if on]
    dropped = sorted(kept, key=lambda i: (abs(weights[i]), i))[:count]
    off = [i for i, on in enumerate(mask) if not on or i in dropped]
    grown = sorted(off, key=lambda i: (-abs(gradients[i]), i))[:count]
    return [(on and i not in dropped) or i in grown for i, on in enumerate(mask)]


# small whole numbers, so that ties and live zeros are everywhere
COORDINATES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=examples(300), deadline=None)
@given(COORDINATES, st.integers(0, 100))
def test_prune_and_grow_is_the_rule_written_out_with_sorted_lists(coordinates, percent):
    weights, gradients, mask = map(list, zip(*coordinates, strict=True))
    count = -(-percent * sum(mask) // 100)
    expected = reference_prune_and_grow(weights, gradients, mask, count)
    arguments = [{"w": torch.tensor(x, dtype=torch.float32)} for x in (weights, gradients)]
    before = {"w": torch.tensor(mask)}
    after = prune_and_grow(*arguments, before, percent / 100)["w"]
    assert after.dtype == torch.bool
    assert after.tolist() == expected
    assert before["w"].tolist() == mask  # the caller's mask is not touched


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_moving_a_mask_keeps_the_count_of_every_tensor(seed, density, fraction):
    rng = generator(seed, "test")
    shapes = {"conv": (8, 4, 3, 3), "bias": (8,), "one": (1,), "none": (0, 3)}
    weights, gradients = ({name: torch.randn(s, generator=rng) for name, s in shapes.items()} for _ in range(2))
    masks = random_masks(shapes, dict.fromkeys(shapes, density), rng)
    moved = prune_and_grow(weights, gradients, masks, fraction)
    assert {name: int(mask.sum()) for name, mask in moved.items()} == {n: int(m.sum()) for n, m in masks.items()}
    assert {name: tuple(mask.shape) for name, mask in moved.items()} == shapes


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (1e-12, 1), (0.28, 7), (0.281, 8), (1.0, 25)])
def test_the_number_that_moves_is_rounded_up_and_at_least_one(fraction, count):
    mask = torch.arange(90) < 25  # 0.28 * 25 is 7.000000000000001 in floats
    moved = prune_and_grow({"w": torch.ones(90)}, {"w": (~mask).float()}, {"w": mask}, fraction)["w"]
    assert int((moved & ~mask).sum()) == count


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_mask_that_does_not_change_is_a_copy_all_the_same(fraction):
    dense = full_masks({"w": (3,)})
    prune_and_grow({"w": torch.ones(3)}, {"w": torch.ones(3)}, dense, fraction)["w"].zero_()
    assert dense["w"].all()


def test_a_dropped_coordinate_comes_back_when_its_gradient_is_the_largest():
    weights, gradients = torch.tensor([0.1, 5.0, 0.0]), torch.tensor([9.0, 0.0, 1.0])
    mask = torch.tensor([True, True, False])
    assert prune_and_grow({"w": weights}, {"w": gradients}, {"w": mask}, 0.5)["w"].tolist() == mask.tolist()


def test_a_live_zero_is_the_first_to_go():
    weights, mask = torch.tensor([0.1, 0.0, -0.2, 0.0]), torch.tensor([True, True, True, False])
    moved = prune_and_grow({"w": weights}, {"w": torch.tensor([0.0, 0, 0, 1])}, {"w": mask}, 0.1)["w"]
    assert moved.tolist() == [True, False, True, True]


def test_an_infinite_gradient_is_only_a_large_one():
    mask = torch.tensor([True, False, False])
    moved = prune_and_grow({"w": torch.ones(3)}, {"w": torch.tensor([1.0, 2.0, -math.inf])}, {"w": mask}, 1.0)["w"]
    assert moved.tolist() == [False, False, True]


def test_the_memory_layout_of_the_weights_does_not_decide_ties():
    rng = generator(0, "layout")
    weights, gradients = (torch.randint(-2, 3, (4, 6, 3, 3), generator=rng).float() for _ in range(2))
    mask = torch.rand(4, 6, 3, 3, generator=rng) < 0.5
    plain = prune_and_grow({"w": weights}, {"w": gradients}, {"w": mask}, 0.4)["w"]
    last = [{"w": x.contiguous(memory_format=torch.channels_last)} for x in (weights, gradients, mask)]
    assert torch.equal(prune_and_grow(*last, 0.4)["w"], plain)
    assert torch.equal(prune_and_grow({"w": weights}, last[1], {"w": mask}, 0.4)["w"], plain)


@pytest.mark.parametrize("kind", ["weight", "gradient"])
def test_a_nan_cannot_be_ranked(kind):
    good, bad = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])}
    arguments = (bad, good) if kind == "weight" else (good, bad)
    with pytest.raises(ValueError, match=f"{kind} 'b' holds NaN"):
        prune_and_grow(*arguments, full_masks({"a": (2,), "b": (2,)}), 0.5)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(fraction):
    with pytest.raises(ValueError, match="fraction is"):
        prune_and_grow({}, {}, {}, fraction)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mask_moves_on_a_gpu_as_on_a_cpu():
    rng = generator(0, "gpu")
    weights, gradients = (torch.randn(256, 256, 3, 3, generator=rng).mul(50).round() for _ in range(2))
    mask = torch.rand(256, 256, 3, 3, generator=rng) < 0.4
    here = prune_and_grow({"w": weights}, {"w": gradients}, {"w": mask}, 0.3)["w"]
    there = prune_and_grow({"w": weights.cuda()}, {"w": gradients.cuda()}, {"w": mask.cuda()}, 0.3)["w"]
    assert there.is_cuda
    assert torch.equal(there.cpu(), here)


def test_a_relative_threshold_keeps_what_is_larger_than_a_share_of_the_largest():
    weights = {"a": torch.tensor([[0.1, -1.0], [0.5, -0.5]]), "b": torch.tensor([3.0, -4.0, 0.0])}
    masks = relative_threshold_masks(weights, 0.5)
    assert masks["a"].tolist() == [[False, True], [False, False]]  # exactly half is not larger
    assert masks["b"].tolist() == [True, True, False]
    assert relative_threshold_masks(weights, 0.0)["b"].tolist() == [True, True, False]
    assert relative_threshold_masks({"z": torch.zeros(3), "e": torch.zeros(0)}, 0.0)["z"].tolist() == [False] * 3


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(0, 10**6), st.floats(0, 0.99), st.floats(0, 0.99))
def test_relative_thresholds_are_nested_and_scale_free_and_spare_the_largest(seed, one, other):
    low, high = sorted((one, other))
    weight = torch.randn(40, generator=generator(seed, "weights"))
    loose, tight = (relative_threshold_masks({"w": weight}, ratio)["w"] for ratio in (low, high))
    assert not bool((tight & ~loose).any())
    assert bool(tight[weight.abs().argmax()])
    assert torch.equal(relative_threshold_masks({"w": -4 * weight}, low)["w"], loose)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, math.nan])
def test_a_relative_threshold_outside_its_range_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio is"):
        relative_threshold_masks({"w": torch.ones(2)}, ratio)


def test_a_relative_threshold_of_nan_is_refused():
    with pytest.raises(ValueError, match="weight 'w' holds NaN"):
        relative_threshold_masks({"w": torch.tensor([1.0, math.nan])}, 0.5)
