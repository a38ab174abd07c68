"""Every system's final models are those that were recorded: a rebuild that changes one bit fails here."""

from __future__ import annotations

import os

import pytest

from fedprune_app.registry import SYSTEMS
from tests.conformance import recorded
from tests.conformance.conftest import CASE, VARIANTS


def compare(name: str, found: str) -> None:
    """``found`` is what is recorded under this name; ``make record-hashes`` writes it there."""
    if os.environ.get("RECORD_HASHES"):
        recorded.record(name, found)
    known = recorded.hashes()
    if known is None:
        pytest.skip("this machine rounds otherwise than those whose hashes are recorded (see recorded.py)")
    if name not in known:
        pytest.skip(f"{name!r} is newer than what was recorded for this machine's arithmetic")
    assert found == known[name]


@CASE
def test_the_final_models_are_those_recorded(conform, case):
    compare(case, conform(case).sha256)


def test_hashes_are_recorded_of_what_there_is_alone():
    known = recorded.hashes()
    assert known is None or set(known) <= {*SYSTEMS, *VARIANTS}
