"""Decentralised systems, the server half: a server without a model draws the topology and forwards updates.

It stands in for the links between peers. So two kinds of traffic are counted: between peers, by the sizes of the
updates that neighbours exchange, and the bytes that really passed through the server.
"""

import itertools
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from torch import Tensor

from fedprune_app.config import Config, GossipOptions
from fedprune_app.core import rng
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload
from fedprune_app.core.topology import links, neighbours
from fedprune_app.engine import wire
from fedprune_app.engine.store import ResumePoint, State
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RoundLog, RunContext
from fedprune_app.federation.update_store import UpdateStore
from strategies.base import FederatedStrategy, state_rounds_of


class Relay(FederatedStrategy):
    """Base class of servers that store updates as received, and send them to other clients in later rounds."""

    has_global_model = False
    reads_updates = True  # whether the server decodes and checks the updates that it forwards

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.updates = UpdateStore(self.recorder.folder / "peers", run_key=context.run_key)
        self.update_rounds: dict[int, int] = {}  # by client, the round of the update that may be forwarded now
        self.update_bytes: dict[int, int] = {}  # by client, the size of that update in a message
        self._received_bytes: dict[int, int] = {}  # by client, the size of the update received last

    def begin(self, round: Round) -> None:
        self.release_updates()

    def release_updates(self) -> None:
        """Make the updates received so far available: a round's replies are forwarded in the next round."""
        self.update_rounds = dict(self.state_rounds)
        self.update_bytes = dict(self._received_bytes)
        self.updates.forget_all_but(self.update_rounds)

    def update_of(self, client: int) -> ArrayRecord:
        """Return the model that this client published last before this round. ``ValueError`` if it is lost."""
        try:
            return self.updates.get(client, self.update_rounds[client])
        except ValueError as error:
            self.context.mark_lost(client, f"its update is lost: {error}")
            raise

    def updates_of(self, clients: Iterable[int], log: RoundLog) -> dict[int, ArrayRecord]:
        """Return by client the updates that exist, all in memory; a damaged one is noted and left out."""
        updates = {}
        for client in clients:
            if client in self.update_rounds:
                try:
                    updates[client] = self.update_of(client)
                except ValueError as error:
                    log.note(client, f"its update is lost: {error}")
        return updates

    def receive(self, round: Round, reply: Reply) -> None:
        client = reply.client
        if reply.encoded is None:
            raise ValueError(f"the message has no record '{wire.PAYLOAD}'")
        self.updates.put(client, round.number, reply.encoded, self.expect(round, client).max_bytes)
        if self.reads_updates:
            self.updates.remember(client, round.number, reply.update)
        self._received_bytes[client] = wire.item_bytes(wire.peer_update_name(client), reply.encoded)

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        rounds = state_rounds_of(meta)
        yield ResumePoint(round, rounds, tuple(UpdateStore(folder / "peers", run_key=run_key).lost(rounds)))

    def state(self) -> State:
        self.updates.settle()  # the checkpoint relies on them
        sizes = {str(k): size for k, size in sorted(self._received_bytes.items())}
        consensus = self.model if self.has_global_model else {}
        return State(consensus, {**super().state().meta, "peer-bytes": sizes})

    def restore(self, state: State) -> None:
        super().restore(State({**self.model, **state.tensors}, state.meta))
        self._received_bytes = {int(k): int(size) for k, size in state.meta["peer-bytes"].items()}
        self.updates.drop_after(max([0, *self.state_rounds.values()]))


# --- gossip over a topology -------------------------------------------------------------------------------------------


_AVERAGED_AT_ONCE = 4  # updates; more save little
_AVERAGES_AHEAD = min(4, os.cpu_count() or 1)  # each takes some four models' memory


def _message(client: int, average: Future[Payload]) -> OutgoingMessage:
    return OutgoingMessage(client, average.result())


class Gossip(Relay):
    """Base class of systems in which every active client receives its neighbours' latest published models.

    With ``gossip = "server"`` the server averages the neighbours' models. With ``gossip = "client"`` the server decodes
    nothing and the client averages. Both give the same models, bit for bit.

    A client publishes after it has trained; before that, it is part of no average, not even of its own. Round 1 sends
    nothing, since all clients start from one common model.
    """

    paper_formula = "32 bits per kept parameter and link, masks not charged; between peers"

    @property
    @abstractmethod
    def options(self) -> GossipOptions:
        """Return the system's table of the configuration."""

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.densities: dict[int, float] = {}  # by client, the last reported density of its model
        self.reads_updates = self.options.gossip == "server"
        self.participation.trains_dropped = self.options.trains_alone

    # --- who receives from whom -----------------------------------------------------------------------------------

    def neighbours(self, round: Round) -> dict[int, tuple[int, ...]]:
        """Return by participant its senders; a client that trains alone has none."""
        active = [client for client in round.sampled if client not in round.dropped]
        # In the released code other clients may still draw a dropped one, and the ring sends its old model; in the
        # complete topology only active clients send.
        serves_stale = self.options.trains_alone and self.options.topology.startswith(("random", "ring"))
        draw = rng.numpy_generator(self.config.seed, "topology", round=round.number)
        senders = round.sampled if serves_stale else active
        senders_by_client: dict[int, tuple[int, ...]] = {}
        # clients that are held out join one by one, since they have no models for each other
        for joining in [[], *([client] for client in round.sampled if client not in self.members)]:
            clients = sorted([*self.members, *joining])
            present = [sender for sender in senders if sender in clients]
            senders_by_client |= neighbours(self.options.topology, clients, present, self.options.neighbours, draw)
        return {client: () if client in round.dropped else senders_by_client[client] for client in round.participants}

    # --- messages -------------------------------------------------------------------------------------------------

    def begin(self, round: Round) -> None:
        super().begin(round)
        self.links = self.neighbours(round)
        self.peer_up = dict.fromkeys(round.participants, 0)
        self.peer_down = dict.fromkeys(round.participants, 0)

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        made: deque[tuple[int, Future[Payload]]] = deque()
        average_group = frozenset[int]()  # its average is reused while the next client has the same group
        with ThreadPoolExecutor(_AVERAGES_AHEAD) as threads:
            for client in round.participants:
                senders = [sender for sender in self.links[client] if sender in self.update_rounds]
                for sender in senders:
                    self.peer_down[client] += self.update_bytes[sender]
                    self.peer_up[sender] = self.peer_up.get(sender, 0) + self.update_bytes[sender]
                if not senders or self.options.gossip == "client":
                    yield OutgoingMessage(client, peer_updates=self.updates_of(senders, round.log))
                    continue
                group = frozenset(senders) | ({client} & self.update_rounds.keys())
                if average_group != group:
                    average, average_group = threads.submit(self.average, sorted(group), round.log), group
                made.append((client, average))
                if len(made) > _AVERAGES_AHEAD:
                    yield _message(*made.popleft())
            yield from itertools.starmap(_message, made)

    def average(self, clients: list[int], log: RoundLog) -> Payload:
        """Return ``Σ_j w_j / Σ_j m_j`` of these clients' published models, masked to what at least one of them keeps.

        A few updates at a time are in memory, and those that the store has cached. An update that the server has not
        decoded yet is checked now; an invalid one is noted and left out.
        """
        mean = MaskedMean(max(1, len(clients)))
        for start in range(0, len(clients), _AVERAGED_AT_ONCE):
            updates = []
            for client in clients[start : start + _AVERAGED_AT_ONCE]:
                try:
                    update = self.read_update(client)
                    mean.check(update)
                except ValueError as error:
                    log.note(client, f"its update is left out of an average: {error}")
                else:
                    updates.append(update)
            mean.add_all(updates)
        masks = {name: mask for name, mask in mean.held().items() if not bool(mask.all())}
        return Payload(mean.mixed(), masks)

    @abstractmethod
    def published(self) -> wire.Schema:
        """Return the schema of the models that clients publish."""

    def expect(self, round: Round, client: int) -> wire.Schema:
        return replace(self.published(), unread=not self.reads_updates)

    def read_update(self, client: int) -> Payload:
        """Return a client's published model, decoded and checked. ``ValueError`` if it is invalid or lost."""
        round = self.update_rounds[client]
        if (update := self.updates.remembered(client, round)) is not None:
            return update
        update = self.published().read(self.update_of(client))
        self.updates.remember(client, round, update)
        return update

    # --- accounting -----------------------------------------------------------------------------------------------

    def traffic(self, round: Round) -> dict[str, Any]:
        """Return the traffic between peers; the columns ``bytes_up`` and ``bytes_down`` are the server's."""
        self.densities |= {k: row["density"] for k, row in round.log.clients.items() if "density" in row}
        node_bytes = [max(self.peer_down[k], self.peer_up.get(k, 0)) for k in self.peer_down]
        _, out_degree = links(self.links)
        total = sum(tensor.numel() for tensor in self.model.values())
        charges = {k: 4.0 * total * self.densities.get(k, 1.0) for k in {*self.links, *out_degree}}
        down = [sum(charges[j] for j in senders) for senders in self.links.values()]
        up = [charges[k] * degree for k, degree in out_degree.items()]
        return {
            "busiest_node_bytes": max([*self.peer_down.values(), *self.peer_up.values()]),
            "node_bytes_mean": sum(node_bytes) / len(node_bytes),
            "peer_bytes": sum(self.peer_down.values()),
            "paper_bytes_down": sum(down),
            "paper_bytes_up": sum(up),
            "paper_busiest_bytes": max([*down, *up]),
        }

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        state = super().state()
        return State(state.tensors, {**state.meta, "densities": {str(k): d for k, d in sorted(self.densities.items())}})

    def restore(self, state: State) -> None:
        super().restore(state)
        self.densities = {int(k): float(d) for k, d in state.meta["densities"].items()}
