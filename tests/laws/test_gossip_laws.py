"""Laws of the gossip average and of the accumulator below it, against slow references written out below."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core import aggregate
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.masks import full_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator, numpy_generator
from fedprune_app.core.topology import neighbours
from tests.examples import examples
from tests.laws.test_aggregate_laws import mean_of

SHAPES = {"w": (6, 5), "b": (4,), "s": ()}


def random_payload(seed: int, density: float = 0.5) -> Payload:
    """All tensors masked, as Dis-PFL sends them."""
    rng = generator(seed, "payload")
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
    return Payload.pruned(tensors, {name: torch.rand(s, generator=rng) < density for name, s in SHAPES.items()})


def mix_of(payloads):
    """As the relaying server and the clients of decentralised systems average: one update after the other."""
    mean = MaskedMean(len(payloads))
    for payload in payloads:
        mean.add(payload)
    return mean.mixed()


def reference_mix(payloads):
    """Coordinate by coordinate, in exact fractions."""
    mixed = {}
    for name, shape in SHAPES.items():
        mixed[name] = torch.zeros(shape, dtype=torch.float64)
        for index in itertools.product(*map(range, shape)):
            held = [Fraction(float(p.tensors[name][index])) for p in payloads if bool(p.masks[name][index])]
            mixed[name][index] = float(sum(held) / len(held)) if held else 0.0
    return mixed


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_the_gossip_average_is_the_formula(seeds):
    payloads = [random_payload(seed) for seed in seeds]
    mixed = mix_of(payloads)
    assert list(mixed) == list(SHAPES)
    for name, expected in reference_mix(payloads).items():
        assert mixed[name].dtype == torch.float32
        torch.testing.assert_close(mixed[name].double(), expected, atol=1e-11, rtol=1e-7)


def test_the_order_of_the_neighbours_does_not_change_a_single_bit():
    payloads = [random_payload(seed) for seed in range(6)]
    first = mix_of(payloads)
    for order in itertools.islice(itertools.permutations(payloads), 0, 720, 37):
        assert all(torch.equal(first[name], tensor) for name, tensor in mix_of(order).items())


def test_a_coordinate_that_nobody_holds_is_zero_whatever_was_sent_there():
    nobody = {"w": torch.tensor([True, False])}
    payloads = [Payload({"w": torch.tensor([value, 9.0])}, nobody) for value in (1.0, 3.0)]
    assert mix_of(payloads)["w"].tolist() == [2.0, 0.0]


def test_a_held_zero_counts_and_a_coordinate_of_one_holder_is_its_own():
    tensors = [{"w": torch.tensor(values)} for values in ([0.0, 0.0], [4.0, 8.0])]
    masks = [{"w": torch.tensor(kept)} for kept in ([True, False], [True, True])]
    assert mix_of(list(map(Payload, tensors, masks)))["w"].tolist() == [2.0, 8.0]


def test_mixing_alone_is_ones_own_model():
    payload = random_payload(3)
    for name, tensor in mix_of([payload]).items():
        assert (tensor - payload.tensors[name]).abs().max() <= 2.0**-40


def test_with_full_masks_and_all_others_as_neighbours_everybody_gets_the_plain_average():
    clients = [4, 0, 7, 2]
    models = {client: random_payload(client, density=1.1) for client in clients}
    received = neighbours("full", clients, clients, 1, numpy_generator(0, "topology"))
    mixes = [mix_of([models[k], *(models[j] for j in received[k])]) for k in clients]
    for name in SHAPES:
        assert all(torch.equal(mix[name], mixes[0][name]) for mix in mixes)
        torch.testing.assert_close(mixes[0][name], torch.stack([m.tensors[name] for m in models.values()]).mean(0))


def test_a_tensor_without_mask_counts_everywhere():
    payloads = [Payload({"w": torch.tensor([1.0, 2.0])}), Payload({"w": torch.zeros(2)}, full_masks({"w": (2,)}))]
    assert mix_of(payloads)["w"].tolist() == [0.5, 1.0]


def test_held_marks_what_at_least_one_addend_kept():
    accumulator = MaskedMean(max_addends=3)
    assert accumulator.held() == {}
    for kept in ([True, False, False], [True, True, False]):
        accumulator.add(Payload({"w": torch.zeros(3), "b": torch.zeros(2, 2)}, {"w": torch.tensor(kept)}))
    held = accumulator.held()
    assert held["w"].tolist() == [True, True, False]
    assert torch.equal(held["b"], full_masks({"b": (2, 2)})["b"])
    held["b"].zero_()
    held["w"].zero_()
    assert accumulator.held()["w"].tolist() == [True, True, False]  # a copy, free to be changed


def test_held_is_the_union_of_the_masks():
    payloads = [random_payload(seed, density=0.2) for seed in range(4)]
    accumulator = MaskedMean(max_addends=4)
    for payload in payloads:
        accumulator.add(payload)
    for name, held in accumulator.held().items():
        assert torch.equal(held, torch.stack([p.masks[name] for p in payloads]).any(0))


def reference_sums(payloads, weights, name):
    """The accumulator's integers, in one piece: each addend rounded to the grid, then masked and added."""
    scale = 2.0**40 / max(weights)
    total = count = 0
    for payload, weight in zip(payloads, weights, strict=True):
        mask = payload.masks.get(name, torch.tensor(True)).to(torch.int64)
        total = total + (payload.tensors[name].double() * (weight * scale)).round().to(torch.int64) * mask
        count = count + weight * mask
    return total, count


LARGE = 3000.0  # more than a float64 sum of multiples of 2^-40 can hold


@pytest.mark.parametrize("largest", [1e-9, 1.0, 600.0, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adding_payloads_together_changes_no_bit(monkeypatch, dtype, largest):
    monkeypatch.setattr(aggregate, "_BLOCK", 7)
    rng = generator(0, "together")
    payloads = []
    for i in range(5):
        tensors = {name: largest * (2 * torch.rand(shape, generator=rng) - 1) for name, shape in SHAPES.items()}
        masks = {
            name: torch.rand(shape, generator=rng) < 0.4 for name, shape in SHAPES.items() if i != 2 or name == "w"
        }
        chosen = [name for name in SHAPES if i < 3 or name != "b"]  # not everybody sends all
        payloads.append(Payload({n: tensors[n].to(dtype) for n in chosen}, {n: masks[n] for n in chosen if n in masks}))
    together = MaskedMean(len(payloads))
    together.add_all(payloads[:3])
    together.add_all([])
    together.add_all(payloads[3:])
    one_by_one, expected = MaskedMean(len(payloads)), mix_of(payloads)
    for payload in payloads:
        one_by_one.add(payload)
    for name, tensor in together.mixed().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name])
        assert torch.equal(together.held()[name], one_by_one.held()[name])


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_of_payloads_added_together_one_that_is_bad_keeps_all_out(bad):
    good, refused = (Payload({"w": torch.tensor([1.0, value])}) for value in (2.0, bad))
    mean = MaskedMean(3)
    with pytest.raises(ValueError, match="tensor 'w' has magnitude"):
        mean.add_all([good, refused])
    with pytest.raises(ValueError, match=r"tensor 'w' has shape \(3,\), allowed: \(2,\)"):
        mean.add_all([good, Payload({"w": torch.ones(3)})])
    assert mean.num_added == 0
    assert mean.held() == {}
    assert mean.check(good) == 2.0
    with pytest.raises(ValueError, match="more than 3 payloads added"):
        mean.add_all([good] * 4)
    mean.add_all([good] * 3)
    assert mean.mixed()["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dense_at", [None, 0, 2])
def test_working_in_blocks_changes_no_bit(monkeypatch, dense_at):
    monkeypatch.setattr(aggregate, "_BLOCK", 7)  # 60 = 8 blocks and a rest
    rng, weights = generator(0, "blocks"), [3, 1, 2]  # thirds: every addend is rounded
    payloads = []
    for i in range(3):
        tensors, mask = {"w": torch.randn(3, 5, 4, generator=rng)}, torch.rand(3, 5, 4, generator=rng) < 0.4
        payloads.append(Payload(tensors, {} if i == dense_at else {"w": mask}))
    fallback = {"w": torch.randn(3, 5, 4, generator=rng, dtype=torch.float64)}  # shows the last bit of the grid
    total, count = reference_sums(payloads, weights, "w")
    expected = torch.where(count > 0, total.double() / count.clamp(min=1) * (3 / 2**40), fallback["w"])
    assert torch.equal(mean_of(payloads, fallback, weights)["w"], expected)


def test_the_memory_layout_of_a_tensor_does_not_matter(monkeypatch):
    monkeypatch.setattr(aggregate, "_BLOCK", 7)
    rng = generator(0, "layout")
    tensor, fallback = torch.randn(2, 3, 4, 4, generator=rng), torch.randn(2, 3, 4, 4, generator=rng)
    mask = torch.rand(2, 3, 4, 4, generator=rng) < 0.5
    turned = [x.contiguous(memory_format=torch.channels_last) for x in (tensor, mask, fallback)]
    plain = mean_of([Payload({"w": tensor}, {"w": mask})] * 2, {"w": fallback})["w"]
    assert torch.equal(mean_of([Payload({"w": turned[0]}, {"w": turned[1]})] * 2, {"w": turned[2]})["w"], plain)


@pytest.mark.parametrize("value", [-1e30, float("-inf")])
def test_a_large_negative_value_is_refused_as_a_large_one_is(value):
    with pytest.raises(ValueError, match="tensor 'w' has magnitude"):
        MaskedMean(max_addends=1).add(Payload({"w": torch.tensor([0.0, value])}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_what_is_added_is_not_changed_whatever_its_type(dtype):
    tensors = {"w": torch.tensor([1, -2, 3, 5], dtype=dtype), "none": torch.zeros(0, 3, dtype=dtype)}
    masks = {"w": torch.tensor([True, True, False, False]), "none": torch.zeros(0, 3, dtype=torch.bool)}
    payload = Payload(tensors, masks)
    before = payload.digest()
    mixed = mix_of([payload, payload])
    assert payload.digest() == before
    assert mixed["w"].tolist() == [1, -2, 0, 0]
    assert mixed["w"].dtype == dtype


def test_weights_too_large_for_32_bits_are_counted():
    heavy = 2**31
    accumulator = MaskedMean(max_addends=2, max_weight=heavy)
    for value in (1.0, 3.0):
        accumulator.add(Payload({"w": torch.tensor([value])}, full_masks({"w": (1,)})), weight=heavy)
    assert accumulator.mean({"w": torch.zeros(1)})["w"].item() == 2.0


def test_a_tensor_of_another_shape_is_refused_and_changes_nothing():
    accumulator = MaskedMean(max_addends=2)
    accumulator.add(Payload({"a": torch.ones(1), "b": torch.ones(2, 3)}))
    with pytest.raises(ValueError, match=r"tensor 'b' has shape \(3, 2\), allowed: \(2, 3\)"):
        accumulator.add(Payload({"a": torch.ones(1), "b": torch.ones(3, 2)}))
    assert accumulator.num_added == 1
    assert accumulator.mean({"a": torch.zeros(1)})["a"].item() == 1.0
