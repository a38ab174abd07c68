"""The audit: its bound is right for mechanisms of known ε, its attack finds what is there, and a run can fail it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.context import NodeContext
from clients.fedavg import FedAvgClient
from fedprune_app.errors import LaunchError
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy.audit import Evidence, Finding, guesses_of, lower_bound, p_value
from fedprune_app.privacy.dpsgd import DPSGD
from fedprune_app.privacy.noise import KeyedNoise
from fedprune_app.testing.audit import AMPLITUDE, Question, Silent, Watched, _Watch, audit, canaries, coins
from tests.refusing import refuses

# --- the bound --------------------------------------------------------------------------------------------------------


def slow_p_value(canaries, guesses, correct, epsilon, delta):
    """Theorem 3.1, written with sums of binomial probabilities, over all i."""
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))

    def f(v):
        terms = (math.comb(guesses, k) * accuracy**k * (1 - accuracy) ** (guesses - k) for k in range(guesses + 1))
        return sum(term for k, term in enumerate(terms) if k >= v)

    slopes = [(f(correct - i) - f(correct)) / i for i in range(1, canaries + 1)]
    return min(1.0, f(correct) + 2 * canaries * delta * max(slopes))


@pytest.mark.parametrize("correct", [0, 1, 7, 11, 15])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_p_value_is_the_theorems(correct, epsilon, delta):
    assert p_value(20, 15, correct, epsilon, delta) == pytest.approx(slow_p_value(20, 15, correct, epsilon, delta))


def test_all_guesses_right_bound_epsilon_as_by_hand():
    """q^r = 1 - confidence, so ε = ln(q / (1 - q))."""
    q = 0.05 ** (1 / 100)
    assert lower_bound(100, 100, 100, 0.0, 0.95) == pytest.approx(math.log(q / (1 - q)), abs=1e-5)


def test_guesses_no_better_than_a_coin_bound_nothing():
    assert lower_bound(100, 50, 25, 1e-5) == 0
    assert lower_bound(100, 50, 0, 1e-5) == 0


def test_more_correct_guesses_bound_more_and_more_confidence_or_delta_bound_less():
    bounds = [lower_bound(500, 200, correct, 1e-6) for correct in range(110, 201, 10)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]
    assert lower_bound(500, 200, 160, 1e-6, 0.99) < lower_bound(500, 200, 160, 1e-6, 0.9)
    assert lower_bound(500, 200, 160, 1e-2) < lower_bound(500, 200, 160, 1e-3) < lower_bound(500, 200, 160, 0.0)
    assert lower_bound(500, 200, 160, 1.0) == 0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_the_bound_covers_randomized_response_and_is_not_vacuous(epsilon):
    """Its every guess is right with probability e^ε / (1 + e^ε), which is all that ε-DP allows."""
    trials, size = 2000, 200
    right = np.random.default_rng(int(10 * epsilon)).binomial(size, 1 / (1 + math.exp(-epsilon)), trials)
    bounds = {n: lower_bound(size, size, int(n), 0.0, 0.95) for n in set(right)}
    wrong = sum(bounds[n] > epsilon for n in right) / trials
    assert 0.01 < wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)  # exactly 5 % but for whole numbers
    assert np.mean([bounds[n] for n in right]) > 0.7 * epsilon - 0.1


def test_the_bound_covers_a_mechanism_that_tells_all_with_probability_delta():
    epsilon, delta, size, trials = 0.5, 0.03, 50, 4000
    draw = np.random.default_rng(3)
    right = draw.binomial(size, 1 / (1 + math.exp(-epsilon)), trials)
    right[draw.random(trials) < delta] = size
    wrong = {}
    for d in (0.0, delta):
        bounds = {n: lower_bound(size, size, int(n), d) for n in set(right)}
        wrong[d] = np.mean([bounds[n] > epsilon for n in right])
    assert wrong[delta] < 0.05
    assert wrong[0.0] > 0.05  # which is what δ in the bound is for


# --- guesses ----------------------------------------------------------------------------------------------------------


def test_the_largest_scores_are_guessed_in_the_smallest_out_and_the_rest_not_at_all():
    assert guesses_of(torch.tensor([0.3, -2.0, 9.0, 0.1, -1.0]), 2).tolist() == [0, -1, 1, 0, 0]


def test_a_finding_counts_right_guesses_of_both_kinds_and_is_judged_by_the_claim():
    scores, tossed = torch.arange(100.0), torch.arange(100) >= 50
    tossed[[0, 99]] = ~tossed[[0, 99]]
    found = Finding.of(scores, tossed, 40, 1e-6, 0.95, claim=1.0)
    assert found.correct == 38
    assert found.bound == lower_bound(100, 40, 38, 1e-6, 0.95) > 1
    assert not found.holds
    assert "the ledger claims ε = 1 at δ = 1e-06, but 38 of 40 guesses were right" in found.verdict
    assert Finding.of(scores, tossed, 40, 1e-6, 0.95, claim=9.0).holds
    assert json.loads(json.dumps(Finding.of(scores, tossed, 40, 1e-6, 0.95, math.inf).to_dict()))["claim"] is None


# --- the attack -------------------------------------------------------------------------------------------------------


def release(noise, seed=0, scale=1.0, size=60, dimensions=500):
    """(update, directions, others, coins) as the attack's model has them, with directions far from orthogonal."""
    draw = torch.Generator().manual_seed(seed)
    directions = torch.randn(size, dimensions, generator=draw) + 2 * torch.randn(dimensions, generator=draw)
    other = 50 * torch.randn(dimensions, generator=draw)
    tossed = coins(seed, size)
    update = other + tossed.float() @ directions + noise * torch.randn(dimensions, generator=draw)
    return scale * update, directions, [other], tossed


def right(evidence, tossed):
    return int(((evidence.scores > evidence.scores.median()) == tossed).sum())


def test_without_noise_every_coin_is_found_among_canaries_that_pull_alike():
    update, directions, others, tossed = release(noise=0.0)
    evidence = Evidence(60)
    evidence.add(update, directions, others)
    assert evidence.scores[tossed].min() > evidence.scores[~tossed].max()
    alone = directions @ update  # what an inner product, which does not tell canaries apart, cannot do
    assert alone[tossed].min() < alone[~tossed].max()


def test_scores_do_not_depend_on_the_learning_rate_nor_on_the_axes():
    update, directions, others, _ = release(noise=10.0)
    rotation = torch.linalg.qr(torch.randn(500, 500, generator=torch.Generator().manual_seed(1)))[0]
    all_scores = []
    for u, g, o in (
        (update, directions, others[0]),
        (1e-4 * update, directions, others[0]),
        (update @ rotation, directions @ rotation, others[0] @ rotation),
        (update + 5 * others[0], directions, others[0]),
    ):
        evidence = Evidence(60)
        evidence.add(u, g, [o])
        all_scores.append(evidence.scores)
    for scores in all_scores[1:]:
        torch.testing.assert_close(scores, all_scores[0], rtol=0.02, atol=0.01)


def test_two_releases_tell_more_than_one_and_noise_tells_nothing():
    tossed = coins(0, 60)
    counts = []
    for rounds in (1, 12):
        evidence = Evidence(60)
        for round in range(rounds):
            _, directions, others, _ = release(0.0, seed=round + 1)
            noise = 30 * torch.randn(500, generator=torch.Generator().manual_seed(round))
            evidence.add(tossed.float() @ directions + noise, directions, others)
        counts.append(right(evidence, tossed))
    assert counts[1] > counts[0]
    assert counts[1] > 48  # of 60
    nothing = Evidence(60)
    nothing.add(torch.zeros(500), directions, others)
    nothing.add(noise, torch.zeros(60, 500))
    assert nothing.scores.tolist() == [0.0] * 60


def test_canaries_and_coins_are_drawn_from_the_seed_and_independent_of_one_another():
    images, labels = canaries(0, 2000, (1, 8, 8), 10)
    assert torch.equal(images, canaries(0, 2000, (1, 8, 8), 10)[0])
    assert not torch.equal(images, canaries(1, 2000, (1, 8, 8), 10)[0])
    assert float((images != 0).float().mean()) == pytest.approx(1 / 16, rel=0.05)
    assert float(images[images != 0].std()) == pytest.approx(AMPLITUDE, rel=0.05)
    assert torch.bincount(labels, minlength=10).min() > 140
    tossed = coins(0, 2000)
    assert abs(float(tossed.float().mean()) - 0.5) < 0.04
    assert abs(float(torch.corrcoef(torch.stack([tossed.float(), labels.float()]))[0, 1])) < 0.08


# --- a run ------------------------------------------------------------------------------------------------------------

SETTINGS = {
    "system": "fedavg",
    "partition": "iid",
    "num-server-rounds": 2,
    "fraction-train": 1.0,
    "local-epochs": 3,
    "batch-size": 20,
    "learning-rate": 0.1,
    "evaluate-every": 2,
    "dp.enabled": True,
    "dp.noise-multiplier": 4.0,
    "dp.delta": 1e-5,
}
SYSTEMS = {
    "fedavg": {},
    "subfedavg": {"subfedavg.gate-split": "none", "subfedavg.mask-distance": 0.0, "subfedavg.prune-step": 20.0},
    "dispfl": {"dispfl.growth": "random"},
    "fedp3": {"fedp3.layer-set": "all"},
    "fedspa": {"fedspa.share": 0.6},
    "fedltp": {"fedltp.pruning": "iterative", "density": 0.9, "dp.count-scale": 20.0},
    "fjord": {},
    "ldp-fedp3": {},
}
SENDS_PARTS = {"fedspa", "fjord", "ldp-fedp3"}  # in a form of their own


def prepared(clients, **settings):
    """A run of so many clients; whether it can start is not tried."""
    return replace(prepare(RunInputs(SETTINGS | settings)), placement=Placement("inprocess", clients))


def configured():
    return prepared(3).config


@pytest.mark.full
@pytest.mark.parametrize(
    "system",
    [name if name in {"fedavg", *SENDS_PARTS} else pytest.param(name, marks=pytest.mark.slow) for name in SYSTEMS],
)
def test_the_bound_stays_below_the_claim_and_without_noise_rises_clearly_above_it(system):
    asked = prepared(3, system=system, **SYSTEMS[system])
    noised, bare = (audit(asked, Question(200, without_noise=flag)) for flag in (False, True))
    assert noised.claim == bare.claim  # the ledger does not know that noise lacks
    assert 0 < noised.claim < 1
    assert noised.holds
    assert bare.bound > 1.5 * bare.claim
    assert not bare.holds


@pytest.mark.slow
def test_more_canaries_bound_more_and_still_less_than_the_claim():
    asked = prepared(2, **{"num-server-rounds": 4, "dp.noise-multiplier": 0.5, "dp.clip-norm": 0.5})
    noised, bare = (audit(asked, Question(560, without_noise=flag)) for flag in (False, True))
    assert 0 < noised.bound < noised.claim  # the attack sees something through the noise
    assert bare.bound > 3.5


def test_a_canary_that_is_out_has_no_gradient_and_keeps_its_place(tmp_path):
    watch = _Watch(0, 0, 50, Evidence(50))
    kind = type("WatchedFedAvg", (Watched, FedAvgClient), {"watch": watch})
    client = kind(configured(), NodeContext(0, 3, tmp_path))
    assert client.num_examples == FedAvgClient(configured(), NodeContext(0, 3, tmp_path)).num_examples
    assert torch.equal(client.data.train_images[:50], client.canary_images)
    out = ~client.coins
    assert 10 < int(out.sum()) < 40
    for method in ("one-pass", "hooks"):
        gradients = {name: torch.zeros_like(p) for name, p in client.model.named_parameters()}
        whole = {name: torch.ones_like(p) for name, p in client.model.named_parameters()}
        how = DPSGD(0.0, 1.0, 0.5, 1, Silent(KeyedNoise(bytes(32))), method)
        with how.attached(client.model, gradients, whole) as step:
            step.add(client.data.train_images[:50][out], client.data.train_labels[:50][out])
            assert not any(bool(g.any()) for g in gradients.values())
            step.add(client.data.train_images[:50], client.data.train_labels[:50])
            assert any(bool(g.any()) for g in gradients.values())


@pytest.mark.parametrize(
    ("settings", "question", "said"),
    [
        ({"dp.enabled": False}, {}, ("dp.enabled", False)),
        ({}, {"client": 3}, ("--client", 3)),
        ({}, {"canaries": 10_000}, ("--canaries", 10000)),
        ({}, {"canaries": 100, "guesses": 101}, ("--guesses", 101)),
        ({}, {"confidence": 1.0}, ("--confidence", 1.0)),
        ({}, {"delta": 1.0}, ("--delta", 1.0)),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(settings, question, said):
    with refuses(*said):
        audit(prepared(3, **settings), Question(**question))


def test_a_system_that_sends_nothing_cannot_be_audited():
    with pytest.raises(LaunchError, match="client 1 sent no model in 1 rounds"):
        audit(prepared(2, **{"system": "standalone", "num-server-rounds": 1}), Question(client=1))


def test_a_client_that_fails_fails_the_audit_with_its_own_words():
    with pytest.raises(LaunchError, match=r"the privacy budget is 0\.01"):
        audit(prepared(2, **{"dp.epsilon-budget": 0.01}), Question())


@pytest.mark.full
def test_the_command_passes_with_noise_fails_without_and_charges_no_ledger_of_the_user(fedprune, tmp_path):
    (tmp_path / "private.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in SETTINGS.items()))
    ask = ["audit", "private.toml", "system=fedavg", "dp.ledger-dir=ledgers", "--clients", "3", "--canaries", "200"]
    passed, told = fedprune(*ask, "--json", "found.json")
    assert passed == 0, told
    assert "not contradict" in told
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bound"] <= found["claim"]
    assert (found["canaries"], found["guesses"], found["confidence"], found["holds"]) == (200, 100, 0.95, True)
    failed, told = fedprune(*ask, "--without-noise")
    assert failed == 1
    assert "failed: the ledger claims ε = " in told
    assert not (tmp_path / "ledgers").exists()
