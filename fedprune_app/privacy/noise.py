"""Randomness for privacy: a stream cipher, with a key from the operating system or from the run's seed.

A seeded run only simulates the mechanism: whoever knows the seed can subtract the noise. A key from the operating
system is known to no one else, and its results are not reproducible. docs/privacy.md explains who decides.

Noise is added in float64 (:func:`noised`), because float32 sums reveal the summands. Noise in float32
is full of gaps, and a result that only one of two sums can reach shows which of them it was (Mironov,
*On Significance of the Least Significant Bits for Differential Privacy*, 2012).
"""

from __future__ import annotations

import hashlib
import math
import os
from decimal import Decimal, localcontext
from functools import cache
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from fedprune_app.core.named import Tensors

_GRID_BITS = 20  # a released sum is a multiple of about 2^-20 of the noise's standard deviation
_CHUNK = 1 << 15  # words of 64 bits processed at a time: they fit into a core's cache
_ZEROS = bytes(8 * _CHUNK)
_DOUBT = 2.0**-38  # more than the relative error of an acceptance probability in float64


class Noise(Protocol):
    """A stream of independent draws, which the caller may overwrite."""

    def uniform(self, size: int) -> Tensor:
        """Draw float64 in [0, 1), with 53 bits."""

    def gaussian(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        """Draw standard normal float64, on this device."""

    def discrete_gaussian(self, size: int, variance: float) -> Tensor:
        """Draw int64 ``x`` with probabilities in proportion to ``exp(-x² / (2 variance))``."""

    def laplace(self, scale: float) -> float:
        """Draw one number from the Laplace distribution of this scale."""

    def seed(self) -> int:
        """Return the seed of a network's own draws, such as dropout; it is the same each time."""


class KeyedNoise(Noise):
    """The key stream of ChaCha20 under a ``key`` of 32 bytes; the same key gives the same draws.

    Each draw has its own nonce, so that no part of the stream is used twice.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._num_draws = 0

    def uniform(self, size: int) -> Tensor:
        draws = torch.empty(size, dtype=torch.float64)
        stream = self._stream()
        for part in torch.split(draws, _CHUNK):
            part.copy_(stream.words(len(part)).bitwise_right_shift_(11)).add_(2.0**52).mul_(2.0**-53)
        return draws

    def gaussian(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        """Draw standard normal float64 by the method of Box and Muller.

        A device gets the key, and computes the same words itself, all at once. Its logarithms and angles may differ
        from a CPU's in the last bit.

        Radius and angle have 64 bits each, small ones with all digits of float64. So neighbouring results are far
        closer together than the steps to which :func:`noised` rounds. A sum of several Gaussians, which hides the gaps
        between single ones (Holohan and Braghin 2021), would add nothing after that rounding. No result is larger than
        9.5; one of 10^20 would be.
        """
        pairs = -(-size // 2)
        draws = torch.empty(2, pairs, dtype=torch.float64, device=device)
        stream = self._stream() if draws.device.type == "cpu" else self._stream(draws.device)
        start = 0
        while start < pairs:
            half = min(_CHUNK // 2, pairs - start)
            count = half * min(stream.chunks, (pairs - start) // half)
            radius, angle = stream.words(2 * count).view(-1, 2, half).double().unbind(1)
            radius.abs_().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()  # of a number in (0, 1]
            angle.mul_(math.pi * 2.0**-63)  # in [-π, π)
            cosines, sines = draws[:, start : start + count].view(2, -1, half)
            torch.cos(angle, out=cosines).mul_(radius)
            torch.sin(angle, out=sines).mul_(radius)
            start += count
        return draws.view(-1)[:size]

    def discrete_gaussian(self, size: int, variance: float) -> Tensor:
        """Draw by rejection; ``variance`` is 1 to 2^112. Every probability is exact, but beyond 26 deviations.

        A candidate is in bucket ``k`` of so many integers with probability ``2^-(k+1)``, and anywhere in it alike. It
        is accepted with probability ``2^k exp(-x² / (2 variance)) / 2.6``, which is below 1. That is a comparison of a
        uniform number with another one. Where float64 cannot decide it, as many digits of both are computed as it
        takes. Canonne, Kamath and Steinke ("The Discrete Gaussian for Differential Privacy", 2020) and Karney (2016)
        draw from the same distribution, one number at a time.
        """
        width = 2 ** (math.frexp(math.sqrt(variance))[1] - 1)  # more than half a deviation, and at most one
        draws, found = torch.empty(size, dtype=torch.int64), 0
        stream, more = self._stream(), self._stream()
        while found < size:
            places, offsets, uniforms = stream.words(_CHUNK // 3 * 3).view(3, -1)
            leading, uniforms = places >> 11 & 2**53 - 1, uniforms >> 11 & 2**53 - 1
            buckets = 53 - leading.double().frexp().exponent.long()
            values = (buckets * width + (offsets & width - 1)) ^ -(places & 1)
            limits = (values.double().square() / (-2 * variance)).exp() * buckets.double().exp2() * (2.0**53 / 2.6)
            is_accepted = (uniforms + 1 <= limits * (1 - _DOUBT)).numpy()  # torch would select with several threads
            for i in np.flatnonzero(~is_accepted & (uniforms < limits * (1 + _DOUBT)).numpy()):
                is_accepted[i] = _is_below(int(uniforms[i]), int(values[i]), variance, 2.6 / 2 ** int(buckets[i]), more)
            accepted = torch.from_numpy(values.numpy()[is_accepted])[: size - found]
            draws[found : found + len(accepted)] = accepted
            found += len(accepted)
        return draws

    def laplace(self, scale: float) -> float:
        """Draw by the inverse of the Laplace distribution function."""
        centred = float(self.uniform(1)) + 2.0**-54 - 0.5  # never -0.5, whose logarithm is infinite
        return -scale * math.copysign(math.log1p(-2 * abs(centred)), centred)

    def seed(self) -> int:
        return abs(int(_KeyStream(self._key, 0).words(1)))  # draws begin with 1

    def _stream(self, device: torch.device | None = None) -> _KeyStream | _DeviceKeyStream:
        self._num_draws += 1
        if device is None:
            return _KeyStream(self._key, self._num_draws)
        return _DeviceKeyStream(self._key, self._num_draws, device)


def _is_below(bits: int, value: int, variance: float, share: float, stream: _KeyStream | _DeviceKeyStream) -> bool:
    """Return whether a uniform number of [0, 1) is below ``exp(-value² / (2 variance)) / share``, without any error.

    Its first 53 bits are ``bits``, and further ones are drawn from the stream as far as they are needed.
    """
    count = 53
    while True:
        with localcontext(prec=count):  # more digits than there are bits
            limit = (Decimal(value) ** 2 / (-2 * Decimal(variance))).exp() / Decimal(share) * 2**count
            doubt = limit * Decimal(10) ** (8 - count)
            if bits + 1 <= limit - doubt:
                return True
            if bits >= limit + doubt:
                return False
        bits, count = bits << 64 | int(stream.words(1)) % 2**64, count + 64


class _KeyStream:
    """Random words of 64 bits from the key stream of one draw, on the CPU."""

    chunks = 1  # chunks computed at a time

    def __init__(self, key: bytes, draw: int) -> None:
        nonce = bytes(8) + draw.to_bytes(8, "little")  # the first half counts the blocks of the stream
        self._cipher = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
        self._words = torch.empty(_CHUNK, dtype=torch.int64)
        self._bytes = self._words.numpy().data.cast("B")

    def words(self, count: int) -> Tensor:
        """Return at most ``_CHUNK`` uniform int64, which the next call overwrites."""
        zeros = memoryview(_ZEROS)[: 8 * count]
        self._cipher.update_into(zeros, self._bytes[: 8 * count])
        return self._words[:count]


class _DeviceKeyStream:
    """The same key stream computed on a device, many blocks at a time."""

    chunks = 512

    def __init__(self, key: bytes, draw: int, device: torch.device) -> None:
        _check_device(device)
        self._start = _start(key, draw, device)
        self._blocks_done = 0

    def words(self, count: int) -> Tensor:
        """Return ``count`` uniform int64. All calls except the last must request whole blocks of 8 words."""
        blocks = -(-count // 8)
        stream = _blocks(self._start, self._blocks_done, blocks)
        self._blocks_done += blocks
        return stream[:count]


@cache
def _check_device(device: torch.device) -> None:
    """Raise ``RuntimeError`` if a device computes another stream: results do not show noise that hides nothing."""
    key = bytes(range(32))
    if not torch.equal(_blocks(_start(key, 1, device), 0, 2).cpu(), _KeyStream(key, 1).words(16)):
        raise RuntimeError(f"ChaCha20 on {device} gives other words than on the CPU, allowed: the same")


def _start(key: bytes, draw: int, device: torch.device) -> Tensor:
    """Return the first state (4, 4, 1) of a key stream. Source, also of the functions below: RFC 8439, section 2.3."""
    content = b"expand 32-byte k" + key + bytes(8) + draw.to_bytes(8, "little")
    return torch.frombuffer(bytearray(content), dtype=torch.int32).view(4, 4, 1).to(device)


def _blocks(state: Tensor, first: int, count: int) -> Tensor:
    """Return the words, int64, of ``count`` blocks of 8 words."""
    start = state.repeat(1, 1, count)
    start[3, 0] = torch.arange(first, first + count, device=start.device)
    a, b, c, d = start.clone()  # the rows of the states, (4, count) each
    for _ in range(10):
        for turn in (1, -1):  # columns, then diagonals
            _quarter_rounds(a, b, c, d)
            b, c, d = b.roll(-turn, 0), c.roll(-2 * turn, 0), d.roll(-3 * turn, 0)
    stream = (torch.stack([a, b, c, d]) + start).view(16, count).T.contiguous()
    return stream.view(torch.int64).view(-1)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    for left, right in ((16, 12), (8, 7)):
        a.add_(b)
        _rotate(d.bitwise_xor_(a), left)
        c.add_(d)
        _rotate(b.bitwise_xor_(c), right)


def _rotate(words: Tensor, bits: int) -> None:
    """Rotate each int32 to the left, in place; its right shift repeats the sign."""
    high = words << bits
    words.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1).bitwise_or_(high)


def noise_source(
    secure: bool, seed: int, role: str, partition: int, round: int, inputs: Tensors, settings: str
) -> Noise:
    """Return the randomness for one release.

    If ``secure``, the key is the operating system's. Otherwise the draws depend on the seed and on all inputs of the
    release except the data: on ``inputs`` (the tensors from which the release starts) and ``settings``. A round
    repeated after resuming then has the same result, to the bit. A round repeated from *another* model has other noise:
    two results with the same noise would reveal their difference.
    """
    if secure:
        return KeyedNoise(os.urandom(32))
    digest = hashlib.sha256(settings.encode())
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    key = hashlib.sha256(f"{seed}/noise of {role} {digest.hexdigest()}/{partition}/{round}".encode())
    return KeyedNoise(key.digest())


def noised(total: Tensor, draws: Tensor, std: float) -> Tensor:
    """Return ``total`` plus ``std`` times the standard normal ``draws``, rounded to a grid that depends on std alone.

    Everything is computed in float64. The result overwrites ``draws`` (float64, of the same shape), and is a whole
    multiple of a power of two between 2^-21 and 2^-20 of ``std``. Later steps, such as rounding it to float32, are
    post-processing.

    Rounding to float32 alone would not be enough. Results near 0 have so fine a spacing in float32 that the gaps of the
    float64 noise are visible there. On the grid each result stands for an interval with more than 2^28 values of the
    noise, for any total. So the probability of a result is that of exact arithmetic up to a factor of 1 ± 2^-27, which
    changes no printed digit of ε. (Beyond 8 standard deviations, which have a probability of 10^-15, the factor may be
    larger.) The rounding of the float64 sum reveals nothing: it acts on the exact sum, independent of its summands.

    >>> noised(torch.tensor([1.0]), torch.tensor([0.1], dtype=torch.float64), std=4.0)
    tensor([1.4000], dtype=torch.float64)
    """
    if std == 0:
        return draws.copy_(total)
    grid = 2.0 ** (math.frexp(std)[1] - 1 - _GRID_BITS)
    return draws.mul_(std / grid).add_(total, alpha=1 / grid).round_().mul_(grid)


def noisy_count(count: float, scale: float, noise: Noise) -> int:
    """Return a count of examples, or a sum of shares of groups, plus Laplace noise, as a whole number.

    The result can be below 0, or above every possible count. Rounding costs no privacy, and hides the low bits of a
    floating-point sum (Mironov 2012).
    """
    return round(count + noise.laplace(scale))
