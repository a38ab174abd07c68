"""Secure sums: the sum of integers is exact, one addend is uniform, and shares below the threshold tell nothing."""

import itertools
import random
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.secure_sums import (
    PRIME,
    add_masks,
    at_zero,
    derived_key,
    polynomial,
    recovered,
    shares,
)


def masked(words, me, own_keys, pair_keys, members):
    """One member's upload: its words, its own mask, and a mask for each pair that it is in."""
    upload = words.copy()
    pairs = {pair_keys[frozenset((me, peer))]: me > peer for peer in members if peer != me}
    add_masks(upload, {own_keys[me]: False, **pairs})
    return upload


def keys(seed, names):
    return {name: random.Random(f"{seed} {sorted(name) if isinstance(name, frozenset) else name}").randbytes(32)
            for name in names}  # fmt: skip


# --- the sum ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), min_size=3, max_size=6),
    lost=st.sets(st.integers(0, 5), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_the_sum_of_whoever_is_left_is_exact_once_their_masks_are_removed(values, lost, seed):
    members = list(range(len(values)))
    survivors = [member for member in members if member not in lost]
    pairs = [frozenset(pair) for pair in itertools.combinations(members, 2)]
    own_keys, pair_keys = keys(seed, members), keys(seed + 1, pairs)
    words = {k: np.array(values[k], dtype=np.int64).view(np.uint64) for k in members}
    total = np.zeros(3, dtype=np.uint64)
    for member in survivors:
        total += masked(words[member], member, own_keys, pair_keys, members)
    for member in survivors:
        gone = set(members) - set(survivors)
        pairs_left = {pair_keys[frozenset((member, other))]: member < other for other in gone}
        add_masks(total, {own_keys[member]: True, **pairs_left})
    expected = [sum(values[member][i] for member in survivors) % 2**64 for i in range(3)]
    assert total.tolist() == expected


def test_a_mask_is_the_key_stream_of_aes_in_counter_mode_over_every_chunk():
    words = np.zeros(100_003, dtype=np.uint64)
    add_masks(words, {bytes(range(32)): False})
    stream = Cipher(algorithms.AES(bytes(range(32))), modes.CTR(bytes(16))).encryptor().update(bytes(words.nbytes))
    assert words.tobytes() == stream
    add_masks(words, {bytes(range(32)): True})
    assert not words.any()


def test_one_upload_alone_is_uniform():
    """Chi-square over each of the eight bytes of 2^17 words that are all the same number."""
    members = [0, 1, 2]
    pairs = [frozenset(pair) for pair in itertools.combinations(members, 2)]
    upload = masked(np.full(2**17, 12345, dtype=np.uint64), 1, keys(7, members), keys(8, pairs), members)
    for place in upload.view(np.uint8).reshape(-1, 8).T:
        counts = np.bincount(place, minlength=256)
        statistic = float(((counts - 512.0) ** 2 / 512.0).sum())
        assert 255 - 6 * 22.6 < statistic < 255 + 6 * 22.6  # mean and standard deviation of 255 degrees of freedom


def test_a_key_is_that_of_hkdf_and_each_purpose_has_its_own():
    """The first block of HKDF-SHA256, by RFC 5869, from its definition with HMAC."""
    import hashlib
    import hmac

    secret = bytes(range(32))
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    assert derived_key(secret, "mask") == hmac.new(extracted, b"mask\x01", hashlib.sha256).digest()
    assert derived_key(secret, "mask") != derived_key(secret, "share")


# --- shares -----------------------------------------------------------------------------------------------------------


def test_shares_are_those_of_the_published_example():
    """1234 = 1494 at 1, ..., with 166 and 94 mod 1613: the example of Wikipedia's article on Shamir's scheme."""
    points = {x: polynomial([1234, 166, 94], x, 1613) for x in range(1, 7)}
    assert points == {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
    for chosen in itertools.combinations(points, 3):
        assert at_zero({x: points[x] for x in chosen}, 1613) == 1234


def test_a_secret_comes_back_as_an_independent_computation_over_the_rationals_says():
    draw = random.Random(1)
    coefficients = [draw.randrange(10**6) for _ in range(4)]
    points = {x: sum(c * x**i for i, c in enumerate(coefficients)) for x in (3, 5, 8, 13)}
    rational = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            term *= Fraction(other, other - x) if other != x else 1
        rational += term
    assert rational == coefficients[0] == at_zero(points)


def test_the_field_is_a_prime_above_every_secret():
    assert PRIME > 2**256 - 1
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29))


@settings(max_examples=30, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), num=st.integers(3, 9), data=st.data())
def test_any_members_up_to_the_threshold_recover_a_secret_and_fewer_get_another(secret, num, data):
    threshold = data.draw(st.integers(2, num))
    members = data.draw(st.lists(st.integers(0, 1000), min_size=num, max_size=num, unique=True))
    share_of = shares(secret, threshold, members)
    chosen = data.draw(st.permutations(members))
    assert recovered({member: share_of[member] for member in chosen[:threshold]}) == secret
    try:
        found = recovered({member: share_of[member] for member in chosen[: threshold - 1]})
    except ValueError:
        return
    assert found != secret


def test_shares_below_the_threshold_fit_every_secret():
    """For two shares of three and any other secret there is a polynomial: the shares tell nothing."""
    share_of = shares(bytes(32), 3, [0, 1, 2])
    points = {member + 1: int.from_bytes(share_of[member]) for member in (0, 1)}
    for other in (1, 2**255, 2**256 - 1):
        third = points | {0: other}
        y = at_zero({x - 3: value for x, value in third.items()})  # the value at 3 of the one through all of them
        assert at_zero({**points, 3: y}) == other
