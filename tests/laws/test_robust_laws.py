"""What hostile clients can do to a robust average: nothing beyond the stated bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.core.robust import TrimmedMean, clipped, move_norm
from tests.examples import examples
from tests.laws.test_aggregate_laws import mean_of, random_payload

FALLBACK = dict(random_payload(99, density=None).tensors)


def trimmed(payloads, trim, fallback=FALLBACK):
    mean = TrimmedMean(trim)
    for payload in payloads:
        mean.add(payload)
    return mean.mean(fallback)


def reference(payloads, trim):
    """Coordinate by coordinate, with Python's own sort."""
    result = {}
    for name, old in FALLBACK.items():
        out = old.clone().double()
        for index in itertools.product(*map(range, old.shape)):
            values = sorted(
                float(p.tensors[name][index]) for p in payloads if name not in p.masks or p.masks[name][index]
            )
            cut = math.floor(trim * len(values) + 1e-9)
            if values and (cut or not trim):
                left = values[cut : len(values) - cut]
                out[index] = sum(left) / len(left)
        result[name] = out
    return result


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9), st.sampled_from([0.0, 0.1, 0.2, 0.34, 0.49]))
def test_the_trimmed_mean_is_its_definition_over_each_coordinates_keepers(seeds, trim):
    payloads = [random_payload(seed, density=None if seed % 4 == 0 else 0.5) for seed in seeds]
    for name, expected in reference(payloads, trim).items():
        torch.testing.assert_close(trimmed(payloads, trim)[name].double(), expected, atol=1e-6, rtol=1e-6)


def test_the_order_of_arrival_does_not_change_a_single_bit():
    payloads = [random_payload(seed) for seed in range(5)]
    first = trimmed(payloads, 0.2)
    for order in itertools.permutations(payloads):
        assert all(torch.equal(first[name], again) for name, again in trimmed(order, 0.2).items())


def test_without_trimming_it_is_the_masked_mean():
    payloads = [random_payload(seed) for seed in range(6)]
    plain = mean_of(payloads, FALLBACK)
    for name, mean in trimmed(payloads, 0.0).items():
        torch.testing.assert_close(mean, plain[name], atol=1e-6, rtol=1e-6)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([-1e30, -3.0, 0.0, 5.0, 1e30]), st.integers(0, 2))
def test_a_fifth_of_hostile_clients_cannot_leave_the_range_of_the_honest(seed, value, num_hostile):
    honest = [random_payload(seed + i, density=None) for i in range(8)]
    hostile = [Payload({n: torch.full_like(t, value) for n, t in FALLBACK.items()}) for _ in range(num_hostile)]
    mean = trimmed([*hostile, *honest], 0.2)
    for name in FALLBACK:
        values = torch.stack([payload.tensors[name] for payload in honest])
        assert (mean[name] >= values.amin(dim=0) - 1e-6).all()
        assert (mean[name] <= values.amax(dim=0) + 1e-6).all()


def test_a_coordinate_nobody_kept_stays_where_it_was():
    nothing = Payload({"w": torch.zeros(6, 5)}, {"w": torch.zeros(6, 5, dtype=torch.bool)})
    mean = trimmed([nothing, nothing], 0.2)
    assert all(torch.equal(mean[name], FALLBACK[name]) for name in FALLBACK)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_are_refused(value):
    with pytest.raises(ValueError, match="'w' has values that are not finite"):
        TrimmedMean(0.2).add(Payload({"w": torch.tensor([0.0, value])}))


@pytest.mark.parametrize("trim", [-0.1, 0.5])
def test_trimming_everything_is_refused(trim):
    with pytest.raises(ValueError, match=r"allowed: 0 to below 0\.5$"):
        TrimmedMean(trim)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.sampled_from([1e-3, 1.0, 1e6]))
def test_no_client_moves_further_than_the_bound_and_keeps_its_direction(seed, bound, scale):
    sent = random_payload(seed)
    large = Payload.pruned({name: tensor * scale for name, tensor in sent.tensors.items()}, sent.masks)
    short = clipped(large, FALLBACK, bound)
    norm = move_norm(large, FALLBACK)
    assert move_norm(short, FALLBACK) == pytest.approx(min(norm, bound), rel=1e-4, abs=1e-5)
    assert short.masks.keys() == large.masks.keys()
    for name, tensor in short.tensors.items():
        share = min(1.0, bound / norm)
        expected = FALLBACK[name] + (large.tensors[name] - FALLBACK[name]) * share
        if name in large.masks:
            assert not tensor[~large.masks[name]].any()
            expected = expected.where(large.masks[name], 0)
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-4)


def test_a_move_within_the_bound_is_not_touched():
    sent = random_payload(3)
    assert clipped(sent, FALLBACK, move_norm(sent, FALLBACK)) is sent


def test_large_tensors_are_taken_in_blocks():
    rng = generator(0, "large")
    payloads = [Payload({"w": torch.randn(3, 50_000, generator=rng)}) for _ in range(5)]
    mean = trimmed(payloads, 0.2, {"w": torch.zeros(3, 50_000)})["w"]
    middle = torch.stack([p.tensors["w"] for p in payloads]).sort(dim=0).values[1:4].double().mean(dim=0)
    torch.testing.assert_close(mean.double(), middle, atol=1e-6, rtol=1e-6)
