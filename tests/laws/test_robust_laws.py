"""What hostile clients can do to a robust average: nothing beyond the stated bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.payload import Payload
from fedprune_app.core.robust import clipped, move_norm
from tests.examples import examples
from tests.laws.test_aggregate_laws import random_payload

FALLBACK = dict(random_payload(99, density=None).tensors)


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
