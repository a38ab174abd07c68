"""The check before a run: what passes completes a round, and what would fail in one is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedprune_app.config import ConfigError
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.testing import NEEDED, PRIVATE, QUICK, run_with

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("no_plugins"),
]
NETWORKS = Path(__file__).with_name("networks.py")
GALLERY = Path(__file__).parents[2] / "gallery"
SETTINGS = {
    "subfedavg-hy": {"local-epochs": 2, "subfedavg.gate-split": "none", "subfedavg.channel-distance": 0.0},
    "fjord": {},
    "fedp3": {"fedp3.local": "ordered-dropout"},
    "dispfl": {},
    "fedavg-ft": {},
    "fedltp": {key: value for key, value in NEEDED["fedltp"].items() if key != "model"},
    "ldp-fedp3": PRIVATE,
    "ssfl": {"plugins": str(GALLERY / "ssfl.py")},
    "feddst": {"plugins": str(GALLERY / "feddst.py"), "local-epochs": 2, "feddst.rounds-between": 1},
}
NAMES = [
    *("nested", "depthwise", "grouped", "prelu", "scripted", "without_scale", "Dense", "UNet", "Gated", "Flipped"),
    *("Residual", "Skipping", "Reentrant", "TupleInTraining", "PairsAtMost"),
]
CLIENTS = 2


def settings(network: str, system: str):
    values = {"system": system, "model": f"{NETWORKS}:{network}", "partition": "iid", "samples-per-client": 40}
    return {**QUICK, "num-server-rounds": 2, "min-replies": CLIENTS, **values, **SETTINGS[system]}


def refusal(values) -> str:
    try:
        prepare(RunInputs(values), Placement("inprocess", CLIENTS))
    except ConfigError as error:
        return str(error)
    return ""


def failure(values, folder: Path) -> str:
    try:
        run_with(values, folder, clients=CLIENTS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


PAIRS = [(name, list(SETTINGS)[number % len(SETTINGS)]) for number, name in enumerate(NAMES)]
MORE = [("Reentrant", "fjord"), ("without_scale", "subfedavg-hy")]
REST = [(name, system) for name in NAMES for system in SETTINGS if (name, system) not in [*PAIRS, *MORE]]


@pytest.mark.parametrize(
    ("network", "system"), [*PAIRS, *MORE, *(pytest.param(*pair, marks=pytest.mark.full) for pair in REST)]
)
def test_what_passes_the_check_completes_its_rounds_and_nothing_else_does(network, system, tmp_path):
    values = settings(network, system)
    refused = refusal(values)
    failed = failure(values, tmp_path)
    assert bool(refused) == bool(failed), (refused, failed)
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("network", "system", "said"),
    [
        ("TupleInTraining", "ssfl", "fails when a client of ssfl is asked to train: TypeError"),
        ("without_scale", "subfedavg-hy", "fails when a client of subfedavg-hy is asked to train: KeyError"),
        (
            "PairsAtMost",
            "fedavg-ft",
            "fails when a client of fedavg-ft is asked to evaluate: RuntimeError: more than a",
        ),
    ],
)
def test_a_network_that_fails_at_one_step_is_named_with_the_step(network, system, said):
    assert refusal(settings(network, system)).startswith(f"model is '{NETWORKS}:{network}', which {said}")


def test_a_check_leaves_nothing_behind_and_charges_nothing(tmp_path):
    state = torch.get_rng_state()
    folders = {"out-dir": "run", "state-dir": "state", "dp.ledger-dir": "ledgers"}
    places = {key: str(tmp_path / name) for key, name in folders.items()}
    assert not refusal({**settings("Skipping", "ldp-fedp3"), **places})
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert torch.equal(torch.get_rng_state(), state)
