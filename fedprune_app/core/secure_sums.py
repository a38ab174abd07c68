"""A secure sum is one of integers that nobody sees alone: each addend is masked, and the masks go in the sum.

All is exact in the integers mod 2^64, so a sum of int64 that does not overflow comes out bit for bit, and no range has
to be chosen. Two addends share a mask, which one adds and the other subtracts. A second mask of each addend, its own,
is taken off the sum. The seeds of both are shared as Shamir's, so that a threshold of members recovers those of a
member that is gone. Nothing here is a primitive of our own: masks are AES-256 in counter mode (NIST SP 800-38A) under
keys by HKDF-SHA256 (RFC 5869).

Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", 2017; Shamir, "How to
Share a Secret", 1979.
"""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Words = np.ndarray[Any, np.dtype[np.uint64]]
PRIME = 2**256 + 297  # the smallest above all secrets of 32 bytes
SECRET_BYTES, SHARE_BYTES = 32, 33
_CHUNK = 1 << 15  # words at a time, so that they stay in a core's cache
_ZEROS = bytes(8 * _CHUNK)


def derived_key(secret: bytes, purpose: str) -> bytes:
    """Return the key of 32 bytes that HKDF-SHA256 makes of a secret, for one purpose alone."""
    return HKDF(hashes.SHA256(), length=32, salt=None, info=purpose.encode()).derive(secret)


def add_masks(words: Words, subtracts: Mapping[bytes, bool]) -> None:
    """Add the key stream of each key to words (n,), in place, or subtract it where the key's value is True.

    A key is for one mask: two addends under the same stream give their difference away.
    """
    stream = np.empty(_CHUNK, dtype="<u8")
    masks = [
        (Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor(), np.subtract if subtract else np.add)
        for key, subtract in subtracts.items()
    ]
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        mask = stream[: len(part)]
        for cipher, change in masks:
            cipher.update_into(memoryview(_ZEROS)[: mask.nbytes], mask.data.cast("B"))
            change(part, mask, out=part)


def shares(secret: bytes, threshold: int, members: Iterable[int]) -> dict[int, bytes]:
    """Return a share of 33 bytes of a secret of 32 for each member, a number from 0 on.

    Any ``threshold`` of the shares give the secret back, and fewer tell nothing of it.
    """
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {member: polynomial(coefficients, member + 1).to_bytes(SHARE_BYTES) for member in members}


def recovered(share_of: Mapping[int, bytes]) -> bytes:
    """Return the secret of which these are shares, by member, as many as the threshold asks for.

    With too few or wrong shares the result is another secret, or ``ValueError``.
    """
    secret = at_zero({member + 1: int.from_bytes(share) for member, share in share_of.items()})
    if secret >> 8 * SECRET_BYTES:
        raise ValueError("shares do not fit together")
    return secret.to_bytes(SECRET_BYTES)


def polynomial(coefficients: Sequence[int], x: int, prime: int = PRIME) -> int:
    """Return ``Σ_i c_i x^i`` mod ``prime``."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % prime
    return value


def at_zero(points: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the value at 0 of the polynomial through points (x to y), by Lagrange's formula mod ``prime``."""
    total = 0
    for x, y in points.items():
        others = points.keys() - {x}
        total += y * math.prod(others) * pow(math.prod(other - x for other in others), -1, prime)
    return total % prime
