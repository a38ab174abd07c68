"""DA-DPFL: with one wave it is Dis-PFL, with one client in a wave gossip in turn; and it prunes by the PQ index."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fedprune_app.core import rng
from fedprune_app.testing import check_system, run_with
from tests.gallery import federations as small

pytestmark = pytest.mark.usefixtures("no_plugins")


def test_with_one_wave_and_no_pruning_it_is_dispfl(tmp_path):
    settings = {"density": 0.4, "dispfl__topology": "full", "num_server_rounds": 4}
    ours = small.run(tmp_path / "ours", "dadpfl", dadpfl__waves=1, dadpfl__least_density=1.0, **settings)
    theirs = {**small.settings_of("dadpfl", **settings), "system": "dispfl"}
    del theirs["plugins"]
    assert ours.sha256 == run_with(theirs, tmp_path / "theirs", clients=small.CLIENTS).sha256


def test_clients_prune_where_dispfl_replaces_no_weight(tmp_path):
    settings = {"density": 0.5, "dispfl__prune_rate": 0.0, "dadpfl__threshold": 10.0, "num_server_rounds": 5}
    finished = small.run(tmp_path, "dadpfl", **settings)
    assert finished.rounds[-1]["density_mean"] < 0.9 * finished.rounds[0]["density_mean"]


def test_with_one_client_in_a_wave_clients_average_what_others_made_just_now(tmp_path):
    settings = {
        "density": 1.0,
        "dispfl__topology": "full",
        "dadpfl__waves": small.CLIENTS,
        "dadpfl__least_density": 1.0,
        "num_server_rounds": 3,
    }
    config = small.config_of("dadpfl", **settings)
    finished = small.run(tmp_path, "dadpfl", **settings)
    model, examples = small.network(config), small.examples(config)
    newest = {}
    for number in range(1, config.num_server_rounds + 1):
        order = rng.numpy_generator(config.seed, "waves", round=number).permutation(small.CLIENTS).tolist()
        for client in order:
            known = list(newest.values()) or [small.parameters(model)]
            tensors = small.mean(known, [1] * len(known))
            for _ in range(config.local_epochs):
                slope = small.gradients(model, tensors, *examples[client])
                tensors = {name: t - config.learning_rate * slope[name] for name, t in tensors.items()}
            newest[client] = tensors
    for client, tensors in newest.items():
        assert small.close(small.state_of(finished, client, "weights"), tensors)


def test_the_pq_index_says_how_many_weights_go():
    method = small.loaded("dadpfl")
    weights = torch.tensor([3.0, -1.0, 0.5, 0.25])
    p, q, d = 0.5, 1.0, 4
    norms = [sum(abs(float(w)) ** power for w in weights) ** (1 / power) for power in (p, q)]
    index = 1 - d ** (1 / q - 1 / p) * norms[0] / norms[1]
    bound = math.ceil(d * (1 - index) ** (p * q / (q - p)))
    kept = method.without_smallest(torch.cat([weights, torch.zeros(2)]), torch.tensor([True] * 4 + [False] * 2))
    assert kept.tolist() == [i < bound for i in range(6)]
    even = torch.ones(10, dtype=torch.bool)
    assert bool(method.without_smallest(torch.ones(10), even).all())


@pytest.mark.parametrize("decided", [1, 2, 7, 40])
def test_clients_prune_in_the_rounds_of_the_released_schedule(decided):
    """It counts rounds from 0. Its first gap is the round that decided, 20 more are each the one before over 1.3."""
    gaps = [decided]
    for _ in range(20):
        gaps.append(round(gaps[-1] / 1.3))
    expected, total = [], 0
    for gap in gaps:
        total += gap
        expected.append(total + 2)  # the round after that one, counted from 1
    strategy = SimpleNamespace(began=decided + 2)
    assert small.loaded("dadpfl").DADPFL.pruning_rounds(strategy) == expected


def test_a_move_is_counted_from_the_pruned_initial_model(tmp_path):
    settings = {"density": 0.3, "dispfl__topology": "full", "num_server_rounds": 1}
    finished = small.run(tmp_path, "dadpfl", **settings)
    initial = small.parameters(small.network(small.config_of("dadpfl", **settings)))
    for client in range(small.CLIENTS):
        weights, masks = (small.state_of(finished, client, group) for group in ("weights", "masks"))
        distance = sum(float((t - initial[n] * masks.get(n, torch.ones(()))).norm()) for n, t in weights.items())
        assert small.meta_of(finished, client)["first"] == pytest.approx(distance, rel=1e-5)


def test_all_clients_train_in_a_phase_after_the_last_round(tmp_path):
    finished = small.run(tmp_path, "dadpfl", density=0.4, dadpfl__waves=3, last_phase=True)
    after = [row["accuracy_last_phase"] for row in finished.clients if "accuracy_last_phase" in row]
    assert len(after) == small.CLIENTS
    assert None not in after


def test_half_of_those_that_train_decide_when_pruning_begins(tmp_path):
    settings = {"dispfl__topology": "full", "num_server_rounds": 12, "fraction_train": 0.5, "dadpfl__threshold": 1e6}
    densities = [row["density_mean"] for row in small.run(tmp_path, "dadpfl", density=0.8, **settings).rounds]
    assert densities[0] > densities[-1]


@pytest.mark.full
def test_models_become_sparser_when_they_hardly_move_and_not_below_the_least_density(tmp_path):
    settings = {"density": 0.8, "dispfl__topology": "full", "num_server_rounds": 8, "dadpfl__least_density": 0.3}
    rounds = small.run(tmp_path, "dadpfl", dadpfl__threshold=10.0, **settings).rounds
    densities = [row["density_mean"] for row in rounds]
    assert densities[0] == densities[2] > densities[-1] > 0.05
    assert sorted(densities, reverse=True) == densities
    assert all(row["change_mean"] is not None for row in rounds[1:])


@pytest.mark.full
def test_it_keeps_the_laws():
    settings = {"density": 0.5, "dispfl.neighbours": 2, "dadpfl.waves": 2, "dadpfl.threshold": 10.0}
    check_system("dadpfl", plugins=str(small.GALLERY / "dadpfl.py"), settings=settings)
