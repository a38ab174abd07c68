"""Shared fixtures: real federations in this process, on the embedded digits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.engine.inprocess import run_in_process

Tamper = Callable[[Message, Message, int], Message]  # (request, honest reply, partition) -> what is sent

SMALL = {
    "num-server-rounds": 3,
    "local-epochs": 2,
    "fraction-train": 0.5,
    "evaluate-every": 1,
    "shards-per-client": 2,
}
"""Settings of the quick runs: 6 clients of 240 digits each."""


@dataclass(frozen=True)
class Finished:
    """A run folder, read."""

    folder: Path

    @property
    def info(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "rounds.jsonl").read_text().splitlines()]

    @property
    def clients(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "clients.jsonl").read_text().splitlines()]

    @property
    def sha256(self) -> str:
        return self.info["final_sha256"]


def wrapped_app(train: Callable[..., Message]) -> ClientApp:
    """The real ClientApp, but training messages go to ``train(message, context, honest)``."""
    app = ClientApp()
    app.query()(client_app.query)
    app.evaluate()(client_app.evaluate)
    app.train()(lambda message, context: train(message, context, client_app.train))
    return app


def tampered_app(tamper: Tamper) -> ClientApp:
    """The real ClientApp whose training replies pass through ``tamper`` on their way out."""
    return wrapped_app(
        lambda message, context, honest: tamper(message, honest(message, context), context.node_config["partition-id"])
    )


@pytest.fixture
def federate(tmp_path: Path) -> Callable[..., Finished]:
    """``federate(system="fedavg", name="run", clients=6, app=None, **settings)`` runs and returns the folder."""

    def run(name: str = "run", clients: int = 6, app: ClientApp | None = None, **settings: Any) -> Finished:
        folder = tmp_path / name
        values = {**SMALL, "out-dir": str(folder), **{key.replace("_", "-"): v for key, v in settings.items()}}
        config = parse_config(values)
        run_in_process(server_app.app, app or client_app.app, clients, config.to_dict())
        return Finished(folder)

    return run
