"""Winning tickets: exact retention, sub-models inside one another, a softmax that no count breaks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprune_app.core.masks import keep_count, packed, random_coordinates, relative_threshold_masks, unpacked
from fedprune_app.core.rng import generator
from fedprune_app.core.tickets import at_level, nested_levels, selection_probabilities, ticket_masks

SHAPES = {"conv.weight": (10, 1, 5, 5), "fc.weight": (40, 32)}


def weights(shapes=SHAPES):
    draw = generator(0, "weights")
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.0, 0.28, 0.5, 0.99, 1.0])
def test_a_ticket_keeps_exactly_its_density_of_each_tensor_and_the_largest_weights(density):
    for name, mask in ticket_masks(weights(), density).items():
        magnitude = weights()[name].abs()
        assert int(mask.sum()) == math.floor(Fraction(str(density)) * mask.numel())
        if 0 < density < 1:
            assert float(magnitude[mask].min()) > float(magnitude[~mask].max())


def test_the_printed_rule_is_a_threshold_relative_to_the_largest_weight():
    masks = ticket_masks({"w": torch.tensor([1.0, -2.0, 0.5, 0.61, -0.6])}, density=0.7, rule="relative-threshold")
    assert masks["w"].tolist() == [True, True, False, True, False]  # above 0.3 * 2
    expected = relative_threshold_masks(weights(), 0.4)
    for name, mask in ticket_masks(weights(), 0.6, "relative-threshold").items():
        assert torch.equal(mask, expected[name])


@given(
    density=st.floats(0.05, 1.0), share=st.floats(0.0, 0.9), count=st.integers(1, 7), rule=st.sampled_from(["quantile"])
)
def test_each_sub_model_lies_in_the_one_before_it_and_keeps_its_share_exactly(density, share, count, rule):
    w = weights()
    ticket = ticket_masks(w, density, rule)
    levels = nested_levels(w, ticket, count, share)
    outer = ticket
    for i in range(1, count + 1):
        inner = at_level(levels, i)
        for name, mask in inner.items():
            assert not bool((mask & ~outer[name]).any())
            assert int(mask.sum()) == keep_count(int(ticket[name].sum()), (1 - share) ** i)
            gone = outer[name] & ~mask
            if bool(mask.any()) and bool(gone.any()):
                assert float(w[name].abs()[mask].min()) >= float(w[name].abs()[gone].max())
        outer = inner
    assert not any(bool(mask.any()) for mask in at_level(levels, count + 1).values())


def test_one_sub_model_that_prunes_nothing_further_is_the_ticket():
    ticket = ticket_masks(weights(), 0.3, "relative-threshold")
    for name, mask in at_level(nested_levels(weights(), ticket, 1, 0.0), 1).items():
        assert torch.equal(mask, ticket[name])


@pytest.mark.parametrize(
    ("kept", "share", "row", "mean"),
    [
        (0.738, 0.4, (0.44, 0.27, 0.16, 0.10, 0.06), 0.20),
        (0.738, 0.3, (0.52, 0.36, 0.25, 0.18, 0.12), 0.29),
        (0.738, 0.2, (0.59, 0.47, 0.38, 0.30, 0.24), 0.40),
        (0.738, 0.1, (0.66, 0.60, 0.54, 0.48, 0.44), 0.54),
        (0.99, 0.4, (0.60, 0.36, 0.22, 0.13, 0.08), 0.28),
        (0.99, 0.3, (0.70, 0.49, 0.34, 0.24, 0.17), 0.39),
        (0.99, 0.2, (0.79, 0.64, 0.51, 0.41, 0.33), 0.53),
        (0.99, 0.1, (0.89, 0.80, 0.72, 0.65, 0.59), 0.73),
    ],
)
def test_the_compression_ratios_of_the_papers_table_2(kept, share, row, mean):
    """The text's P2 = 0.1 throughout gives none of the rows but the last; P1 is read off the table."""
    w = {"w": torch.randn(100_000, generator=generator(1, "many"))}
    levels = nested_levels(w, ticket_masks(w, kept), 5, share)
    shares = [float(at_level(levels, i)["w"].double().mean()) for i in range(1, 6)]
    assert shares == pytest.approx(row, abs=0.0101)
    assert sum(shares) / 5 == pytest.approx(mean, abs=0.0101)


# --- selection --------------------------------------------------------------------------------------------------------


@given(counts=st.lists(st.integers(0, 10**7), min_size=1, max_size=20))
def test_whatever_the_counts_the_probabilities_are_some_and_follow_their_order(counts):
    found = selection_probabilities(counts, 10**7)
    assert sum(found) == pytest.approx(1)
    assert all(0 <= p <= 1 for p in found)
    for p, count in zip(found, counts, strict=True):
        assert all(p >= other for other, less in zip(found, counts, strict=True) if less < count)


def test_the_softmax_is_of_accuracies_over_the_temperature():
    found = selection_probabilities([45_000, 45_500, 44_000], 50_000)
    exact = [math.exp(accuracy / 0.01) for accuracy in (0.90, 0.91, 0.88)]  # small enough not to overflow
    assert found == pytest.approx([e / sum(exact) for e in exact])


# --- Fed-SPA's coordinates, and values without masks ------------------------------------------------------------------


@given(share=st.floats(0.01, 1.0), seed=st.integers(0, 2**63 - 1))
def test_random_coordinates_are_exactly_the_share_of_all_tensors_together_and_their_seed_alone_decides(share, seed):
    shapes = {**SHAPES, "fc.bias": (40,)}
    size = sum(math.prod(shape) for shape in shapes.values())
    chosen = random_coordinates(shapes, share, seed)
    assert sum(int(mask.sum()) for mask in chosen.values()) == keep_count(size, share)
    again, other = random_coordinates(shapes, share, seed), random_coordinates(shapes, share, seed ^ 1)
    assert all(torch.equal(chosen[name], again[name]) for name in shapes)
    if 0.05 < share < 0.95:
        assert any(not torch.equal(chosen[name], other[name]) for name in shapes)


def test_every_coordinate_is_chosen_as_often():
    shapes = {"a": (6, 5), "b": (20,)}
    total = torch.zeros(50)
    for seed in range(2000):
        total += torch.cat([mask.flatten() for mask in random_coordinates(shapes, 0.3, seed).values()])
    assert float((total / 2000 - 0.3).abs().max()) < 5 * math.sqrt(0.3 * 0.7 / 2000)


def test_packed_values_are_the_kept_ones_alone_and_come_back_to_their_places():
    w = {**weights(), "fc.bias": torch.arange(40.0)}
    masks = ticket_masks(weights(), 0.37)
    values = packed(w, masks)
    assert {name: len(v) for name, v in values.items()} == {
        "conv.weight": 92, "fc.weight": 473, "fc.bias": 40
    }  # fmt: skip
    fallback = {name: torch.full_like(tensor, -7.0) for name, tensor in w.items()}
    back = unpacked(values, masks, fallback)
    for name, tensor in w.items():
        mask = masks.get(name, torch.ones_like(tensor, dtype=torch.bool))
        assert torch.equal(back[name][mask], tensor[mask])
        assert bool((back[name][~mask] == -7).all())
        assert bool((fallback[name] == -7).all())
