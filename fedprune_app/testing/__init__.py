"""Tests of plug-ins: :func:`check_system` shows that a system keeps the laws. The other names are for tests of runs."""

from fedprune_app.testing.laws import BrokenLawError, check_system
from fedprune_app.testing.misbehaving import Failing, Misbehaving, Twice, malformed, patient_clock
from fedprune_app.testing.runs import (
    CLIENTS,
    NEEDED,
    PRIVATE,
    QUICK,
    ROUNDS,
    FinishedRun,
    ObservedRun,
    cut_after,
    lasting,
    misrecorded,
    run_with,
)

__all__ = [
    "CLIENTS",
    "NEEDED",
    "PRIVATE",
    "QUICK",
    "ROUNDS",
    "BrokenLawError",
    "Failing",
    "FinishedRun",
    "Misbehaving",
    "ObservedRun",
    "Twice",
    "check_system",
    "cut_after",
    "lasting",
    "malformed",
    "misrecorded",
    "patient_clock",
    "run_with",
]
