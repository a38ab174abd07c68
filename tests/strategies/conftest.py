"""Small federations that the tests of this folder share: runs of the same settings run once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto

from fedprune_app import client_app, server_app
from fedprune_app.config import DEFAULTS, Config, parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.engine.store import State, VersionedStore, read_tensors
from tests.conftest import Finished

TINY = {
    "shard-size": 40,
    "num-server-rounds": 3,
    "local-epochs": 2,
    "fraction-train": 0.5,
    "evaluate-every": 1,
    "learning-rate": 0.05,
    "subfedavg.accuracy-threshold": 0.0,
}
"""Every client has 72 digits to train on and 8 to decide with."""


@dataclass(frozen=True)
class Exchanged:
    """One message and its reply, as a client's side saw them."""

    kind: str  # query, train or evaluate
    round: int
    partition: int
    down: Payload
    up: Payload
    bytes_down: int
    bytes_up: int
    peer_updates: Mapping[int, Payload]  # from other clients, by their partition
    peer_bytes: Mapping[int, int]
    told: wire.Fields  # the reply's named values


@dataclass
class Wiretap:
    """The real ClientApp, every message of which is weighed and read on its way."""

    messages: list[Exchanged] = field(default_factory=list)

    def app(self) -> ClientApp:
        app = ClientApp()
        app.query()(self._tapped("query", client_app.query))
        app.train()(self._tapped("train", client_app.train))
        app.evaluate()(self._tapped("evaluate", client_app.evaluate))
        return app

    def of(self, kind: str, round: int | None = None) -> dict[int, Exchanged]:
        """By partition; without a round, the last round's."""
        found = [m for m in self.messages if m.kind == kind]
        last = max(m.round for m in found) if round is None else round
        return {m.partition: m for m in sorted(found, key=lambda m: m.partition) if m.round == last}

    def _tapped(self, kind: str, real: Callable[[Message, Any], Message]) -> Callable[[Message, Any], Message]:
        def handle(message: Message, context: Any) -> Message:
            request = message.content
            bytes_down, down = _size(message), wire.payload_of(request, 10**9)
            senders = {int(name.removeprefix("peer/")): name for name in request if name.startswith("peer/")}
            peer_updates = {sender: wire.payload_of(request, 10**9, name) for sender, name in senders.items()}
            sizes = {sender: _bytes(RecordDict({name: request[name]})) for sender, name in senders.items()}
            reply = real(message, context)
            up, told = wire.payload_of(reply.content, 10**9), wire.fields_of(reply.content)
            round, partition = request["fields"]["round"], context.node_config["partition-id"]
            seen = Exchanged(kind, round, partition, down, up, bytes_down, _size(reply), peer_updates, sizes, told)
            self.messages.append(seen)
            return reply

        return handle


def _size(message: Message) -> int:
    return _bytes(message.content)


def _bytes(content: RecordDict) -> int:
    return len(recorddict_to_proto(content).SerializeToString())


@dataclass(frozen=True)
class Run(Finished):
    """A finished run with what its files hold, and what was exchanged in it."""

    config: Config
    num_clients: int
    wiretap: Wiretap

    @property
    def server(self) -> dict[str, Any]:
        return dict(read_tensors(self.folder / "models" / "global.safetensors").tensors)

    def client(self, partition: int, before: int | None = None) -> tuple[int, State] | None:
        """A client's state on disk and the round it is of; None if it never took part."""
        return VersionedStore(self.folder / "clients" / f"{partition:05d}").load(before)

    def rows(self, round: int) -> dict[int, dict[str, Any]]:
        """Rows of clients.jsonl of an evaluated round, which has all clients in the order of their partitions."""
        rows = [row for row in self.clients if row["round"] == round]
        assert len(rows) == self.num_clients
        return dict(enumerate(rows))


Federation = Callable[..., Run]
_TABLES = {key.partition(".")[0] for key in DEFAULTS if "." in key}


def config_key(name: str) -> str:
    """``dispfl_prune_rate`` is the key ``dispfl.prune-rate``."""
    table, _, rest = name.partition("_")
    return (f"{table}.{rest}" if table in _TABLES else name).replace("_", "-")


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """``federation(system="fedavg", clients=4, **settings)``: a finished run in this process; equal runs are shared.

    With ``fresh=True`` it runs anew.
    """
    finished: dict[str, Run] = {}
    root = tmp_path_factory.mktemp("federations")

    def run(clients: int = 4, fresh: bool = False, **settings: Any) -> Run:
        given = {config_key(name): value for name, value in settings.items()}
        key = repr((clients, sorted(given.items())))
        if fresh or key not in finished:
            folder = root / f"{len(finished)}{'-fresh' if fresh else ''}"
            if fresh:
                folder = Path(tmp_path_factory.mktemp("fresh"))
            config = parse_config({**TINY, "out-dir": given.get("resume-from", str(folder)), **given})
            wiretap = Wiretap()
            run_in_process(server_app.app, wiretap.app(), clients, config.to_dict())
            result = Run(Path(config.out_dir), config, clients, wiretap)
            if fresh:
                return result
            finished[key] = result
        return finished[key]

    return run
