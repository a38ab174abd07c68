"""Quick runs in this process, and their recorded results."""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fedprune_app import client_app, server_app
from fedprune_app.config import Settings, with_carrier
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.engine import simulated_grid, wire
from fedprune_app.engine.simulated_grid import InProcessGrid, run_in_process
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.metrics import Declarations, FieldKind
from fedprune_app.results.recorder import write_info

CLIENTS, ROUNDS = 5, 3


QUICK: Settings = {
    "num-server-rounds": ROUNDS,
    "local-epochs": 1,
    "fraction-train": 1.0,
    "evaluate-every": 1,
    "shards-per-client": 3,
    "shard-size": 20,
    "learning-rate": 0.05,
}
"""These settings make quick runs in which every client takes part in every round, and is evaluated after it."""


PRIVATE: Settings = {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.delta": 1e-3}


NEEDED: Mapping[str, Settings] = {
    "subfedavg": {"local-epochs": 2},
    "subfedavg-hy": {"model": "cnn-small-bn", "local-epochs": 2},
    "fedcr": {"model": "cnn-small-cr", "learning-rate": 0.005, "max-grad-norm": 10.0},
    "fedltp": {
        "fedltp.tickets": 1,
        "fedltp.ticket-iterations": 10,
        "steps-per-epoch": 3,
        **PRIVATE,
        "dp.count-scale": 20.0,
    },
    "dpfed": PRIVATE,
    "fedspa": PRIVATE,
    "ldp-fedp3": PRIVATE,
}
"""Settings of the systems that are private by nature, need a network of their own, or prune from two epochs on."""


@dataclass(frozen=True)
class FinishedRun:
    """Unchecked access to the records of a run's folder."""

    folder: Path

    @property
    def info(self) -> ValueDict:
        content: ValueDict = json.loads((self.folder / "run.json").read_text())
        return content

    @property
    def rounds(self) -> list[ValueDict]:
        return self._rows("rounds.jsonl")

    @property
    def clients(self) -> list[ValueDict]:
        return self._rows("clients.jsonl")

    @property
    def sha256(self) -> str:
        return str(self.info["final_sha256"])

    def _rows(self, name: str) -> list[ValueDict]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@dataclass(frozen=True)
class ObservedRun(FinishedRun):
    """A run whose replies were observed: the field names of each, by kind of message."""

    replies: Mapping[str, list[set[str]]]


def listening(grid: type[InProcessGrid], replies: dict[str, list[set[str]]]) -> type[InProcessGrid]:
    """Return a subclass of ``grid`` that adds the field names of every reply without error to ``replies``."""

    class Listening(grid):  # type: ignore[misc, valid-type]
        def pull_messages(self, message_ids: Any) -> Any:
            for reply in super().pull_messages(message_ids):
                if not reply.has_error():
                    replies[reply.metadata.message_type].append(set(wire.fields_of(reply.content)))
                yield reply

    return Listening


def run_with(
    values: Values, folder: Path, grid: type[InProcessGrid] = InProcessGrid, clients: int = CLIENTS
) -> ObservedRun:
    """Run a federation with the settings ``values`` in this process, on ``grid``, in ``folder``."""
    config = prepare(RunInputs({**values, "out-dir": str(folder)})).config
    replies: dict[str, list[set[str]]] = defaultdict(list)
    with mock.patch.object(simulated_grid, "InProcessGrid", listening(grid, replies)):
        run_in_process(server_app.app, client_app.app, clients, with_carrier(config))
    return ObservedRun(folder, replies)


def cut_after(whole: FinishedRun, round: int, folder: Path) -> Path:
    """Copy a run's folder as if the run was killed: checkpoints end with ``round``, and clients' states are later."""
    copy = Path(shutil.copytree(whole.folder, folder))
    for later in range(round + 1, ROUNDS + 1):
        (copy / "checkpoints" / f"round-{later:05d}.safetensors").unlink()
    write_info(copy, {**whole.info, "status": "running", "final_sha256": None})
    return copy


def lasting(recorded: Any) -> Any:
    """Return records without times, bytes (messages have times) and epsilons (a repeated round is charged twice)."""
    if isinstance(recorded, list):
        return [lasting(entry) for entry in recorded]
    if not isinstance(recorded, dict):
        return recorded
    return {key: lasting(entry) for key, entry in recorded.items() if not re.search("seconds|bytes|epsilon", key)}


def misrecorded(rows: Iterable[Values], columns: Iterable[str], declared: Declarations = DECLARATIONS) -> list[str]:
    """Return the names in recorded ``rows`` that are not in ``columns``, or not of the declared kind."""
    kinds = {name: kind for kind, names in declared.kinds.items() for name in names}
    names = set(columns)
    return sorted(
        {name for row in rows for name, value in row.items() if name not in names or not _is_one(value, kinds[name])}
    )


def _is_one(value: Any, kind: FieldKind) -> bool:
    if kind is FieldKind.NUMBER:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if kind is FieldKind.TEXTS:
        return all(isinstance(text, str) for text in value)
    inner = FieldKind.NUMBER if kind is FieldKind.BY_NAME else FieldKind.BY_NAME
    return isinstance(value, dict) and all(_is_one(item, inner) for item in value.values())
