"""What the library in C computes of masked tensors is, bit by bit, what PyTorch and NumPy compute without it."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core import codec, masked_tensors
from fedprune_app.core.aggregate import L0Mean, MaskedMean
from fedprune_app.core.codec import decode, encode
from fedprune_app.core.payload import Payload
from tests.examples import full

BLOCK = 2048  # coordinates that the library takes at a time
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
sizes = st.sampled_from([1, 7, 64, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
densities = st.sampled_from([0.0, 0.1, 0.5, 0.97, 1.0])
seeds = st.integers(0, 10**6)
compiled = pytest.mark.skipif(not masked_tensors.is_compiled(), reason="needs the library in C")


@contextmanager
def no_library():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_tensors, "is_compiled", lambda: False)
        yield


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def every_way(work):
    """What ``work`` returns with the library, on one thread and on three, and without."""
    with threads(1):
        on_one = work()
    with threads(3):
        on_three = work()
    with no_library():
        return on_one, on_three, work()


def drawn(seed, size, density, dtype=torch.float32, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(size, generator=draw)
    values[torch.rand(size, generator=draw) < 0.2] = 0.25 * scale  # ties
    kept = torch.rand(size, generator=draw) < density
    return Payload.pruned({"w": values.to(dtype), "b": torch.randn(3, generator=draw)}, {"w": kept})


def same(one, *others):
    for other in others:
        assert list(one.tensors) == list(other.tensors)
        assert list(one.masks) == list(other.masks)
        for name, tensor in one.tensors.items():
            assert tensor.dtype == other.tensors[name].dtype
        assert one.digest() == other.digest()


def test_the_library_is_there_where_a_compiler_is():
    has_compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert masked_tensors.is_compiled() or not has_compiler


@compiled
@settings(deadline=None)
@given(
    st.lists(st.tuples(seeds, densities, st.integers(1, 9)), min_size=1, max_size=5),
    sizes,
    st.sampled_from([1.0, 1e-6, 1e4]),  # the largest are beyond what a float64 rounds exactly
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_means_are_equal(clients, size, scale, is_weighted, dtype):
    payloads = [drawn(seed, size, density, dtype, scale) for seed, density, _ in clients]
    if clients[0][0] % 3 == 0:  # one without mask
        payloads[0] = Payload(payloads[0].tensors)
    fallback = dict(drawn(1, size, 1.0, dtype).tensors)

    def work():
        mean = MaskedMean(len(payloads), 9 if is_weighted else 1)
        for payload, (_, _, weight) in zip(payloads, clients, strict=True):
            mean.add(payload, weight if is_weighted else 1)
        return Payload(mean.mean(fallback)), Payload(mean.mixed(), mean.held())

    for results in zip(*every_way(work), strict=True):
        same(*results)


@compiled
@settings(deadline=None)
@given(st.lists(st.tuples(seeds, densities), min_size=1, max_size=5), sizes, st.sampled_from([1.0, 1e3]))
def test_sums_of_all_at_once_are_equal(clients, size, scale):
    payloads = [drawn(seed, size, density, scale=scale) for seed, density in clients]

    def at_once():
        mean = MaskedMean(len(payloads))
        mean.add_all(payloads)
        return Payload(mean.mixed(), mean.held())

    one, *others = every_way(at_once)
    same(one, *others)
    one_by_one = MaskedMean(len(payloads))
    for payload in payloads:
        one_by_one.add(payload)
    same(one, Payload(one_by_one.mixed(), one_by_one.held()))


@compiled
@settings(deadline=None)
@given(
    st.lists(st.tuples(seeds, densities), min_size=1, max_size=6),
    sizes,
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_expanded_masks_are_equal(clients, size, density, dtype):
    payloads = [drawn(seed, size, kept, dtype) for seed, kept in clients]

    def work():
        mean = L0Mean(len(payloads))
        for payload in payloads:
            mean.add(payload)
        return mean.expanded(density), mean.mean()

    for results in zip(*every_way(work), strict=True):
        same(*results)


@compiled
@settings(deadline=None)
@given(seeds, sizes, densities, st.sampled_from(DTYPES))
def test_messages_and_pruned_payloads_are_equal(seed, size, density, dtype):
    def work():
        payload = drawn(seed, size, density, dtype, scale=50.0)
        return payload, decode(encode(payload)), Payload({"bytes": torch.from_numpy(encode(payload)["fp1"])})

    for results in zip(*every_way(work), strict=True):
        same(*results)


def outcome(body):
    try:
        return decode({"fp1": body}).digest()
    except ValueError as error:
        return str(error)


@compiled
def test_damaged_masks_are_refused_or_read_alike():
    message = encode(drawn(0, 300, 0.1))["fp1"]
    outcomes = set()
    for bit in range(8 * len(message)):
        flipped = message.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        there, on_three, without = every_way(lambda body=flipped: outcome(body))
        assert there == on_three == without
        outcomes.add(there)
    for end in range(len(message)):
        there, _, without = every_way(lambda body=message[:end]: outcome(body))
        assert there == without
        outcomes.add(there)
    refusals = [each for each in outcomes if "entropy-coded masks do not use up" in each or "its mask keeps" in each]
    assert len(refusals) > 1


@compiled
@pytest.mark.parametrize(("size", "kept"), [(2, 1), (100_000, 1), (100_000, 99_999), full(2**25 + 1, 1)])
def test_masks_of_the_smallest_and_largest_densities_are_equal(size, kept):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[:kept] = True

    def work():
        body = encode(Payload({"w": mask}, {"w": mask}))
        assert torch.equal(decode(body).masks["w"], mask)
        return Payload({"bytes": torch.from_numpy(body["fp1"])})

    same(*every_way(work))


@compiled
def test_no_coder_that_holds_pythons_lock_codes_a_mask_where_the_library_is(monkeypatch):
    """Threads that encode replies would else wait for each other."""
    monkeypatch.setattr(codec, "constriction", None)
    payload = drawn(0, 1000, 0.1)
    same(payload, decode(encode(payload)))


@compiled
def test_a_mask_of_other_bytes_than_0_and_1_keeps_where_it_is_not_0():
    """A file may hold such a mask; counting with its bytes would read and write beyond the values."""
    kept = torch.tensor([2, 0, 255, 0, 1], dtype=torch.uint8).view(torch.bool)
    payload = Payload({"w": torch.arange(1.0, 6.0)}, {"w": kept})
    assert decode(encode(payload)).tensors["w"].tolist() == [1, 0, 3, 0, 5]
    assert Payload.pruned(payload.tensors, payload.masks).tensors["w"].tolist() == [1, 0, 3, 0, 5]
    mean = MaskedMean(1)
    mean.add(payload)
    assert mean.mixed()["w"].tolist() == [1, 0, 3, 0, 5]


@compiled
def test_tensors_that_are_no_plain_rows_of_memory_are_left_to_torch():
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    kept = values.t() > 0
    same(*every_way(lambda: Payload.pruned({"w": values.t()}, {"w": kept})))
    negative = torch._neg_view(torch.tensor([1.0, 2.0, 3.0]))
    assert masked_tensors.keep(negative, torch.tensor([True, False, True])) is None
    assert masked_tensors.keep(values.t(), kept) is None
    assert masked_tensors.keep(values.t().contiguous(), kept) is None  # the mask's rows are not those of memory


@compiled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_float_of_16_bits_is_summed_as_the_float32_that_it_is(dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[values.isfinite() & (values.abs() <= 2**11)]
    sums = torch.zeros(values.shape, dtype=torch.int64)
    assert masked_tensors.add(sums, sums, [values], [None], scale=2.0**40, weight=1)
    assert sums.equal((values.double() * 2.0**40).round().long())


@compiled
def test_masks_of_booleans_stay_booleans():
    flags, kept = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    one, *others = every_way(lambda: Payload.pruned({"w": flags}, {"w": kept}))
    same(one, *others)
    assert one.tensors["w"].tolist() == [True, False, False]


@compiled
@pytest.mark.parametrize("num_clients", [1, 3, 24, 40])  # few levels are counted by comparing, many by a table
def test_what_nobody_holds_goes_first_and_then_the_least_held(num_clients):
    draw = torch.Generator().manual_seed(num_clients)
    holders = torch.randint(0, num_clients + 1, (3 * BLOCK + 5,), generator=draw, dtype=torch.int32)
    order = torch.randint(-4, 5, holders.shape, generator=draw).float() * 0.5
    ranked = sorted(range(len(holders)), key=lambda i: (int(holders[i]), abs(float(order[i])), i))
    targets = (0, 1, len(holders) // 3, len(holders) // 2, len(holders) - 1, len(holders))
    for target, number in product(targets, (1, 3)):
        with threads(number):
            kept = masked_tensors.most_held(holders, order, target)
        num_gone = max(target, int((holders == 0).sum()))
        assert (~kept).nonzero().squeeze(1).tolist() == sorted(ranked[:num_gone])


@compiled
def test_a_server_takes_all_threads_for_large_tensors_and_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(masked_tensors, "_threads_of_large", 1)
    payloads = [drawn(seed, masked_tensors._LARGE + 7, 0.5) for seed in range(2)]

    def work():
        mean = L0Mean(len(payloads))
        for payload in payloads:
            mean.add(decode(encode(payload)))
        return mean.expanded(0.5)

    with threads(1):
        alone = work()
        masked_tensors.use_threads(5)
        same(alone, work())
