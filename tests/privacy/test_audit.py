"""The audit: its bound is exact for Gaussians, it sees the real private step of every system, and a run can fail it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from clients.context import NodeContext
from clients.fedavg import FedAvgClient
from fedprune_app.errors import LaunchError
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy import clipped_sums
from fedprune_app.privacy.accounting import Steps, epsilon
from fedprune_app.privacy.audit import Finding, Tally, at_least
from fedprune_app.privacy.dpsgd import DPSGD
from fedprune_app.privacy.noise import KeyedNoise
from fedprune_app.testing.audit import Question, Watch, WatchedDPSGD, WatchedImages, Weaker, audit
from tests.refusing import refuses

# --- the bound --------------------------------------------------------------------------------------------------------


def simulated(noise, rate, seed, steps=60, canaries=200):
    """What an ideal mechanism releases: half of the canaries are in, and each step draws each with the rate."""
    draw = np.random.default_rng(seed)
    coins, tally = torch.from_numpy(draw.random(canaries) < 0.5), Tally()
    for _ in range(steps):
        is_drawn = torch.from_numpy(draw.random(canaries) < rate)
        is_in = is_drawn & coins
        released = is_in.double() + noise * torch.from_numpy(draw.standard_normal(canaries))
        tally.add(released, is_in, is_drawn)
    return tally


def test_counts_are_of_guesses_above_half_of_the_clipping_norm():
    tally = Tally()
    tally.add(torch.tensor([0.9, 0.4, 0.6, 0.1]), torch.tensor([True, True, False, False]), torch.tensor([True]))
    assert tally == Tally(steps=1, present=2, found=1, absent=2, cleared=1, draws=1, chances=1)


@pytest.mark.parametrize(("noise", "rate"), [(0.6, 0.1), (2.0, 0.3)])
def test_the_bound_on_each_step_covers_and_is_close(noise, rate):
    steps = [simulated(noise, rate, seed).step(0.9) for seed in range(200)]
    too_tight = sum(step.noise_multiplier < noise or step.sample_rate > rate for step in steps)
    assert too_tight <= 20 + 3 * math.sqrt(18)  # of 200 at a confidence of 90 %
    assert np.mean([step.noise_multiplier for step in steps]) < 1.5 * noise
    assert np.mean([step.sample_rate for step in steps]) > 0.9 * rate


def test_guesses_no_better_than_a_coin_bound_nothing():
    tally = Tally(10, present=100, found=50, absent=100, cleared=50)
    assert Tally().step(0.95) is None
    assert tally.step(0.95) is None
    assert Finding(20, 1.0, 1e-5, 0.95, tally).bound == 0


def test_the_bound_is_the_accountants_for_the_least_step():
    tally = Tally(10, present=1000, found=900, absent=2000, cleared=1800)
    share = at_least(1800, 2000, 0.05)
    noise = 1 / (2 * math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * share - 1, dtype=torch.float64))))
    found = Finding(20, 1.0, 1e-5, 0.95, tally)
    assert found.bound == pytest.approx(epsilon({Steps(noise, 1.0): 10}, 1e-5), rel=1e-3)
    assert not found.holds
    assert "the ledger claims ε = 1 at δ = 1e-05, but it is at least" in found.verdict
    assert replace(found, claim=99.0).holds
    assert json.loads(json.dumps(replace(found, claim=math.inf).to_dict()))["claim"] is None


# --- canaries ---------------------------------------------------------------------------------------------------------

SETTINGS = {
    "system": "fedavg",
    "partition": "iid",
    "num-server-rounds": 2,
    "fraction-train": 1.0,
    "local-epochs": 2,
    "batch-size": 40,
    "learning-rate": 0.1,
    "evaluate-every": 2,
    "dp.enabled": True,
    "dp.noise-multiplier": 1.0,
    "dp.delta": 1e-5,
}


def prepared(clients, **settings):
    """A run of so many clients; whether it can start is not tried."""
    return replace(prepare(RunInputs(SETTINGS | settings)), placement=Placement("inprocess", clients))


@pytest.mark.parametrize("method", ["one-pass", "hooks"])
def test_a_canary_that_is_in_adds_the_clipping_norm_along_its_own_coordinate_and_a_blank_nothing(tmp_path, method):
    watch = Watch(Question(50), seed=0)
    kind = type("Watched", (WatchedImages, FedAvgClient), {"watch": watch})
    client = kind(prepared(3).config, NodeContext(0, 3, tmp_path))
    plain = FedAvgClient(prepared(3).config, NodeContext(0, 3, tmp_path))
    assert client.num_examples == plain.num_examples
    assert torch.equal(client.data.train_images[50:], plain.data.train_images[50:])
    assert 10 < int(watch.coins.sum()) < 40
    gradients = {name: torch.zeros_like(p) for name, p in client.model.named_parameters()}
    whole = {name: torch.ones_like(p) for name, p in client.model.named_parameters()}
    how = WatchedDPSGD(0.0, 2.0, 0.5, 1, Weaker(KeyedNoise(bytes(32)), 1.0), method, watch=watch)
    images, labels = client.data.train_images[:60], client.data.train_labels[:60]
    with how.attached(client.model, gradients, whole, images.shape[1:]) as step:
        step.add(images[:50], labels[:50])
        assert not any(bool(gradient.any()) for gradient in gradients.values())
        torch.testing.assert_close(step.gradients["canaries.bias"], 2.0 * watch.coins.float())
        step.add(images[50:], labels[50:])
        torch.testing.assert_close(step.gradients["canaries.bias"], 2.0 * watch.coins.float())
    expected = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    with DPSGD(0.0, 2.0, 0.5, 1, KeyedNoise(bytes(32)), method).attached(client.model, expected, whole) as step:
        step.add(images[50:], labels[50:])
    for name, gradient in gradients.items():  # all else is as without canaries
        torch.testing.assert_close(gradient, expected[name])


# --- a run ------------------------------------------------------------------------------------------------------------

SYSTEMS = {
    "fedavg": {},
    "fedp3": {"fedp3.local": "ordered-dropout"},
    "subfedavg": {"subfedavg.gate-split": "none", "subfedavg.mask-distance": 0.0, "subfedavg.prune-step": 20.0},
    "ditto": {},
    "mtl": {},
    "dispfl": {"dispfl.growth": "random"},
    "fedspa": {"fedspa.share": 0.6},
    "fedltp": {"fedltp.pruning": "iterative", "density": 0.9, "dp.count-scale": 20.0},
    "fjord": {},
    "ldp-fedp3": {},
    "standalone": {},
}


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_bound_is_near_the_claim_and_noise_at_half_of_what_is_charged_is_found(system):
    asked = prepared(2, system=system, **SYSTEMS[system])
    noised, half = (audit(asked, Question(noise_share=share)) for share in (1.0, 0.5))
    assert noised.claim == half.claim  # the ledger does not know that noise lacks
    assert 0.6 * noised.claim < noised.bound < noised.claim
    assert half.bound > 1.3 * half.claim
    assert not half.holds


def test_a_full_batch_bounds_most_of_the_claim():
    found = audit(prepared(2, **{"batch-size": 1000, "dp.noise-multiplier": 3.0}), Question())
    assert found.tally.chances == 0
    assert found.tally.steps == 4
    assert 0.5 * found.claim < found.bound < found.claim


def planted_clipping(squared_norms, clip_norm):
    return torch.full_like(squared_norms, 0.5)


def planted_sampling(self, num_examples):
    return iter([torch.arange(num_examples) for _ in range(self.steps_per_epoch)])


@pytest.mark.full
@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (clipped_sums, "clip_factors", planted_clipping),
        (DPSGD, "batches", planted_sampling),
        (KeyedNoise, "gaussian", lambda self, size, device="cpu": torch.zeros(size, dtype=torch.float64)),
    ],
    ids=["clipping", "sampling", "noise"],
)
def test_a_mistake_in_the_private_step_itself_is_found(monkeypatch, owner, name, planted):
    monkeypatch.setattr(owner, name, planted)
    monkeypatch.setattr("fedprune_app.testing.audit.check_private", lambda *_: None)  # which would refuse the run
    assert not audit(prepared(2, **{"num-server-rounds": 1}), Question(100)).holds


@pytest.fixture
def patients(tmp_path):
    """A table of 120 patients with one to four visits each."""
    draw = np.random.default_rng(1)
    rows = [
        {"patient": f"p{patient}", "age": float(draw.normal()), "weight": float(draw.normal()), "ill": patient % 2}
        for patient in range(120)
        for _ in range(1 + patient % 4)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "train.csv", index=False)
    return {
        "dataset": "table",
        "data-dir": str(tmp_path),
        "label-column": "ill",
        "group-column": "patient",
        "dp.unit": "group",
        "dp.group-limit": 3,
        "test-split": "holdout",
    }


@pytest.mark.full
def test_groups_are_canaries_where_groups_are_protected(patients, monkeypatch):
    asked = prepared(2, **patients, **{"batch-size": 100})
    found = audit(asked, Question())
    assert 30 < found.canaries < 50  # patients of some 100 visits
    assert 0.4 * found.claim < found.bound < found.claim
    monkeypatch.setattr("fedprune_app.privacy.dpsgd.clip_factors", lambda squares, norm: torch.tensor(1.0))
    assert not audit(asked, Question()).holds  # a group's mean gradient is not clipped


@pytest.mark.parametrize(
    ("settings", "question", "said"),
    [
        ({"dp.enabled": False}, {}, ("dp.enabled", False)),
        ({}, {"client": 3}, ("--client", 3)),
        ({}, {"canaries": 10_000}, ("--canaries", 10000)),
        ({}, {"confidence": 1.0}, ("--confidence", 1.0)),
        ({}, {"delta": 1.0}, ("--delta", 1.0)),
    ],
)
def test_what_cannot_be_asked_is_refused(settings, question, said):
    with refuses(*said):
        audit(prepared(3, **settings), Question(**question))


def test_a_client_that_fails_fails_the_audit_with_its_own_words():
    with pytest.raises(LaunchError, match=r"the privacy budget is 0\.01"):
        audit(prepared(2, **{"dp.epsilon-budget": 0.01}), Question())


@pytest.mark.full
def test_the_command_passes_with_noise_fails_without_and_charges_no_ledger_of_the_user(fedprune, tmp_path):
    (tmp_path / "private.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in SETTINGS.items()))
    ask = ["audit", "private.toml", "system=fedavg", "dp.ledger-dir=ledgers", "--clients", "3", "--canaries", "100"]
    passed, told = fedprune(*ask, "--json", "found.json")
    assert passed == 0, told
    assert "which does not contradict the ledger's" in told
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bound"] <= found["claim"]
    assert (found["canaries"], found["confidence"], found["holds"]) == (100, 0.95, True)
    failed, told = fedprune(*ask, "--noise-share", "0")
    assert failed == 1
    assert "failed: the ledger claims ε = " in told
    assert not (tmp_path / "ledgers").exists()
