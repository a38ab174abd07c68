"""Runs with dp.enabled: what is charged is what ran, nothing raw is told, budgets hold, and no spend is forgotten."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache

import numpy as np
import pytest
import torch

import fedprune_app
from clients.base import ImageClient
from clients.context import NodeContext
from clients.fedavg import FedAvgClient
from clients.privacy import ClientPrivacy, PlannedReleases
from fedprune_app.config import Config, ConfigError, check_resumable, parse_config
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.federation.budgets import Budgets
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy.accounting import Laplace, Steps, epsilon
from fedprune_app.privacy.ledger import Data, Ledger
from fedprune_app.registry import SYSTEMS
from tests.examples import full, in_test
from tests.refusing import refuses
from tests.strategies.conftest import TINY, Run, config_key

DELTA, SIGMA, BATCH, ROUND_STEPS = 1e-3, 1.3, 10, 2 * 8  # two epochs of 8 steps
DP = {"dp_enabled": True, "dp_noise_multiplier": SIGMA, "dp_delta": DELTA, "num_server_rounds": 2}
DP |= {"steps_per_epoch": ROUND_STEPS // 2, "dp_accuracies": "open"}
ADMISSIBLE = {
    "fedavg": {},
    "fedprox": {},
    "fedavg-ft": {},
    "subfedavg": {"subfedavg_gate_split": "none"},
    "dispfl": {"dispfl_growth": "random", "max_grad_norm": 10.0},
    "dpsgd": {"dpsgd_density": 0.5},
    "fedp3": {"fedp3_layer_set": "lowerb"},
    "ldp-fedp3": {},
    "fjord": {},
    "ditto": {"ditto_global_epochs": 1, "ditto_personal_epochs": 1},
    "lg-fedavg": {},
    "mtl": {},
    "standalone": {},
    "dpfed": {},
    "fedspa": {},
    "fedltp": {"fedltp_validators": "none", "fedltp_tickets": 1, "fedltp_ticket_iterations": 5},
}


@cache
def step(partition: int, system: str = "fedavg") -> Steps:
    """A step of the client of this number, of four, which has about 50 examples to train on."""
    settings = {config_key(name): value for name, value in DP.items()}
    return step_of(parse_config({**TINY, **settings, "system": system}), partition)


def step_of(config: Config, partition: int) -> Steps:
    return Steps(SIGMA, BATCH / client_data(data_config(config), partition, 4).num_examples)


def cost(steps: int, partition: int | None = None) -> float:
    """The ε of so many steps of a client, or of the client for which they cost most."""
    whose = range(4) if partition is None else [partition]
    return max(epsilon({step(k): steps}, DELTA) for k in whose)


def ledger(run: Run, partition: int) -> Ledger:
    return Ledger(run.folder / "clients" / f"{partition:05d}" / "ledger.jsonl")


def trained_in(run: Run, round: int) -> set[int]:
    return set(run.wiretap.of("train", round))


@pytest.mark.parametrize("system", in_test(ADMISSIBLE, "fedp3"))
def test_every_client_is_charged_for_the_steps_it_ran(federation, system):
    run = federation(system=system, **DP, **ADMISSIBLE[system])
    assert run.info["status"] == "completed"
    for partition in range(4):
        rounds = [round for round in (1, 2) if partition in trained_in(run, round)]
        steps = len(rounds) * ROUND_STEPS + (2 * ROUND_STEPS if system == "fedavg-ft" else 0)  # both evaluations
        assert ledger(run, partition).spent == ({step(partition, system): steps} if steps else {})
        row = run.rows(2)[partition]
        spent = {step(partition, system): steps}
        assert row["epsilon"] == row["epsilon_pld"] == pytest.approx(epsilon(spent, DELTA, "pld"))
        assert row["epsilon_rdp"] == pytest.approx(epsilon(spent, DELTA, "rdp"))
        assert row["epsilon_pld"] < row["epsilon_rdp"] or steps == 0
    last = run.rounds[-1]
    for name in ("epsilon", "epsilon_pld", "epsilon_rdp"):
        assert last[f"{name}_max"] == max(row[name] for row in run.rows(2).values())
    assert last["epsilon_paper_max"] >= 0
    assert last["budgets_spent"] == 0
    if run.config.system != "standalone":
        assert any(tensor.any() for tensor in run.wiretap.of("train")[min(trained_in(run, 2))].up.tensors.values())


@pytest.mark.full
@pytest.mark.parametrize("local", ["uniform", "ordered-dropout"])
def test_local_pruning_is_private_and_says_nothing_of_the_size_of_its_samples(federation, local):
    settings = {"system": "fedp3", "model": "cnn-gn", "fedp3_layer_set": "lowerb", "fedp3_local": local, "density": 0.8}
    settings |= {**DP, "fedp3_local_density": 0.5, "fraction_train": 1.0}
    run = federation(**settings)
    assert all(ledger(run, partition).spent == {step(partition): 2 * ROUND_STEPS} for partition in range(4))
    other = federation(**settings | {"dp_noise_multiplier": 1.4})  # has other samples, of the same parts
    assert other.rounds[0]["flops"] == run.rounds[0]["flops"]
    assert other.sha256 != run.sha256 != federation(**settings | {"fedp3_local_density": 0.9}).sha256


@pytest.mark.parametrize("system", ["fedavg", "dispfl"])
def test_losses_and_labels_do_not_leave(federation, system):
    run = federation(system=system, **DP, **ADMISSIBLE[system])
    assert all(row["loss_mean"] is None for row in run.rounds)
    assert all(row.get("loss") is None for row in run.clients)
    assert all(row[part] == [] for row in run.info["partition"] for part in ("train", "validation", "test"))


def test_how_many_test_examples_a_client_has_does_not_leave(federation):
    private, open_run = federation(system="fedavg", **DP), federation(system="fedavg", num_server_rounds=2)
    for partition in range(4):
        told, in_the_open = (run.wiretap.of("evaluate")[partition].told for run in (private, open_run))
        assert told["num-examples"] == 0
        assert in_the_open["num-examples"] > 0


@pytest.mark.full
@pytest.mark.parametrize("system", ["fedavg", full("subfedavg"), full("dispfl")])
def test_the_same_seed_gives_the_same_run_and_noise_makes_it_another(federation, system):
    settings = {"system": system, **DP, **ADMISSIBLE[system]}
    run = federation(**settings)
    assert federation(fresh=True, **settings).sha256 == run.sha256
    assert federation(**settings | {"dp_noise_multiplier": 1.4}).sha256 != run.sha256
    assert federation(**settings | {"dp_secure_rng": True}).sha256 != run.sha256


def test_seeded_noise_marks_every_epsilon_as_simulated_and_secure_noise_does_not(federation):
    for secure, share in ((False, 1.0), (True, 0.0)):
        run = federation(system="fedavg", **DP, dp_secure_rng=secure)
        assert [row["epsilon_simulated"] for row in run.rounds] == [share] * 2
        told = [row for row in run.clients if row["epsilon"] is not None]
        assert {row["epsilon_simulated"] for row in told} == {int(share)}
        clients = sorted({row["partition"] for row in told})
        assert run.info["noise"] == {"seed": [] if secure else clients, "operating-system": clients if secure else []}
    assert "epsilon_simulated" not in federation(system="fedavg", num_server_rounds=2).rounds[0]


@pytest.mark.full
def test_noised_accuracies_stand_beside_the_noise_of_their_mean(federation):
    settings = {"system": "fedavg", **DP, "evaluate_every": 1}
    run = federation(**settings | {"dp_accuracies": "noised", "dp_count_scale": 10.0})
    evaluated = [row for row in run.clients if row["round"] == 2]
    deviations = [row["accuracy_noise"] for row in evaluated]
    sizes = [round(math.sqrt(2) * 10.0 / deviation) for deviation in deviations]
    for row, size in zip(evaluated, sizes, strict=True):
        assert row["accuracy_noise"] == pytest.approx(math.sqrt(2) * 10.0 / size)
        assert row["accuracy_personal"] * size == pytest.approx(round(row["accuracy_personal"] * size))
    assert run.rounds[-1]["accuracy_noise"] == pytest.approx(math.hypot(*deviations) / len(deviations))
    assert federation(**settings).rounds[-1]["accuracy_noise"] is None


def test_the_mean_of_noised_accuracies_has_no_bias(tmp_path):
    """95 % of 120 with noise of 28 predictions: with every share cut to [0, 1] the mean would be 6 points too low."""
    config = parse_config({"dp.enabled": True, "dp.noise-multiplier": SIGMA, "dp.count-scale": 20.0})
    data = Data.of([b"one record"], "a test")
    privacy = ClientPrivacy(config, 0, 100, PlannedReleases(1), tmp_path / "ledger.jsonl", data)
    told = [privacy.affordable_count(114, 120, "test", 1, {"weight": torch.tensor(number)}) for number in range(1500)]
    deviation = math.sqrt(2) * 20 / 120
    assert np.std(told) == pytest.approx(deviation, rel=0.05)
    assert np.mean(told) == pytest.approx(0.95, abs=4 * deviation / math.sqrt(len(told)))
    assert min(told) >= -1
    assert max(told) <= 2


def test_a_mixed_federation_is_told_as_it_is():
    budgets = Budgets(enabled=True)
    notes: list[str] = []
    for client, simulated in ((0, 1), (1, 0), (2, 1), (0, 0), (0, 0)):  # a client whose noise was seeded once stays so
        fields = {"epsilon": 1.0 + client, "epsilon-simulated": simulated}
        own = budgets.record(client, fields, 1, lambda client, text: notes.append(text))
    assert own["epsilon_simulated"] == 1
    assert budgets.columns()["epsilon_simulated"] == pytest.approx(2 / 3)
    assert budgets.noise() == {"seed": [0, 2], "operating-system": [1]}
    again = Budgets(enabled=True)
    again.restore(json.loads(json.dumps(budgets.state())))
    assert again.noise() == budgets.noise()
    assert notes == []
    with pytest.raises(ValueError, match=r"^field 'epsilon-simulated' is None"):
        budgets.check({"epsilon": 1.0})


def test_how_gradients_are_made_changes_a_run_by_rounding_alone(federation):
    one_round = DP | {"num_server_rounds": 1}  # the next one's noise depends on the model, to the bit
    runs = [federation(system="fedavg", **one_round, dp_grad_sample=method) for method in ("auto", "hooks")]
    one, other = (run.server for run in runs)
    assert runs[0].sha256 != runs[1].sha256
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) < 1e-4


def test_masked_coordinates_get_no_noise(federation):
    run = federation(system="subfedavg", **DP, subfedavg_gate_split="none", subfedavg_mask_distance=0.0)
    pruned = 0
    for message in run.wiretap.of("train").values():
        for name, mask in message.up.masks.items():
            assert not bool(message.up.tensors[name][~mask].any())
            pruned += int((~mask).sum())
    assert pruned > 0


# --- what is refused --------------------------------------------------------------------------------------------------


NO_COUNTS = {"dp.accuracies": "none", "dp.count-scale": 0.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"system": "subfedavg", **NO_COUNTS},
            ("subfedavg.gate-split", "validation"),
        ),
        ({"system": "dispfl"}, ("dispfl.growth", "gradient")),
        ({"system": "fedfomo"}, ("dp.enabled", True)),
        ({"system": "subfedavg-hy", "model": "cnn-small-bn"}, ("dp.enabled", True)),
        ({"system": "fedcr"}, ("dp.enabled", True)),
        (
            {"system": "fjord", "dp.grad-sample": "hooks"},
            ("dp.grad-sample", "hooks"),
        ),
        (
            {"system": "fedp3", "fedp3.local": "uniform", "dp.grad-sample": "hooks"},
            ("dp.grad-sample", "hooks"),
        ),
        (
            {"system": "fedltp", **NO_COUNTS},
            ("fedltp.validators", "all"),
        ),
        ({"system": "fedavg", "model": "cnn-small-bn"}, ("model", "cnn-small-bn")),
        ({"system": "fedavg", "dp.noise-multiplier": 0.0}, ("dp.noise-multiplier", 0.0)),
        ({"system": "fedavg", "dp.target-epsilon": 3.0}, ("dp.noise-multiplier", 1.0)),
        ({"system": "fedavg", "dp.count-scale": 0.0}, ("dp.count-scale", 0.0)),
        (
            {"system": "fedavg", "test-split": "labels"},
            ("test-split", "labels"),
        ),
        (
            {"system": "fedavg", "test-split": "proportional", "dp.accuracies": "open"},
            ("test-split", "proportional"),
        ),
        (
            {**NO_COUNTS, "system": "subfedavg", "subfedavg.gate-split": "test", "test-split": "labels"},
            ("subfedavg.gate-split", "test"),
        ),
        (
            {"system": "fedavg", "augmentation": "crop-flip", "dp.secure-rng": True},
            ("augmentation", "crop-flip"),
        ),
        ({"system": "fedavg", "dp.ledger-dir": "here"}, ("dp.ledger-dir", "here")),
        ({"system": "fedavg", "dp.delta": 0.0}, ("dp.delta", 0.0)),
    ],
)
def test_what_would_leak_is_refused_on_one_line_that_says_what_is_allowed(settings, said):
    key, value = said
    with pytest.raises(ConfigError, match=f"(?i)^{key} is '?{value}") as caught:
        prepare(RunInputs({"dp.enabled": True, "dp.noise-multiplier": 1.0, **settings}))
    assert "\n" not in str(caught.value)


def test_every_system_has_decided_whether_it_can_be_private():
    undecided = "nobody has examined what it releases"
    config = parse_config({"dp.enabled": True, "dp.noise-multiplier": 1.0})
    assert {name for name, of in SYSTEMS.items() if undecided in of.client.why_not_private(config)} == set()
    assert set(ADMISSIBLE) | {"subfedavg-hy", "fedfomo", "fedcr", "dpsgd-ft", "fedspallm"} == set(SYSTEMS)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_a_gate_asks_for_noised_counts_and_each_is_charged(federation):
    run = federation(system="subfedavg", **DP, dp_count_scale=2.0, subfedavg_mask_distance=0.0)
    spent = [ledger(run, partition).spent for partition in range(4)]
    for partition, of in enumerate(spent):
        asked = sum(partition in trained_in(run, round) for round in (1, 2))
        assert of.get(Laplace(2.0, 1.0), 0) == asked
    assert sum(of.get(Laplace(2.0, 1.0), 0) for of in spent) == 4


def test_noised_evaluations_are_charged_and_are_counts(federation):
    run = federation(system="standalone", **DP | {"dp_accuracies": "noised"}, dp_count_scale=3.0)
    last = run.rows(2)
    for partition in range(4):
        # personal and validation accuracy at each evaluation, from the cache where the model has not changed
        models = 1 + sum(partition in trained_in(run, round) for round in (1, 2))
        first = 1 if partition in trained_in(run, 1) else 0
        assert ledger(run, partition).spent[Laplace(3.0, 1.0)] == 2 * (models - first)
        assert 0 <= last[partition]["accuracy_personal"] <= 1
        assert last[partition]["epsilon"] == pytest.approx(ledger(run, partition).epsilon(DELTA))


@pytest.mark.parametrize("system", in_test(ADMISSIBLE, "fedp3"))
def test_an_evaluation_pays_for_what_it_tells_and_for_nothing_else(federation, tmp_path, system):
    settings = {**DP, "num_server_rounds": 1, "dp_accuracies": "noised", "dp_count_scale": 4.0, **ADMISSIBLE[system]}
    run = federation(system=system, **settings)
    client = SYSTEMS[system].client(run.config, NodeContext(0, 4, tmp_path))
    for partition, row in run.rows(1).items():
        kinds = [f"accuracy_{kind}" for kind in ("personal", "received", "global", "validation")]
        told = {name: row[name] for name in kinds if row[name] is not None}
        of_one_model = told.keys() >= {*kinds} and (row["density"] == 1 or system == "fedltp")
        spent = ledger(run, partition).spent[Laplace(4.0, 1.0)]
        assert spent == len(told) - of_one_model >= 2
        assert spent <= client.planned_releases().evaluation_counts


def test_seeded_noise_is_other_noise_with_another_setting_of_the_system(federation):
    """With equal noise the difference of two releases would tell of the data what the noise should hide."""
    settings = {"system": "fedprox", **DP, "num_server_rounds": 1, "dp_noise_multiplier": 50.0}
    models = [federation(**settings, fedprox_mu=mu).server for mu in (0.01, 0.02)]
    assert sum(float((models[0][name] - models[1][name]).norm()) for name in models[0]) > 1


def test_without_accuracies_none_is_told(federation):
    run = federation(system="dispfl", **DP | {"dp_accuracies": "none"}, **ADMISSIBLE["dispfl"])
    assert run.info["status"] == "completed"
    assert {row[name] for row in run.clients for name in row if name.startswith("accuracy")} == {None}


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_client_stops_before_its_budget_and_the_run_goes_on_without_it_until_nobody_is_left(federation):
    budget = cost(ROUND_STEPS) * 1.01  # one round each
    run = federation(system="fedavg", **DP | {"num_server_rounds": 9}, dp_epsilon_budget=budget)
    assert run.info["status"] == "completed"
    assert run.info["rounds_completed"] == 3
    asked = [trained_in(run, round) for round in (1, 2, 3)]  # each time half of those who have some left
    assert sorted(len(who) for who in asked) == [1, 1, 2]
    assert set.union(*asked) == {0, 1, 2, 3}
    assert [row["budgets_spent"] for row in run.rounds] == [2, 3, 4]
    assert all(0 < ledger(run, partition).epsilon(DELTA) <= budget for partition in range(4))
    assert run.rounds[-1]["accuracy_global"] is not None  # the last round is evaluated, early as it came


def test_a_run_that_its_budgets_have_ended_is_whole_and_charges_nothing_more(federation):
    budget = cost(ROUND_STEPS) * 1.01
    run = federation(system="fedavg", fresh=True, **DP | {"num_server_rounds": 9}, dp_epsilon_budget=budget)
    before = {path: path.read_bytes() for path in run.folder.rglob("*.json*") if path.is_file()}
    given = {"out": run.folder, "resume": True, "engine": "inprocess", "progress": False}
    assert fedprune_app.run(**given).info["rounds_completed"] == 3
    assert {path: path.read_bytes() for path in run.folder.rglob("*.json*") if path.is_file()} == before


@pytest.mark.full
@pytest.mark.parametrize("budget", [3.1, 3.9, 4.1])
def test_the_last_evaluation_asks_all_clients_also_where_it_spends_the_last_budgets(federation, budget):
    settings = DP | NOISED | {"num_server_rounds": 9, "evaluate_every": 1, "evaluate_clients": 1}
    run = federation(**settings, clients=3, dp_epsilon_budget=budget)
    assert run.rounds[-1]["evaluated"] == 3


def test_what_a_private_evaluation_costs_is_recorded_however_few_reply(federation, monkeypatch, tmp_path):
    evaluation = FedAvgClient.evaluation
    settings = DP | NOISED | {"num_server_rounds": 1, "fraction_train": 1.0, "min_replies": 3, "fresh": True}

    def failing(self, task, state):
        if self.client_id == 0:
            raise RuntimeError("lost")
        return evaluation(self, task, state)

    with monkeypatch.context() as patched:
        patched.setattr(FedAvgClient, "evaluation", failing)
        with pytest.raises(TooFewReplies, match=r"had 2 good replies.*lost"):
            federation(**settings, clients=3, out_dir=str(tmp_path))
    spent = {path: path.read_bytes() for path in tmp_path.rglob("ledger.jsonl")}
    run = federation(**settings, clients=3, resume_from=str(tmp_path))
    (row,) = run.rounds
    assert (run.info["status"], row["evaluated"], row["evaluation_failures"]) == ("completed", 2, 1)
    assert row["accuracy_personal_mean"] is not None
    assert row["epsilon_max"] == pytest.approx(max(ledger(run, k).epsilon(DELTA) for k in (1, 2)))
    assert {path: path.read_bytes() for path in tmp_path.rglob("ledger.jsonl")} == spent
    assert any("final_sha256 is without its final model" in line for line in run.info["losses"])


def test_a_budget_that_no_round_fits_in_stops_the_run_and_spends_nothing(federation, tmp_path):
    with pytest.raises(TooFewReplies, match=r"the privacy budget is 0\.01 at delta 0\.001, 0 of it are spent"):
        federation(system="fedavg", **DP, dp_epsilon_budget=0.01, out_dir=str(tmp_path))
    assert not Ledger(tmp_path / "clients" / "00000" / "ledger.jsonl").spent


def test_fine_tuning_stops_with_the_budget_too(federation):
    budget = cost(2 * ROUND_STEPS) * 1.01
    run = federation(system="fedavg-ft", **DP, dp_epsilon_budget=budget)
    assert all(ledger(run, partition).epsilon(DELTA) <= budget for partition in range(4))
    assert all(row["accuracy_personal"] is not None for row in run.rows(2).values())


@pytest.mark.full
def test_a_target_is_reached_by_those_who_join_every_round_and_passed_by_nobody(federation):
    settings = DP | {"dp_noise_multiplier": 0.0, "dp_target_epsilon": 3.0}
    run = federation(system="fedavg", fraction_train=1.0, clients=2, **settings)
    assert run.info["rounds_completed"] == 2
    spent = [row["epsilon"] for row in run.rows(2).values()]
    assert all(2.98 < value <= 3.0 for value in spent)


GATE = {"system": "subfedavg", "dp_count_scale": 2.0, "subfedavg_mask_distance": 0.0}
NOISED = {"system": "fedavg", "dp_accuracies": "noised", "shard_size": 0}
TARGET = DP | {"num_server_rounds": 3, "fraction_train": 1.0, "dp_noise_multiplier": 0.0, "dp_target_epsilon": 3.0}


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        (GATE, 3),
        (NOISED | {"dp_count_scale": 12.0}, 3 * 3),
        (NOISED | {"system": "fedavg-ft", "dp_count_scale": 12.0, "evaluate_every": 2}, 2 * 3),
    ],
    ids=["gate", "evaluations", "fine-tuning"],
)
def test_a_target_counts_what_will_be_counted(federation, settings, counts):
    """All planned rounds and evaluations fit in it, and not much is left."""
    run = federation(clients=2, **TARGET | settings)
    assert [row["round"] for row in run.rounds] == [1, 2, 3]
    assert all((row["replies"], row["failures"], row.get("evaluation_failures", 0)) == (2, 0, 0) for row in run.rounds)
    for partition in range(2):
        spent = ledger(run, partition).spent
        assert sum(number for release, number in spent.items() if isinstance(release, Laplace)) == counts
        assert 2.4 < ledger(run, partition).epsilon(DELTA) <= 3.0
        assert run.rows(3)[partition]["accuracy_personal"] is not None


def test_a_client_that_cannot_pay_for_its_gate_does_not_train(federation, tmp_path):
    budget = min(cost(ROUND_STEPS, k) for k in range(4)) * 1.01  # the steps, but not the count after them
    with pytest.raises(TooFewReplies, match="no client could afford to train; first reason: the privacy budget is"):
        federation(**DP | GATE, dp_epsilon_budget=budget, fraction_train=1.0, out_dir=str(tmp_path))
    assert not any(Ledger(path).spent for path in tmp_path.glob("clients/*/ledger.jsonl"))


@pytest.mark.full
def test_an_evaluation_leaves_out_what_the_budget_does_not_bear(federation):
    settings = DP | NOISED | {"dp_count_scale": 1.0, "num_server_rounds": 6, "fraction_train": 1.0}
    run = federation(**settings | {"dp_noise_multiplier": 4.0, "dp_epsilon_budget": 3.0})
    assert run.info["status"] == "completed"
    assert all((row["failures"], row["evaluation_failures"]) == (0, 0) for row in run.rounds)
    told = [name for row in run.clients for name in row if name.startswith("accuracy") and row[name] is not None]
    missing = [name for row in run.clients for name in row if name.startswith("accuracy") and row[name] is None]
    assert told
    assert missing
    assert [row["replies"] for row in run.rounds] == [4] * 6
    assert all(2.0 < ledger(run, partition).epsilon(DELTA) <= 3.0 for partition in range(4))


@pytest.mark.full
def test_a_mean_of_the_accuracies_that_some_clients_could_pay_says_of_how_many(federation):
    settings = DP | NOISED | {"dp_count_scale": 2.0, "num_server_rounds": 4, "fraction_train": 0.5}
    run = federation(**settings | {"dp_noise_multiplier": 4.0, "dp_epsilon_budget": 3.0})
    few = 0
    for row in run.rounds:
        of_round = [each for each in run.clients if each["round"] == row["round"]]
        for column, name in (("accuracy_personal_mean", "accuracy_personal"), ("accuracy_global", "accuracy_global")):
            telling = [each for each in of_round if each.get(name) is not None]
            some = 0 < len(telling) < 4
            few += some
            assert (row.get("clients_by_column") or {}).get(column) == (len(telling) if some else None)
            if some:
                noise = math.hypot(*(each["accuracy_noise"] for each in telling)) / len(telling)
                assert row["noise_by_column"][column] == pytest.approx(noise)
    assert few


@pytest.mark.parametrize(("system", "more"), [("dispfl", {"dispfl_growth": "random"}), full("dpsgd", {})])
def test_the_test_of_a_start_takes_nothing_of_what_the_training_after_it_needs(federation, system, more):
    """Two rounds of training use the budget up. The second round ends with an evaluation, which would come first."""
    settings = DP | NOISED | {"system": system, "fraction_train": 1.0, "evaluate_every": 2} | more
    config = parse_config({**TINY, **{config_key(name): value for name, value in settings.items()}})
    budget = max(epsilon({step_of(config, k): 2 * ROUND_STEPS}, DELTA) for k in range(4)) * 1.0001
    run = federation(**settings, dp_epsilon_budget=budget)
    assert [(row["replies"], row["failures"]) for row in run.rounds] == [(4, 0), (4, 0)]
    for partition in range(4):
        steps = [number for release, number in ledger(run, partition).spent.items() if isinstance(release, Steps)]
        assert steps == [2 * ROUND_STEPS]


@pytest.mark.full
def test_whoever_has_too_few_examples_declines_and_holds_up_nobody(federation):
    """Fewer examples are sampled more often each. A round in which nobody can pay leaves the model as it is."""
    settings = {"partition": "dirichlet-class", "dirichlet_alpha": 0.1, "samples_per_client": 60, "shard_size": 0}
    settings |= DP | {"system": "fedavg", "fraction_train": 0.25, "num_server_rounds": 12, "evaluate_every": 0}
    run = federation(
        **settings, dp_epsilon_budget=2.5, dp_accountant="rdp"
    )  # two for the second client, none for others
    assert run.info["status"] == "completed"
    assert sorted(row["replies"] for row in run.rounds) == [0, 0, 0, 1, 1]
    assert all(row["failures"] == 0 for row in run.rounds)
    assert ledger(run, 1).spent == {step_of(run.config, 1): 2 * ROUND_STEPS}
    assert not any(ledger(run, partition).spent for partition in (0, 2, 3))
    assert run.rounds[-1]["budgets_spent"] == 4
    sent = [next(iter(run.wiretap.of("train", round).values())).down.digest() for round in range(1, 6)]
    for row, before, after in zip(run.rounds, sent, sent[1:], strict=False):
        assert (before == after) == (row["replies"] == 0)
        assert row["replies"] or "the privacy budget is 2.5 at delta 0.001, 0 of it are spent" in row["notes"][0]


def test_a_score_that_cannot_be_paid_is_no_failure(federation):
    settings = {"system": "fedltp", "fedltp_tickets": 1, "fedltp_ticket_iterations": 5, "fraction_train": 0.25}
    settings |= DP | {"dp_count_scale": 1.0, "num_server_rounds": 8}
    budget = 1.01 * max(epsilon({step(k): ROUND_STEPS, Laplace(1.0, 1.0): 1}, DELTA) for k in range(4))
    run = federation(**settings, dp_epsilon_budget=budget)
    assert run.info["status"] == "completed"
    assert all(row["failures"] == 0 for row in run.rounds)
    assert run.rounds[-1]["budgets_spent"] == 4
    assert all(0 < ledger(run, partition).epsilon(DELTA) <= budget for partition in range(4))


def test_a_private_round_whose_evaluation_fails_is_kept(federation, tmp_path, monkeypatch):
    """It was paid for: a resumed run must not repeat it."""
    settings = DP | {"system": "fedavg", "fraction_train": 1.0, "fresh": True}

    def evaluate(self, parameters, config):
        raise ValueError("no power")

    with monkeypatch.context() as patched:
        patched.setattr(ImageClient, "evaluate", evaluate)
        with pytest.raises(TooFewReplies, match="no power"):
            federation(**settings, out_dir=str(tmp_path))
    run = federation(**settings, resume_from=str(tmp_path))
    assert [row["round"] for row in run.rounds] == [1, 2]
    assert all(ledger(run, partition).spent == {step(partition): 2 * ROUND_STEPS} for partition in range(4))


# --- never forgotten --------------------------------------------------------------------------------------------------


def test_a_round_that_is_repeated_is_charged_again_and_gives_the_same_bits(federation):
    run = federation(system="dispfl", fresh=True, **DP, **ADMISSIBLE["dispfl"])
    before = [ledger(run, partition).spent for partition in range(4)]
    for name in ("round-00002.safetensors",):
        (run.folder / "checkpoints" / name).unlink()
    again = federation(system="dispfl", fresh=True, resume_from=str(run.folder), **DP, **ADMISSIBLE["dispfl"])
    assert again.sha256 == run.sha256
    for partition in range(4):
        repeated = ROUND_STEPS if partition in trained_in(run, 2) else 0
        assert (
            ledger(again, partition).spent.get(step(partition), 0)
            == before[partition].get(step(partition), 0) + repeated
        )
    assert again.rounds[-1]["epsilon_max"] > run.rounds[0]["epsilon_max"]


def test_a_client_whose_ledger_is_gone_trains_no_more(federation):
    run = federation(system="standalone", fresh=True, fraction_train=1.0, **DP)
    (run.folder / "clients" / "00001" / "ledger.jsonl").unlink()
    settings = DP | {"num_server_rounds": 3}
    again = federation(system="standalone", fresh=True, fraction_train=1.0, resume_from=str(run.folder), **settings)
    assert again.rounds[-1]["failures"] == 1
    assert (
        "holds 0 charges and epsilon 0 by RDP, the client's state knows of 2 and"
        in again.rounds[-1]["failure_reasons"][0]
    )


def test_a_client_that_lost_ledger_and_state_trains_no_more(federation):
    settings = DP | {"system": "fedavg", "fresh": True, "fraction_train": 1.0}
    run = federation(**settings)
    shutil.rmtree(run.folder / "clients" / "00001")
    more = {"num_server_rounds": 3, "resume_from": str(run.folder)}
    with refuses("the run", where="client 1: state file"):
        federation(**settings | more)
    again = federation(**settings | more, accept_loss=True)
    last = again.rounds[-1]
    assert (last["round"], last["replies"], last["failures"], last["evaluation_failures"]) == (3, 3, 1, 1)
    told = f"{run.rows(2)[1]['epsilon_rdp']:.4g}"
    assert (
        f"and epsilon 0 by RDP, the client's state knows of 0 and the client has told {told}: what was spent is"
        in (last["failure_reasons"][0])
    )
    assert not ledger(again, 1).spent


def test_the_folder_of_the_ledgers_cannot_change_on_a_resume():
    config = parse_config({"dp.enabled": True, "dp.noise-multiplier": 1.0, "state-dir": "/there"})
    with refuses("state-dir", "/there"):
        check_resumable({**config.to_dict(), "state-dir": "/here"}, config)
    open_config = parse_config({"state-dir": "/there"})
    check_resumable({**open_config.to_dict(), "state-dir": "/here"}, open_config)


@pytest.mark.full
def test_a_ledger_is_of_one_dealing_of_the_data_and_another_dealing_has_another(federation, tmp_path):
    """Two seeds deal the same client other examples, so what one run spends is no spend of the other's examples."""
    settings = {"system": "standalone", "fraction_train": 1.0, **DP, "dp_ledger_dir": str(tmp_path)}
    federation(seed=0, **settings)
    (first,) = tmp_path.glob("00002-*.jsonl")
    federation(seed=1, **settings)
    (second,) = set(tmp_path.glob("00002-*.jsonl")) - {first}
    run = federation(seed=0, **settings, learning_rate=0.01)
    assert len(list(tmp_path.glob("00002-*.jsonl"))) == 2
    assert Ledger(first).spent == {step(2): 2 * 2 * ROUND_STEPS}
    assert run.rows(2)[2]["epsilon"] == pytest.approx(cost(4 * ROUND_STEPS, 2))
    assert sum(Ledger(second).spent.values()) == 2 * ROUND_STEPS
    first_line = first.read_text().splitlines()[0]
    assert "client 2 of 4, digits dealt by shards with seed 0" in first_line


def test_a_ledger_of_other_data_is_refused_in_one_line(federation, tmp_path):
    run = federation(system="standalone", fraction_train=1.0, fresh=True, **DP)
    files = [run.folder / "clients" / f"{k:05d}" / "ledger.jsonl" for k in (1, 2)]
    shutil.copy(files[1], files[0])
    more = DP | {"num_server_rounds": 3, "resume_from": str(run.folder)}
    whose = r"00001/ledger.jsonl' is of other data \(client 2 of 4, digits dealt by shards with seed 0\), allowed: "
    with pytest.raises(TooFewReplies, match=whose) as error:
        federation(system="standalone", fraction_train=1.0, fresh=True, **more)
    assert "\n" not in str(error.value)


def test_the_ledger_is_written_before_the_state_and_the_reply(federation, monkeypatch):
    """At the moment a client saves its state, what it is made of has been charged."""
    from fedprune_app.engine.store import VersionedStore

    seen = []
    real = VersionedStore.save

    def save(self, round, state, accepted=None, **how):
        path = self.folder / "ledger.jsonl"
        if path.exists():
            seen.append((state.meta["charges"], len(path.read_bytes().splitlines()) - 1))  # the first names the data
        real(self, round, state, accepted, **how)

    monkeypatch.setattr(VersionedStore, "save", save)
    federation(system="ditto", fresh=True, **DP, **ADMISSIBLE["ditto"])
    assert len(seen) == 4
    assert all(known == written == 2 * math.ceil(written / 2) for known, written in seen)
