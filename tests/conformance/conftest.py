"""What every registered system must do, whatever it computes: the settings and runs that the suite shares.

The suite is parametrised over ``registry.SYSTEMS`` itself, so a new system is held to it without another line. A system
that cannot run on the common settings says in ``MORE`` what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.registry import SYSTEMS
from fedprune_app.testing import CLIENTS, NEEDED, PRIVATE, QUICK, ROUNDS, ObservedRun, run_with
from tests.models.tiny_llm import text_folder, tiny_byte_model

__all__ = ["CLIENTS", "PRIVATE", "ROUNDS"]
COMMON: Mapping[str, Any] = {
    **QUICK,
    "subfedavg.accuracy-threshold": 0.0,
    "subfedavg.mask-distance": 0.0,
    "subfedavg.fc-mask-distance": 0.0,
    "subfedavg.channel-distance": 0.0,
    "dispfl.neighbours": 2,
    "dpsgd.neighbours": 2,
    "fedfomo.candidates": 2,
}
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
    "fedavg: cropped, weight decay": {
        "system": "fedavg",
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
    "fedp3: ordered dropout, other layers in each round": {
        "system": "fedp3",
        "model": "cnn-gn",
        "batch-size": 24,
        "density": 0.7,
        "fedp3.layer-set": "opu1-2-3",
        "fedp3.assignment": "per-round",
        "fedp3.local": "ordered-dropout",
    },
    "lg-fedavg: one round of FedAvg first": {"system": "lg-fedavg", "lgfedavg.pretrain-rounds": 1},
    "lg-fedavg: two rounds of FedAvg first": {"system": "lg-fedavg", "lgfedavg.pretrain-rounds": 2},
    "dpsgd: each client averages": {"system": "dpsgd", "dpsgd.gossip": "client", "drop-probability": 0.3},
    "ditto: private": {"system": "ditto", **PRIVATE},
    "subfedavg: local BatchNorm": {"system": "subfedavg", "model": "cnn-small-bn", "batch-norm": "local"},
    "standalone: private": {"system": "standalone", **PRIVATE},
    "fedspallm: every second layer": {
        "system": "fedspallm",
        "fedspallm.layer-shares": "0.5 1.0",
        "fedspallm.unsampled": "current",
    },
    "fedspallm: Hessians": {"system": "fedspallm", "fedspallm.merge": "hessians", "num-server-rounds": 1},
    "fedspallm: recovery": {
        "system": "fedspallm",
        "fedspallm.recovery-rounds": 2,
        "fedspallm.recovery-segments": 4,
        "fedspallm.recovery-steps": 3,
        "fedspallm.recovery-learning-rate": 0.01,
    },
    "fedspallm: private": {"system": "fedspallm", "fedspallm.merge": "hessians", "num-server-rounds": 1, **PRIVATE},
}
"""Settings that take other paths through the code than every system's own run; ``conform`` knows them by name."""


TWO = ("dispfl", "fedspallm")
"""The systems for which `make test` holds the laws that take two runs, and more: `make full` does for the others.

One has no server's model, and the other no images, several messages a round, and layers.
"""


def of_system(case: str, *more: Any, full: bool = False) -> Any:
    """Parameters, the case first: tests whose names begin with a system's run in one process, and share its runs.

    With ``full`` it is a case of `make full` alone.
    """
    return pytest.param(case, *more, marks=[pytest.mark.full] if full else [])


def _of_all(name: str, cases: Collection[str], quick: Collection[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, [of_system(case, full=case not in quick) for case in cases])


_CASES = (*SYSTEMS, *VARIANTS)
SYSTEM, CASE = _of_all("system", SYSTEMS, SYSTEMS), _of_all("case", _CASES, _CASES)
TWO_SYSTEMS, TWO_CASES = _of_all("system", SYSTEMS, TWO), _of_all("case", _CASES, TWO)
"""Those of tests that need more runs than the one that others share."""
SYSTEM_ONCE = _of_all("system", SYSTEMS, ["subfedavg"])
"""That of tests whose runs are many and share no more than the messages, which all systems have in common."""


@pytest.fixture(scope="session")
def settings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """``settings_of(case)``: a quick run's, of a system or a variant."""
    texts: dict[str, Any] = {}

    def settings(system: str) -> dict[str, Any]:
        variant = VARIANTS.get(system, {})
        system = str(variant.get("system", system))
        found = {**COMMON, **NEEDED.get(system, {}), "system": system, **variant}
        if SYSTEMS[system].reads_text:
            if not texts:
                folder = tmp_path_factory.mktemp("texts")
                texts["data-dir"] = str(text_folder(folder / "data"))
                texts["model"] = str(tiny_byte_model(folder / "model", "llama"))
            sizes = {"segments": 2, "segment-length": 24, "window": 32, "block-size": 8}
            found |= {**texts, "dataset": "text", **{f"fedspallm.{key}": value for key, value in sizes.items()}}
        return found

    return settings


@pytest.fixture(scope="session")
def conform(settings_of, tmp_path_factory) -> Callable[..., ObservedRun]:
    """``conform(case, grid=InProcessGrid, **settings)``: a finished run in this process; equal runs are shared."""
    finished: dict[str, ObservedRun] = {}

    def run(system: str, grid: type[InProcessGrid] = InProcessGrid, **settings: Any) -> ObservedRun:
        given = {key.replace("_", "-"): value for key, value in settings.items()}
        values = {**settings_of(system), **given}
        key = json.dumps([grid.__name__, values], sort_keys=True)
        if key not in finished:
            folder = Path(given.get("resume-from") or tmp_path_factory.mktemp(system))
            finished[key] = run_with(values, folder, grid)
        return finished[key]

    return run
