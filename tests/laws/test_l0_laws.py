"""Laws of the l0 mean and of mask expansion, and a slow reference of both, entry by entry as the formulas read."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.masks import keep_count
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from tests.examples import examples
from tests.laws.at_once import expand_masks, l0_mean


def client(seed: int, density: float = 0.5, shape=(6, 8), dtype=torch.float32) -> Payload:
    draw = generator(seed, "client")
    weight = torch.randn(shape, generator=draw).to(dtype)
    numel = weight.numel()
    mask = torch.zeros(numel, dtype=torch.bool)
    mask[torch.randperm(numel, generator=draw)[: keep_count(numel, density)]] = True
    return Payload.pruned({"w": weight}, {"w": mask.view(shape)})


def reference(payloads, density):
    """(mean, mask before expansion, mask after it), by equations (5) to (7) for each entry j in turn."""
    weights = [p.tensors["w"].flatten().tolist() for p in payloads]
    masks = [p.masks["w"].flatten().tolist() for p in payloads]
    d, n = len(weights[0]), len(payloads)
    pruned_by = [sum(not m[j] for m in masks) for j in range(d)]
    mean = []
    for j in range(d):
        kept = [w[j] for w, m in zip(weights, masks, strict=True) if m[j]]
        mean.append(sum(kept) / len(kept) if kept else 0.0)
    union = [c < n for c in pruned_by]
    k = max(0, math.ceil(round((1 - density) * d, 6)) - sum(not kept for kept in union))
    left = sorted((j for j in range(d) if union[j]), key=lambda j: (-pruned_by[j], abs(mean[j]), j))
    after = list(union)
    for j in left[:k]:
        after[j] = False
    return mean, union, after


@settings(max_examples=examples(60), deadline=None)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=6, unique=True),
    local=st.sampled_from([0.25, 0.5, 0.75]),
    density=st.sampled_from([0.1, 0.3, 0.5, 0.9]),
)
def test_mean_and_expansion_are_the_formulas(seeds, local, density):
    payloads = [client(seed, local) for seed in seeds]
    mean, union, after = reference(payloads, density)
    got = l0_mean(payloads)
    torch.testing.assert_close(got.tensors["w"].flatten(), torch.tensor(mean), atol=1e-6, rtol=1e-6)
    assert got.masks["w"].flatten().tolist() == union
    expanded = expand_masks(payloads, got, density)
    assert expanded.masks["w"].flatten().tolist() == after
    assert torch.equal(expanded.tensors["w"], torch.where(expanded.masks["w"], got.tensors["w"], 0))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=5, unique=True), st.floats(0, 1))
def test_expansion_only_removes_and_hits_the_count_exactly(seeds, density):
    payloads = [client(seed) for seed in seeds]
    mean = l0_mean(payloads)
    expanded = expand_masks(payloads, mean, density)
    assert not (expanded.masks["w"] & ~mean.masks["w"]).any()
    assert int(expanded.masks["w"].sum()) == min(keep_count(48, density), int(mean.masks["w"].sum()))


def test_the_order_of_arrival_does_not_change_a_single_bit():
    payloads = [client(seed) for seed in range(5)]
    first = expand_masks(payloads, l0_mean(payloads), 0.4)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        again = [payloads[i] for i in order]
        assert expand_masks(again, l0_mean(again), 0.4).digest() == first.digest()


def test_equal_masks_make_it_a_plain_mean_that_expansion_leaves_alone():
    mask = client(1).masks["w"]
    payloads = [Payload.pruned({"w": torch.randn(6, 8, generator=generator(s, "x"))}, {"w": mask}) for s in range(4)]
    mean = l0_mean(payloads)
    plain = torch.stack([p.tensors["w"] for p in payloads]).mean(0)
    torch.testing.assert_close(mean.tensors["w"], plain)
    assert torch.equal(mean.masks["w"], mask)
    expanded = expand_masks(payloads, mean, 0.5)
    assert expanded.digest() == mean.digest()


def test_nothing_comes_back_where_all_pruned_more_than_was_asked():
    one = client(3, density=0.25)
    assert torch.equal(expand_masks([one], l0_mean([one]), 0.5).masks["w"], one.masks["w"])


def test_what_nobody_pruned_goes_only_when_it_must():
    masks = [torch.tensor([True, True, True, False]), torch.tensor([True, True, False, True])]
    payloads = [Payload.pruned({"w": torch.tensor([1.0, 2.0, 30.0, 40.0])}, {"w": mask}) for mask in masks]
    mean = l0_mean(payloads)
    assert expand_masks(payloads, mean, 0.75).masks["w"].tolist() == [True, True, False, True]
    assert expand_masks(payloads, mean, 0.5).masks["w"].tolist() == [True, True, False, False]
    assert expand_masks(payloads, mean, 0.25).masks["w"].tolist() == [False, True, False, False]


def test_a_matrix_counts_only_those_who_pruned_it():
    a, b = client(1), client(2)
    other = Payload({"v": torch.ones(3)})
    with_sampling = expand_masks([a, b, other], l0_mean([a, b, other]), 0.5)
    without = expand_masks([a, b], l0_mean([a, b]), 0.5)
    assert torch.equal(with_sampling.tensors["w"], without.tensors["w"])
    assert torch.equal(with_sampling.masks["w"], without.masks["w"])
    assert with_sampling.tensors["v"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_stay_and_the_mean_is_rounded_once(dtype):
    payloads = [client(seed, dtype=dtype) for seed in range(3)]
    exact = [Payload({"w": p.tensors["w"].double()}, p.masks) for p in payloads]
    got, expected = l0_mean(payloads), l0_mean(exact)
    assert got.tensors["w"].dtype == dtype
    assert torch.equal(got.tensors["w"], expected.tensors["w"].to(dtype))


def test_a_pattern_survives_expansion():
    draw = generator(5, "pattern")
    payloads = []
    for _ in range(3):
        scores = torch.rand(6, 2, 4, generator=draw)
        mask = (scores.argsort(dim=2).argsort(dim=2) >= 2).view(6, 8)
        payloads.append(Payload.pruned({"w": torch.randn(6, 8, generator=draw)}, {"w": mask}))
    mean = l0_mean(payloads)
    expanded = expand_masks(payloads, mean, 0.5, n_of_m=(2, 4))
    assert (expanded.masks["w"].view(6, 2, 4).sum(2) == 2).all()
    counts = sum((~p.masks["w"]).int() for p in payloads).view(-1, 4)
    for group, (kept, count, size) in enumerate(
        zip(expanded.masks["w"].view(-1, 4), counts, mean.tensors["w"].abs().view(-1, 4), strict=True)
    ):
        order = sorted(range(4), key=lambda i: (-int(count[i]), float(size[i]), i))
        assert [i for i in range(4) if not kept[i]] == sorted(order[:2]), group


def test_a_mean_of_something_else_is_refused():
    a, b = client(1), client(2)
    with pytest.raises(ValueError, match="is not the l0 mean"):
        expand_masks([a, b], l0_mean([a]), 0.5)
    with pytest.raises(ValueError, match="0 payloads"):
        l0_mean([])
