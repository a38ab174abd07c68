"""A server that passes its clients' models on: it keeps the latest update of each, and has no model of its own."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from torch import Tensor

from fedprune_app.config import Config
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import ResumePoint, State
from fedprune_app.federation.round import Round, RoundLog, RunContext
from fedprune_app.federation.update_store import UpdateStore
from strategies.base import FederatedStrategy, state_rounds_of


class Relay(FederatedStrategy):
    """A relay puts replies into the update store as they came; :meth:`update_of` returns them in later rounds."""

    has_global_model = False
    reads_updates = True  # whether the server checks what it passes on

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.updates = UpdateStore(self.recorder.folder / "peers", run_key=context.run_key)
        self.update_rounds: dict[int, int] = {}  # by client, the round of the update that may be passed on now
        self.update_bytes: dict[int, int] = {}  # by client, the size of that update in a message
        self._received_bytes: dict[int, int] = {}  # by client, the size of the update received last

    def begin(self, round: Round) -> None:
        self.release_updates()

    def release_updates(self) -> None:
        """Pass on, from now on, the updates received so far; the replies of a round are for the next one."""
        self.update_rounds = dict(self.state_rounds)
        self.update_bytes = dict(self._received_bytes)
        self.updates.forget_all_but(self.update_rounds)

    def update_of(self, client: int) -> wire.EncodedArrays:
        """Return the last model that this client published before this round. ``ValueError`` where it is lost."""
        try:
            return self.updates.get(client, self.update_rounds[client])
        except ValueError as error:
            self.context.lose(client, f"its update is lost: {error}")
            raise

    def updates_of(self, clients: Iterable[int], log: RoundLog) -> dict[int, wire.EncodedArrays]:
        """Return the updates of those clients that have one, all in memory; note and leave out a damaged one."""
        updates = {}
        for client in clients:
            if client in self.update_rounds:
                try:
                    updates[client] = self.update_of(client)
                except ValueError as error:
                    log.note(client, f"its update is lost: {error}")
        return updates

    def accept(self, round: Round, client: int, content: RecordDict) -> None:
        schema = self.expect(round, client)
        update = wire.arrays_of(content)
        if update is None:
            raise ValueError(f"the message has no record '{wire.PAYLOAD}'")
        if not self.reads_updates:
            self.updates.put(client, round.number, update, schema.max_bytes)
        else:
            payload = wire.from_arrays(update, schema.max_bytes)
            schema.check(payload)
            self.updates.put(client, round.number, update, schema.max_bytes)
            self.updates.remember(client, round.number, payload)
        self._received_bytes[client] = wire.item_bytes(wire.peer_update_name(client), update)

    def receive(self, round: Round, client: int, update: Payload) -> None:
        """Take in nothing: :meth:`accept` keeps updates as they came."""

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        rounds = state_rounds_of(meta)
        yield ResumePoint(round, rounds, tuple(UpdateStore(folder / "peers", run_key=run_key).lost(rounds)))

    def state(self) -> State:
        sizes = {str(k): size for k, size in sorted(self._received_bytes.items())}
        return State({}, {**super().state().meta, "peer-bytes": sizes})

    def restore(self, state: State) -> None:
        super().restore(State(self.model, state.meta))
        self._received_bytes = {int(k): int(size) for k, size in state.meta["peer-bytes"].items()}
        self.updates.drop_after(max([0, *self.state_rounds.values()]))
