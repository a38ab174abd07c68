"""Every system's final models are those that were recorded: a rebuild that changes one bit fails here."""

from __future__ import annotations

import os

import pytest

from fedprune_app.registry import SYSTEMS
from tests.conformance import recorded
from tests.conformance.conftest import PRIVATE, SYSTEM

VARIANTS = {
    "dispfl: clients average, ring, dropped ones train alone": {
        "system": "dispfl",
        "dispfl.gossip": "client",
        "dispfl.topology": "ring",
        "dispfl.dropped": "trains-alone",
        "dispfl.densities": "0.3 0.8",
        "drop-probability": 0.4,
    },
    "dispfl: private": {"system": "dispfl", "dispfl.growth": "random", **PRIVATE},
    "fedavg: trimmed mean, four of the clients": {
        "system": "fedavg",
        "robust": "trimmed-mean",
        "robust-trim": 0.3,
        "fraction-train": 0.8,
    },
    "fedavg: clipped, cropped, weight decay": {
        "system": "fedavg",
        "robust": "clip",
        "robust-norm": 1.0,
        "augmentation": "crop-flip",
        "weight-decay": 1e-3,
        "momentum": 0.9,
        "lr-decay": 0.9,
    },
    "fedp3: attention, local pruning": {"system": "fedp3", "fedp3.aggregation": "attention", "fedp3.local": "uniform"},
    "fedp3: weighted, ordered dropout, random layers": {
        "system": "fedp3",
        "fedp3.aggregation": "weighted-with-head",
        "fedp3.local": "ordered-dropout",
        "fedp3.assignment": "per-round",
        "fedp3.personal-head": True,
    },
    "ditto: private": {"system": "ditto", **PRIVATE},
    "subfedavg: local BatchNorm": {"system": "subfedavg", "model": "cnn-small-bn", "batch-norm": "local"},
    "standalone: private": {"system": "standalone", **PRIVATE},
    "fedspallm: one cut for the model, every second layer": {
        "system": "fedspallm",
        "fedspallm.expansion": "global",
        "fedspallm.ties": "wanda",
        "fedspallm.layer-shares": "0.5 1.0",
        "fedspallm.unsampled": "current",
    },
}
"""Settings that take other paths through the code than every system's own run."""


def compare(name: str, found: str) -> None:
    """``found`` is what is recorded under this name; ``make record-hashes`` writes it there."""
    if os.environ.get("RECORD_HASHES"):
        recorded.record(name, found)
    known = recorded.hashes()
    if known is None:
        pytest.skip("this machine rounds otherwise than those whose hashes are recorded (see recorded.py)")
    assert found == known[name]


@SYSTEM
def test_the_final_models_of_a_system_are_those_recorded(conform, system):
    compare(system, conform(system).sha256)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_final_models_of_a_variant_are_those_recorded(conform, variant):
    settings = dict(VARIANTS[variant])
    compare(variant, conform(settings.pop("system"), **settings).sha256)


def test_hashes_are_recorded_of_what_there_is_alone():
    known = recorded.hashes()
    assert known is None or set(known) <= {*SYSTEMS, *VARIANTS}
