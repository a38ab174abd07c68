"""The noise has the distributions that the ledger counts on, and its released sums tell no more than exact ones would.

Keys are fixed, so that no test fails by chance.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from fedprune_app.privacy import noise
from fedprune_app.privacy.noise import KeyedNoise, _DeviceKeyStream, noise_source, noised, noisy_count
from tests.examples import in_test

KEYS = [bytes(32), b"\x5a" * 32, bytes(range(32))]
SIZE = 200_003  # more than one chunk, and odd


@pytest.mark.parametrize("key", KEYS)
def test_gaussian_draws_are_standard_normal_by_their_moments_and_by_kolmogorov_and_smirnov(key):
    draws = KeyedNoise(key).gaussian(SIZE)
    assert (draws.dtype, draws.shape) == (torch.float64, (SIZE,))
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert float(draws.pow(power).mean()) == pytest.approx(moment, abs=4 * math.sqrt(variance / SIZE))
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-3
    tail = draws[draws.abs() > 3].abs()
    expected = 2 * stats.norm.sf(3)
    assert len(tail) / SIZE == pytest.approx(expected, abs=4 * math.sqrt(expected / SIZE))
    assert stats.kstest(tail.numpy(), lambda x: 1 - stats.norm.sf(x) / stats.norm.sf(3)).pvalue > 1e-3


@pytest.mark.parametrize("key", KEYS)
def test_gaussian_draws_are_independent_of_one_another(key):
    draws = KeyedNoise(key).gaussian(SIZE)
    half = (SIZE + 1) // 2  # both numbers of a pair are so far apart
    for lag in (1, 2, half):
        one, other = draws[:-lag], draws[lag:]
        for values in ((one, other), (one.square(), other.square())):
            assert abs(float(torch.corrcoef(torch.stack(values))[0, 1])) < 4 / math.sqrt(len(one))


def test_gaussian_draws_have_more_digits_than_float32():
    draws = KeyedNoise(KEYS[1]).gaussian(1000)
    assert int((draws.float().double() == draws).sum()) == 0
    assert len(draws.unique()) == 1000


@pytest.mark.parametrize("key", KEYS)
def test_uniform_draws_are_below_one_and_uniform(key):
    draws = KeyedNoise(key).uniform(SIZE)
    assert draws.dtype == torch.float64
    assert 0 <= float(draws.min()) <= float(draws.max()) < 1
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(draws * 2**53, (draws * 2**53).round())
    assert 0.45 < float((draws * 2**53 % 2).mean()) < 0.55  # down to the last of 53 bits


@pytest.mark.parametrize("key", in_test(KEYS, *KEYS[:2]))
def test_laplace_noise_has_its_scale(key):
    source = KeyedNoise(key)
    draws = torch.tensor([source.laplace(2.5) for _ in range(5_000)], dtype=torch.float64)
    assert stats.kstest(draws.numpy(), "laplace", args=(0, 2.5)).pvalue > 1e-3


@pytest.mark.parametrize("variance", [1.0, 2.0**0.5, 77.7])
def test_discrete_draws_have_the_probabilities_of_the_discrete_gaussian(variance):
    draws = KeyedNoise(KEYS[2]).discrete_gaussian(SIZE, variance)
    assert (draws.dtype, draws.shape) == (torch.int64, (SIZE,))
    ends = math.ceil(12 * math.sqrt(variance))
    values = torch.arange(-ends, ends + 1).double()
    weights = (values.square() / (-2 * variance)).exp()
    expected = SIZE * weights / weights.sum()
    found = torch.bincount(draws + ends, minlength=2 * ends + 1).double()
    frequent = expected > 10
    pairs = [torch.cat([each[frequent], each[~frequent].sum()[None]]).numpy() for each in (found, expected)]
    assert stats.chisquare(*pairs).pvalue > 1e-3


@pytest.mark.parametrize("variance", [3.0 * 4.0**33, 4.0**56])
def test_discrete_draws_of_a_large_variance_are_normal_and_even_or_odd_alike(variance):
    draws = KeyedNoise(KEYS[1]).discrete_gaussian(SIZE, variance)
    assert stats.kstest((draws.double() / math.sqrt(variance)).numpy(), "norm").pvalue > 1e-3
    tail = (draws.double() / math.sqrt(variance)).abs()
    assert int((tail > 3).sum()) / SIZE == pytest.approx(2 * stats.norm.sf(3), abs=4 * math.sqrt(0.0027 / SIZE))
    for bit in (0, 1, 20):
        assert float((draws >> bit & 1).double().mean()) == pytest.approx(0.5, abs=2 / math.sqrt(SIZE))


def test_draws_that_float64_cannot_decide_are_decided_exactly(monkeypatch):
    """With the same draws as where it decides nearly all of them."""
    expected = KeyedNoise(KEYS[0]).discrete_gaussian(2000, 1e20)
    monkeypatch.setattr(noise, "_DOUBT", 0.4)
    assert torch.equal(KeyedNoise(KEYS[0]).discrete_gaussian(2000, 1e20), expected)


def test_a_uniform_number_is_compared_to_as_many_bits_as_it_takes():
    """The limit is exp(-1/2) / 1.25, and the words after its first 53 bits are those of the limit, or next to them."""
    with localcontext(prec=200):
        limit = Decimal("-0.5").exp() / Decimal("1.25")
        first, words = int(limit * 2**53), [int(limit * 2 ** (53 + 64 * n)) % 2**64 for n in (1, 2, 3)]

    def is_below(*following):
        stream = SimpleNamespace(words=lambda count: next(drawn))
        drawn = iter(following)
        return noise._is_below(first, -7, 49.0, 1.25, stream)

    assert is_below(words[0] - 1)
    assert not is_below(words[0] + 1)
    assert is_below(*words[:2], words[2] - 1)
    assert not is_below(*words[:2], words[2] + 1)
    assert noise._is_below(first - 1, -7, 49.0, 1.25, None)
    assert not noise._is_below(first + 1, -7, 49.0, 1.25, None)


def test_discrete_draws_are_those_of_opendp():
    """Two samples of one distribution."""
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    scale = 3.7
    space = dp.vector_domain(dp.atom_domain(T=int), size=20_000), dp.l2_distance(T=float)
    theirs = dp.m.make_gaussian(*space, scale=scale)([0] * 20_000)
    ours = KeyedNoise(KEYS[0]).discrete_gaussian(20_000, scale**2).tolist()
    counts = [[sample.count(value) for value in range(-8, 9)] for sample in (ours, theirs)]
    assert stats.chi2_contingency(counts).pvalue > 1e-4


def test_the_same_key_gives_the_same_draws_and_each_draw_is_another():
    one, same, other = KeyedNoise(KEYS[0]), KeyedNoise(KEYS[0]), KeyedNoise(KEYS[1])
    first, second = one.gaussian(1000), one.gaussian(1000)
    assert torch.equal(first, same.gaussian(1000))
    for different in (second, other.gaussian(1000)):
        assert abs(float(torch.corrcoef(torch.stack([first, different]))[0, 1])) < 4 / math.sqrt(1000)
    assert torch.equal(KeyedNoise(KEYS[0]).discrete_gaussian(9, 5.0), KeyedNoise(KEYS[0]).discrete_gaussian(9, 5.0))
    for kind in ("uniform", "gaussian"):  # a longer draw begins otherwise or alike, but no draw is cut short
        assert [len(getattr(one, kind)(size)) for size in (0, 1, 2, 7)] == [0, 1, 2, 7]


def test_a_device_makes_the_stream_of_the_cipher_itself(monkeypatch):
    expected = KeyedNoise(KEYS[2]).gaussian(SIZE)
    device = torch.device("cpu")
    monkeypatch.setattr(KeyedNoise, "_stream", lambda noise: _DeviceKeyStream(noise._key, 1, device))
    monkeypatch.setattr(_DeviceKeyStream, "chunks", 2)  # so that there are calls for more than one chunk, and for less
    assert torch.equal(KeyedNoise(KEYS[2]).gaussian(SIZE), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_draws_on_a_gpu_are_those_of_the_cpu():
    for size in (1, 7, SIZE, 20_000_000):
        found, expected = (KeyedNoise(KEYS[2]).gaussian(size, device) for device in ("cuda", "cpu"))
        torch.testing.assert_close(found.cpu(), expected, atol=1e-12, rtol=1e-12)


def test_a_noised_count_is_a_whole_number_with_the_noise_that_was_asked_for_and_no_bias():
    source = KeyedNoise(KEYS[2])
    counts = torch.tensor([noisy_count(7, 4.0, source) for _ in range(5_000)])
    assert counts.dtype == torch.int64
    assert int(counts.min()) < 0  # clamping would favour models that get few right
    assert float(counts.double().mean()) == pytest.approx(7, abs=4 * 4 * math.sqrt(2 / 5_000))
    assert float((counts - 7).abs().double().mean()) == pytest.approx(4, rel=4 / math.sqrt(5_000))


def test_noise_repeats_for_the_same_start_and_never_for_another():
    start = {"w": torch.arange(4.0), "b": torch.zeros(2)}

    def draw(inputs=start, settings="s", role="train", partition=1, round=2, seed=3, secure=False):
        return noise_source(secure, seed, role, partition, round, inputs, settings).gaussian(8).tolist()

    same = draw()
    assert same == draw() == draw(inputs=dict(reversed(start.items())))
    nudged = {**start, "w": torch.nextafter(start["w"], torch.ones(4))}
    others = [draw(inputs=nudged), draw(settings="t"), draw(role="fine-tune"), draw(partition=2), draw(round=3)]
    others += [draw(seed=4), draw(secure=True), draw(secure=True)]
    assert len({tuple(values) for values in [same, *others]}) == len(others) + 1


# --- released sums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1.0, 14.0, 0.3, 1e-8, 1e9])
def test_a_noised_sum_lies_on_a_grid_that_the_noise_alone_decides(std):
    """Also near 0, where float32 has room for more digits than the noise has."""
    draws = torch.tensor([0.7, -1.2, 1e-9, 3.0], dtype=torch.float64)
    grids = []
    for total in (0.0, 0.123 * std, -1e5 * std):
        found = noised(torch.full((4,), total), draws.clone(), std)
        cancelled = noised(torch.full((4,), total), draws.clone().fill_(-float(torch.tensor(total)) / std), std)
        assert not bool(cancelled.any())
        exact = total + std * draws
        fine = max(2.0**-20 * std, 2e-7 * abs(total))  # the totals are float32
        torch.testing.assert_close(found, exact, rtol=0, atol=fine)
        grids.append(found / 2.0 ** (math.floor(math.log2(std)) - 20))
    assert all(torch.equal(values, values.round()) for values in grids)


def test_without_noise_a_sum_is_what_it_was():
    total = torch.tensor([1e-30, 0.1, 3e7])
    assert torch.equal(noised(total, torch.randn(3, dtype=torch.float64), 0.0).float(), total)
