"""What every client half has, whatever it trains or prunes: its place, its state on disk, its answer to ``fit``."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.client import NumPyClient

from fedprune_app.config import Config
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, VersionedStore, client_store
from fedprune_app.engine.wire import Schema
from fedprune_app.learning.device import device_of

NDArrays = list[np.ndarray[Any, Any]]
_NO_STATE = State()


class LocalUpdate(Protocol):
    """The outcome of a local update: what is sent, what is kept, and what else to tell the server."""

    @property
    def payload(self) -> Payload: ...
    @property
    def state(self) -> State: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...


class Node(NumPyClient):
    """One client with its state below ``state_dir``: number ``partition``, out of ``num_partitions`` of the data.

    ``num_partitions`` 0: it has data of its own, all of which it takes. ``run_key`` names the run that it is in.
    """

    versions_kept = 3  # of its state, below the one the server last took in

    def __init__(
        self,
        config: Config,
        partition: int,
        num_partitions: int,
        state_dir: Path,
        capacity: float | None = None,
        run_key: str = "",
    ) -> None:
        self.config = config
        self.partition = partition
        self.num_partitions = num_partitions
        self.capacity = capacity  # what this node can bear, where its operator says so
        self.request: Mapping[str, Any] = {}  # the fields of the message being answered
        self.received = Payload({})  # its payload
        self.has_own_data = num_partitions == 0
        self.share = (0, 1) if self.has_own_data else (partition, num_partitions)  # of the data there is: k of n
        self.run_key = run_key
        self.store: VersionedStore = client_store(state_dir, partition, run_key, self.versions_kept)
        self.device = device_of(config)

    # --- what a client says -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """How much it learns from, in whatever its task counts."""

    def introduction(self) -> dict[str, Any]:
        """What every client says of itself when it is asked who it is."""
        return {
            "partition": self.partition,
            "num-examples": self.num_examples,
            **({} if self.capacity is None else {"capacity": self.capacity}),
            **({"own-data": True} if self.has_own_data else {}),
        }

    @abstractmethod
    def message_schema(self) -> Schema:
        """The largest payload that the server may send it."""

    @abstractmethod
    def local_update(self, received: Payload, state: State, round: int) -> LocalUpdate:
        """The client's part of a round."""

    @abstractmethod
    def report(self, update: Any) -> dict[str, Any]:
        """What the server records of an update. ``ValueError`` for one that must not count."""

    def kept_state(self, update: Any) -> State:
        """What is stored of an update."""
        kept: State = update.state
        return kept

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Why this system cannot run so with ``dp.enabled``, one line for the user; empty if it can.

        It can where everything that leaves a client, or is evaluated, is made of weights that were trained privately,
        of what others released, of draws without data, and of noised counts. A system says so itself.
        """
        return never_private(config, "nobody has examined what it releases")

    def letter_schema(self) -> Schema:
        """What other clients' payloads must hold, in systems where clients see them."""
        return Schema.like({})

    # --- Flower's NumPyClient -----------------------------------------------------------------------------------

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Load the state, update it, save it, and only then reply.

        A round that is asked for again (a resumed run) starts from the state before it, so it gives the same reply.
        Raises ``ValueError`` and saves nothing when the update must not count: when training diverges, say.
        """
        started = time.monotonic()
        self.request = config
        round = int(config["round"])
        state, lost = self._state(config, before=round)
        self.received = received_payload(parameters, config)
        update = self.local_update(self.received, state, round)
        told = self.report(update)
        self.store.save(round, self.kept_state(update), accepted=config.get("state-round"))
        metrics = {
            **told,
            "seconds": time.monotonic() - started,
            **update.metrics,
            **self._note(lost, config),
            **payload_names(update.payload),
        }
        return update.payload.to_ndarrays(), self.num_examples, metrics

    def _state(self, config: Mapping[str, Any], before: int) -> tuple[State, str]:
        """The state after the round the server last took in from this client (``state-round``, 0 for none).

        Without that, the newest of a round smaller than ``before``. If it is lost, the one before it, and a note to
        say so.
        """
        wanted = config.get("state-round")
        if wanted == 0:
            return _NO_STATE, ""
        found = self.store.load(before=before if wanted is None else wanted + 1)
        if found is None:
            return _NO_STATE, "" if wanted is None else f"the state of round {wanted} is lost, began anew"
        round, state = found
        if wanted in (None, round):
            return state, ""
        return state, f"the state of round {wanted} is lost, went on from round {round}"

    @staticmethod
    def _note(lost: str, config: Mapping[str, Any]) -> dict[str, str]:
        notes = [lost, *config.get("refused", [])]
        told = {"note": "; ".join(filter(None, notes))} if any(notes) else {}
        return {**told, "lost": lost} if lost else told

    def check_state(self, round: int) -> None:
        """Raise ``ValueError`` naming the file where what is kept since ``round`` is damaged or missing."""
        self.store.read(round)

    def lost_states(self, rounds: Iterable[int]) -> dict[str, Any]:
        """The answer to a server that resumes a run: which of these versions of its state it has lost, and why."""
        lost: dict[int, str] = {}
        for round in rounds:
            try:
                self.check_state(round)
            except ValueError as error:
                lost[round] = str(error)
                if self.has_own_data:  # where its operator keeps its files is nobody's business
                    lost[round] = lost[round].replace(str(self.store.folder), self.store.folder.name)
        return {"partition": self.partition, "lost-rounds": list(lost), "lost-reasons": list(lost.values())}


def payload_names(payload: Payload) -> dict[str, list[str]]:
    """The names that a list of ndarrays lacks, to travel beside it."""
    return {"tensor-names": list(payload.tensors), "mask-names": list(payload.masks)}


def received_payload(parameters: NDArrays, config: Mapping[str, Any]) -> Payload:
    """The payload that Flower's list of arrays and the names beside it make."""
    return Payload.from_ndarrays(parameters, config["tensor-names"], config["mask-names"])


def parts_not_private(config: Config, what: str) -> str:
    """One line for the user where ``what`` trains parts of the network, which ``dp.grad-sample`` cannot; else empty."""
    if config.dp.grad_sample in ("auto", "one-pass"):
        return ""
    return f"dp.grad-sample is {config.dp.grad_sample!r}, allowed with {what}: auto, one-pass"


def never_private(config: Config, why: str) -> str:
    """One line for the user: ``dp.enabled`` does not go with the system."""
    return f"dp.enabled is true, allowed with system {config.system!r}: false; {why}"
