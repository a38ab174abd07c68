"""Runs on a deployment of real processes, for tests: started, watched, finished, and compared with this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flwr.clientapp import ClientApp

from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.launching import processes, simulation
from fedprune_app.launching.local import Deployment, local_deployment

SETTINGS = {"num-server-rounds": 2, "local-epochs": 1, "fraction-train": 1.0, "evaluate-every": 0, "min-replies": 1}
PATIENCE_SECONDS = 900.0  # for what takes half a minute on a quiet machine


def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for it; however slow the machine, not for ever."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@contextmanager
def nodes_with_the_app(folder: Path, num_nodes: int) -> Iterator[Deployment]:
    """A deployment whose nodes share the data and may draw from the run's seed, and the app to submit to it.

    Data that is not embedded is in ``folder/data``.
    """
    shared = {"num-partitions": num_nodes, "secure-rng": False, "data-dir": str(folder / "data")}
    nodes = [{"partition-id": k, **shared} for k in range(num_nodes)]
    with local_deployment(folder, nodes) as running:
        simulation.stage_app(folder / "app")
        yield running


@dataclass
class DeployedRun:
    """One run on a deployment, with its folder on this machine."""

    deployment: Deployment
    out: Path
    config: dict
    run_id: str
    recorded: dict[int, float] = field(default_factory=dict)  # round -> time.time() when its record was seen

    @classmethod
    def start(cls, deployment: Deployment, out: Path, app: str = "app", **settings) -> DeployedRun:
        """``settings`` are run-config keys, ``_`` for ``-``; ``app`` is a staged app's folder in the deployment's."""
        named = {key.replace("_", "-"): value for key, value in settings.items()}
        nodes = sum(name.startswith("node-") for name in deployment.processes)
        values = {**SETTINGS, "min-clients": nodes, **named, "out-dir": str(out)}
        config = parse_config(values).to_dict()
        return cls(deployment, out, config, processes.submit(deployment.link, deployment.folder / app, config))

    def resume(self) -> DeployedRun:
        """The same run once more, from its folder."""
        config = {**self.config, "resume-from": str(self.out)}
        app = self.deployment.folder / "app"
        return DeployedRun(self.deployment, self.out, config, processes.submit(self.deployment.link, app, config))

    @property
    def rounds(self) -> list[dict]:
        """What is recorded; a line that is being written is not."""
        try:
            lines = (self.out / "rounds.jsonl").read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
        for row in rows:
            self.recorded.setdefault(row["round"], time.time())
        return rows

    @property
    def info(self) -> dict:
        return json.loads((self.out / "run.json").read_text())

    def until_round(self, round: int) -> None:
        """Wait until it is recorded."""
        until(lambda: any(row["round"] >= round for row in self.rounds))

    def end(self) -> str:
        """Wait for the end, and return Flower's word for how it was."""
        return processes.follow(self.deployment.link, self.run_id, self.out, lambda: self.rounds and None)

    def finish(self) -> dict:
        """Wait for a good end; run.json."""
        status = self.end()
        assert (status, self.info["status"]) == ("finished:completed", "completed"), self.info.get("error")
        return self.info

    def failed(self, client: int) -> list[int]:
        """The rounds in which this client's reply did not count."""
        return [
            row["round"]
            for row in self.rounds
            if any(text.startswith(f"client {client}:") for text in row["failure_reasons"])
        ]

    def recovery(self, since: float, client: int | None = None) -> float:
        """Seconds until a round was recorded in which the client's reply counted, or with None any round."""
        lost = set() if client is None else set(self.failed(client))
        return min(when for round, when in self.recorded.items() if when > since and round not in lost) - since


def in_process_sha256(config: dict, out: Path, nodes: int, app: ClientApp | None = None) -> str:
    """``final_sha256`` of the same run with so many clients in this process."""
    run_in_process(server_app.app, app or client_app.app, nodes, {**config, "out-dir": str(out), "resume-from": ""})
    return json.loads((out / "run.json").read_text())["final_sha256"]
