"""Laws that every aggregation here obeys, checked against a slow float64 reference written out below."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.holders import Holders
from fedprune_app.core.masks import packed
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from tests.examples import examples

GRID = 2.0**-40


def random_payload(seed: int, density: float | None = 0.5) -> Payload:
    rng = generator(seed, "payload")
    tensors = {"w": torch.randn(6, 5, generator=rng), "b": torch.randn(4, generator=rng)}
    masks = {} if density is None else {"w": torch.rand(6, 5, generator=rng) < density}
    return Payload.pruned(tensors, masks)


def mean_of(payloads, fallback, weights=None):
    """As every strategy averages: one payload after the other into a :class:`MaskedMean`."""
    weights = [1] * len(payloads) if weights is None else weights
    mean = MaskedMean(len(payloads), max(weights))
    for payload, weight in zip(payloads, weights, strict=True):
        mean.add(payload, weight)
    return mean.mean(fallback)


def reference_mean(payloads, weights, fallback):
    """Coordinate by coordinate, as the formula reads."""
    result = {}
    for name, old in fallback.items():
        out = old.clone().double()
        for index in itertools.product(*map(range, old.shape)):
            top = bottom = 0.0
            for payload, weight in zip(payloads, weights, strict=True):
                kept = bool(payload.masks[name][index]) if name in payload.masks else True
                if kept:
                    top += weight * float(payload.tensors[name][index])
                    bottom += weight
            if bottom:
                out[index] = top / bottom
        result[name] = out
    return result


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 500)), min_size=1, max_size=5))
def test_the_masked_mean_is_the_formula(clients):
    payloads = [random_payload(seed, density=None if seed % 4 == 0 else 0.5) for seed, _ in clients]
    weights = [weight for _, weight in clients]
    fallback = dict(random_payload(99).tensors)
    mean = mean_of(payloads, fallback, weights)
    for name, expected in reference_mean(payloads, weights, fallback).items():
        assert mean[name].dtype == torch.float32
        torch.testing.assert_close(mean[name].double(), expected, atol=1e-7, rtol=1e-6)


def test_the_order_of_arrival_does_not_change_a_single_bit():
    payloads = [random_payload(seed) for seed in range(6)]
    weights = [3, 1, 4, 1, 5, 9]
    fallback = dict(random_payload(99).tensors)
    first = mean_of(payloads, fallback, weights)
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37):
        again = mean_of([payloads[i] for i in order], fallback, [weights[i] for i in order])
        assert all(torch.equal(first[name], again[name]) for name in first)


def sum_of_integers(payloads, weights):
    """The integers of all, added up mod 2^64 as by whoever sees none of them."""
    addends = [MaskedMean(len(payloads), max(weights)).integers(*pair) for pair in zip(payloads, weights, strict=True)]
    return Payload({name: sum(each[name] for each in addends) for name in addends[0]})


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 500)), min_size=1, max_size=5))
def test_a_sum_of_integers_is_averaged_to_the_bits_of_its_payloads(clients):
    payloads = [random_payload(seed, density=None) for seed, _ in clients]
    weights = [weight for _, weight in clients]
    mean, fallback = MaskedMean(len(payloads), max(weights)), dict(random_payload(99).tensors)
    sums = sum_of_integers(payloads, weights)
    shapes = {name: tensor.shape for name, tensor in sums.tensors.items()}
    assert shapes == MaskedMean.integer_shapes({name: tensor.shape for name, tensor in fallback.items()})
    mean.add(sums, sum(weights))
    expected = mean_of(payloads, fallback, weights)
    assert all(torch.equal(mean.mean(fallback)[name], tensor) for name, tensor in expected.items())


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(1, 4))
def test_sums_of_masks_and_of_what_enough_hold_are_averaged_to_the_bits_of_the_payloads(seeds, least):
    payloads, fallback = [random_payload(seed) for seed in seeds], dict(random_payload(99).tensors)
    holders, mean, expected = Holders(fallback, len(seeds)), MaskedMean(len(seeds)), MaskedMean(len(seeds))
    masks = sum(holders.integers(payload, holders.terms["holders"])["holders"] for payload in payloads)
    assert {"holders": masks.shape} == holders.integer_shapes({})
    holders.add(Payload({"holders": masks}), len(seeds))
    chosen = {name: counts >= least for name, counts in holders.counts.items()}
    addends = [packed(MaskedMean(len(seeds)).integers(payload, 1), chosen) for payload in payloads]
    values = Payload({name: sum(each[name] for each in addends) for name in addends[0]})
    mean.add_held(values, len(seeds), holders.counts, chosen)
    for payload in payloads:
        expected.add(payload)
    kept = reference_mean(payloads, [1] * len(seeds), fallback)
    assert mean.leave_out(least) == expected.leave_out(least) == few_of(payloads, fallback, least)
    for name, tensor in expected.mean(fallback).items():
        assert torch.equal(mean.mean(fallback)[name], tensor)
        torch.testing.assert_close(tensor.double(), torch.where(chosen[name], kept[name], fallback[name].double()))


def few_of(payloads, fallback, least):
    """How many coordinates some clients hold, but fewer than ``least``."""
    counts = [
        sum(p.masks.get(name, torch.ones_like(tensor, dtype=torch.bool)).int() for p in payloads if name in p.tensors)
        for name, tensor in fallback.items()
    ]
    return sum(int(((count > 0) & (count < least)).sum()) for count in counts)


def test_a_sum_of_masks_that_can_be_none_is_refused():
    counts = torch.tensor([0o4333])
    with pytest.raises(ValueError, match=r"^the sum has 4 holders of a coordinate, allowed: at most 3$"):
        Holders({"w": torch.zeros(4)}, most=4).add(Payload({"holders": counts}), 3)


@pytest.mark.parametrize(("most", "words"), [(1, 1), (2, 1), (3, 2), (10, 2), (15, 3), (2**30, 16)])
def test_counts_of_holders_take_the_bits_that_the_number_of_clients_needs(most, words):
    holders, mask = Holders({"w": torch.zeros(32)}, most), torch.arange(32) % 3 == 0
    integers = holders.integers(Payload({"w": mask.float()}, {"w": mask}), holders.terms["holders"])["holders"]
    assert integers.shape == torch.Size([words]) == holders.integer_shapes({})["holders"]
    holders.add(Payload({"holders": integers * most}), most)
    assert holders.counts["w"].tolist() == (mask * most).tolist()


def test_a_sum_that_can_be_none_of_such_payloads_is_refused_and_changes_nothing():
    mean, payload = MaskedMean(2, 3), Payload({"w": torch.ones(2)})
    sums = sum_of_integers([payload, payload], [3, 1])
    with pytest.raises(ValueError, match=r"^the sum has weight 4, allowed: 5$"):
        mean.add(sums, 5)
    wrapped = Payload({**sums.tensors, "w": torch.tensor([1, -(2**63)])})
    line = "tensor 'w' has magnitude 6.29146e+06, allowed: finite and at most 2.7962e+06 for 2 payloads"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        mean.add(wrapped, 4)
    assert mean.num_added == 0
    assert mean.mean(payload.tensors)["w"].tolist() == [1, 1]


def test_full_masks_are_plain_averaging():
    payloads = [random_payload(seed, density=None) for seed in range(5)]
    masked = [Payload(p.tensors, {"w": torch.ones(6, 5, dtype=torch.bool)}) for p in payloads]
    fallback = dict(payloads[0].tensors)
    plain, full = mean_of(payloads, fallback), mean_of(masked, fallback)
    for name in fallback:
        assert torch.equal(plain[name], full[name])
        torch.testing.assert_close(plain[name], torch.stack([p.tensors[name] for p in payloads]).mean(0))


def test_a_coordinate_nobody_kept_stays_where_it_was():
    kept = torch.tensor([True, False, True])
    payloads = [Payload.pruned({"w": torch.full((3,), float(i))}, {"w": kept}) for i in (1, 3)]
    assert mean_of(payloads, {"w": torch.tensor([7.0, 8.0, 9.0])})["w"].tolist() == [2.0, 8.0, 2.0]


def test_a_weight_just_grown_counts_although_it_is_zero():
    masks = {"w": torch.tensor([True])}
    payloads = [Payload({"w": torch.tensor([value])}, masks) for value in (0.0, 4.0)]
    assert mean_of(payloads, {"w": torch.tensor([9.0])})["w"].item() == 2.0


def test_a_tensor_that_was_not_sent_does_not_take_part():
    mean = mean_of([Payload({"a": torch.ones(2)})], {"a": torch.zeros(2), "b": torch.full((2,), 5.0)})
    assert mean["a"].tolist() == [1, 1]
    assert mean["b"].tolist() == [5, 5]


def test_one_payload_returns_itself_up_to_the_grid():
    payload = random_payload(3, density=None)
    mean = mean_of([payload], payload.tensors)
    for name, tensor in payload.tensors.items():
        assert (mean[name] - tensor).abs().max() <= GRID


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_value_that_cannot_be_summed_exactly_is_refused_and_changes_nothing(value):
    accumulator = MaskedMean(max_addends=3)
    accumulator.add(Payload({"a": torch.ones(1), "b": torch.ones(1)}))
    with pytest.raises(ValueError, match="tensor 'b' has magnitude"):
        accumulator.add(Payload({"a": torch.ones(1), "b": torch.tensor([value])}))
    assert accumulator.num_added == 1
    assert accumulator.mean({"a": torch.zeros(1)})["a"].item() == 1.0


def test_a_value_that_became_too_large_after_a_check_is_refused():
    payload = Payload({"w": torch.ones(3)})
    mean = MaskedMean(2)
    assert mean.check(payload) == 1.0
    payload.tensors["w"][1] = 2.0**23
    with pytest.raises(ValueError, match=re.escape("tensor 'w' has magnitude 8.38861e+06, allowed: finite")):
        mean.add(payload)


def test_a_tensor_of_inference_mode_is_added():
    with torch.inference_mode():
        payload = Payload({"w": torch.full((3,), 2.0)})
    mean = MaskedMean(2)
    mean.add(payload)
    assert mean.mean({"w": torch.zeros(3)})["w"].tolist() == [2.0, 2.0, 2.0]


def test_the_largest_values_allowed_do_not_wrap_around():
    accumulator = MaskedMean(max_addends=100, max_weight=7)
    value = accumulator.max_magnitude * 0.999
    for _ in range(100):
        accumulator.add(Payload({"w": torch.tensor([value], dtype=torch.float64)}), weight=7)
    assert accumulator.mean({"w": torch.zeros(1, dtype=torch.float64)})["w"].item() == pytest.approx(value)


@pytest.mark.parametrize("weight", [0, -1, 8])
def test_a_weight_outside_what_was_announced_is_refused(weight):
    with pytest.raises(ValueError, match="weight is"):
        MaskedMean(max_addends=1, max_weight=7).add(Payload({"w": torch.ones(1)}), weight)


def test_more_payloads_than_announced_are_refused():
    accumulator = MaskedMean(max_addends=1)
    accumulator.add(Payload({"w": torch.ones(1)}))
    with pytest.raises(ValueError, match="more than 1"):
        accumulator.add(Payload({"w": torch.ones(1)}))
