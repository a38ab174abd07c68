from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprune_app.core.masks import full_masks, keep_count, mask_distance, prune_percent, random_masks
from fedprune_app.core.rng import generator


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


def test_pruning_removes_the_smallest_of_the_remaining_weights():
    weights = {"w": torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 4.0, 0.0, 9.0])}
    masks = {"w": torch.tensor([True] * 7 + [False])}  # 9.0 is not ours any more, and the 0 is kept but not alive
    # alive magnitudes .1 .2 .3 3 4 5: their 40th percentile is .3 (position 2 of 0..5), removed is what is below it
    pruned = prune_percent(weights, masks, 40)
    assert pruned["w"].tolist() == [False, True, False, True, True, True, False, False]


@given(st.integers(1, 400), st.floats(0, 100), st.integers(0, 2**31))
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
    with pytest.raises(ValueError, match="percent is"):
        prune_percent({}, {}, percent)


def test_the_mask_distance_counts_each_tensor_alike():
    a = full_masks({"small": (2,), "large": (1000,)})
    b = {"small": torch.tensor([True, False]), "large": a["large"]}
    assert mask_distance(a, b) == 0.25
    assert mask_distance(a, a) == 0.0


def test_masks_of_different_tensors_have_no_distance():
    with pytest.raises(ValueError, match="different tensors"):
        mask_distance(full_masks({"a": (2,)}), full_masks({"b": (2,)}))
