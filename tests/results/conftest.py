"""Made-up runs for the tests of this folder; their numbers mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedprune_app.results.recorder import Recorder
from fedprune_app.results.similarity import label_cosine

LAYERS = ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight", "fc3.weight")


def made_up_run(
    folder: Path,
    system: str = "subfedavg",
    seed: int = 0,
    *,
    rounds: int = 10,
    clients: int = 20,
    plateau: float = 0.8,
    density: float = 0.5,
    headline: str = "accuracy_personal_mean",
    status: str = "completed",
    error: str | None = None,
    config: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    peers: bool = False,
    noise: float = 0.0,
    simulated: float = 1.0,
    accuracy_noise: float | None = None,
) -> Path:
    """A run folder written by the real recorder, with curves that look like training.

    With ``peers`` the clients exchange models with one another, differ in density and have their masks compared. With
    ``noise`` they spend privacy, each in the rounds it trains in; ``simulated`` is the share with seeded noise, and
    ``accuracy_noise`` the standard deviation of the noise in the mean of their accuracies.
    """
    rng = np.random.default_rng([seed, *system.encode(errors="replace")])
    recorder = Recorder(folder)
    settings = {"system": system, "dataset": "digits", "partition": "shards", "seed": seed, "learning-rate": 0.01}
    dealer = np.random.default_rng(seed)  # systems that are compared share their data
    counts = [dealer.multinomial(60, dealer.dirichlet(np.full(10, 0.3))) for _ in range(clients)]
    partition = [
        {"partition": i, "train": train, "validation": train // 10, "test": train // 5}
        for i, train in enumerate(counts)
    ]
    about = {
        "headline": headline,
        "partition": partition,
        "model": {"name": "lenet5", "parameters": 44426, "classes": 10},
    }
    recorder.start({**settings, **(config or {})}, seed, about | (extra or {}))
    skill = rng.normal(0, 0.07, clients)
    joined = np.zeros(clients)
    for number in range(1, rounds + 1):
        progress = 1 - np.exp(-4 * number / rounds)
        kept = 1 - (1 - density) * progress
        size = 1.7e6 * kept
        row: dict[str, Any] = {
            "round": number,
            "seconds": 1.9,
            "replies": 10,
            "failures": int(number % 9 == 0),
            "stragglers": 0,
            "bytes_up": int(size),
            "bytes_down": int(size * 1.1),
            "paper_bytes_up": int(size * 0.96),
            "paper_bytes_down": 1_777_040,
            "busiest_node_bytes": int(size * 1.1),
            "flops": 4e9 * kept,
            "loss_mean": 2.2 * (1 - progress) + 0.2 + rng.normal(0, 0.02),
        }
        if peers:
            row |= {
                "paper_bytes_up": None,
                "paper_bytes_down": None,
                "peer_bytes": int(size),
                "busiest_node_bytes": int(size / 7),
                "node_bytes_mean": size / 9,
                "paper_busiest_bytes": size / 8,
                "dropped": number % 3,
            }
        trained = {int(client): {"seconds": 0.4} for client in rng.choice(clients, clients // 2, replace=False)}
        if number % 2 == 0 or number == rounds:
            personal = np.clip(0.1 + (plateau - 0.1) * progress + skill + rng.normal(0, 0.01, clients), 0, 1)
            row |= {
                "accuracy_personal_mean": personal.mean(),
                "accuracy_personal_std": personal.std(),
                "accuracy_personal_worst_decile": np.sort(personal)[: -(-clients // 10)].mean(),
                "accuracy_received_mean": personal.mean() * 0.9,
                "accuracy_validation_mean": personal.mean() + rng.normal(0, 0.01),
                "accuracy_global": personal.mean() * 0.8 if headline == "accuracy_global" else None,
                "density_mean": kept,
                "density_by_layer": {name: min(1.0, kept * (1.5 - 0.2 * i)) for i, name in enumerate(LAYERS)},
            }
            for client in range(clients):
                own = {"accuracy_personal": personal[client], "density": 0.2 * (1 + client % 5) if peers else kept}
                if headline == "accuracy_global":
                    own["accuracy_global"] = personal[client] * 0.8
                if peers:
                    own["accuracy_by_class"] = {str(label): personal[client] for label in range(client % 5 + 1)}
                    own["density_by_layer"] = dict.fromkeys(LAYERS, own["density"])
                trained.setdefault(client, {}).update(own)
        if noise:
            joined += np.isin(np.arange(clients), [client for client, more in trained.items() if "seconds" in more])
            epsilons = np.sqrt(joined) / noise
            row |= {"epsilon_max": epsilons.max(), "epsilon_simulated": simulated, "accuracy_noise": accuracy_noise}
            for client, more in trained.items():
                more["epsilon"] = epsilons[client] if joined[client] else None
        recorder.clients({"round": number, "partition": i} | more for i, more in sorted(trained.items()))
        recorder.round(row)
    if peers:
        recorder.masks(range(clients), mask_distances(np.array(counts), rng), {0: [1, 2], 3: [0]})
    recorder.finish(status, final_sha256="ab" * 32 if status == "completed" else None, error=error)
    return folder


def mask_distances(counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Made-up distances, the smaller the more alike two clients' label counts are."""
    noise = rng.normal(0, 0.01, (len(counts), len(counts)))
    distance = np.clip(0.45 - 0.2 * label_cosine(counts.tolist()) + noise, 0, 1)
    distance = np.triu(distance, k=1)
    return distance + distance.T


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run(name, system, seed, ...)`` writes a made-up run to ``tmp_path / name``."""
    return lambda name, *args, **kwargs: made_up_run(tmp_path / name, *args, **kwargs)


@pytest.fixture(scope="session")
def six(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three settings of one system, another system with two seeds, and a run that failed; to be read only."""
    place = tmp_path_factory.mktemp("six")
    rates = [made_up_run(place / f"s{rate}", config={"subfedavg.target-rate": rate}) for rate in (30.0, 50.0, 70.0)]
    seeds = [made_up_run(place / f"f{seed}", "fedavg", seed, headline="accuracy_global") for seed in (0, 1)]
    return [
        *rates,
        *seeds,
        made_up_run(place / "broken", "fedltp", rounds=3, status="failed", error="client 3 sent NaN"),
    ]


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A peer-to-peer run of two seeds and one in a star; to be read only."""
    place = tmp_path_factory.mktemp("peers")
    seeds = [made_up_run(place / f"p{seed}", "dispfl", seed, peers=True, rounds=4) for seed in (0, 1)]
    return [*seeds, made_up_run(place / "star", "fedavg", rounds=4)]
