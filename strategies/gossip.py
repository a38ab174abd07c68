"""Decentralised systems, the server half: a relay that draws the topology and passes neighbours' models on.

The models could go from peer to peer; the server only stands in for the links. So two traffics are counted: the
peer-to-peer one, from the sizes of the letters that neighbours exchange, and what the star really moved.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedprune_app.config import ConfigError, GossipOptions
from fedprune_app.core import rng
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload
from fedprune_app.core.topology import links, neighbours, read_adjacency
from fedprune_app.engine import wire
from fedprune_app.engine.store import State
from strategies.base import Contents
from strategies.relay import Relay


class Gossip(Relay):
    """In each round every active client gets what its neighbours published last, averaged by the server
    (``gossip = "server"``) or as they are, for the client to average (``gossip = "client"``: the server reads
    nothing). Both give the same models, to the bit.

    A client publishes when it has trained: whoever has not yet is no part of any average, not even of its own. Round 1
    moves nothing, since all start from one common model.
    """

    paper_formula = "32 bits per kept parameter and link, masks not charged; between peers"

    @property
    @abstractmethod
    def options(self) -> GossipOptions:
        """The system's table of the configuration."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.densities: dict[int, float] = {}  # of the clients' models, as they last said
        self.reads_letters = self.options.gossip == "server"
        self.adjacency = None
        if self.options.topology == "file":
            path = self.options.adjacency_file
            try:
                self.adjacency = read_adjacency(Path(path).read_text(encoding="utf-8"), len(self.roster))
            except (OSError, ValueError) as error:
                raise ConfigError(f"adjacency-file {path!r}: {error}") from None

    # --- who is there, and who receives from whom -----------------------------------------------------------------

    def sample(self, round: int) -> list[int]:
        return self.sampled(round) if self.options.dropped == "trains-alone" else super().sample(round)

    def neighbours(self, round: int) -> dict[int, tuple[int, ...]]:
        """From whom each participant receives; a client that trains alone, from nobody."""
        sampled, dropped = self.sampled(round), set(self.dropped(round))
        active = [partition for partition in sampled if partition not in dropped]
        # In the released code others may still draw a dropped client, and the ring serves its old model; where
        # all are connected, clients hear only those that are there.
        stale = self.options.dropped == "trains-alone" and self.options.topology.startswith(("random", "ring"))
        draw = rng.numpy_generator(self.config.seed, "topology", round=round)
        senders = sampled if stale else active
        drawn = neighbours(
            self.options.topology, list(self.roster), senders, self.options.neighbours, draw, self.adjacency
        )
        return {partition: () if partition in dropped else drawn[partition] for partition in self.sample(round)}

    # --- messages -------------------------------------------------------------------------------------------------

    def open_round(self, round: int, participants: list[int]) -> None:
        super().open_round(round, participants)
        self.links = self.neighbours(round)
        self.peer_up = dict.fromkeys(participants, 0)
        self.peer_down = dict.fromkeys(participants, 0)

    def outgoing(self, round: int, participants: list[int]) -> Iterator[tuple[int, Contents]]:
        mixed: tuple[frozenset[int], wire.EncodedArrays] | None = None  # neighbours of one group get one average
        for partition in participants:
            senders = [sender for sender in self.links[partition] if sender in self.letter_rounds]
            for sender in senders:
                self.peer_down[partition] += self.letter_bytes[sender]
                self.peer_up[sender] = self.peer_up.get(sender, 0) + self.letter_bytes[sender]
            if not senders:
                yield partition, Contents()
            elif self.options.gossip == "client":
                yield partition, Contents(letters=self.letters(senders))
            else:
                group = frozenset(senders) | ({partition} & self.letter_rounds.keys())
                if mixed is None or mixed[0] != group:
                    mixed = group, wire.to_arrays(self.average(sorted(group)))
                yield partition, Contents(mixed[1])

    def average(self, partitions: list[int]) -> Payload:
        """``Σ_j w_j / Σ_j m_j`` of what these clients published, with masks for where somebody keeps something.

        One letter is decoded at a time. A letter that the server had not read before is checked now, and left out if
        it is bad.
        """
        mean = MaskedMean(max(1, len(partitions)))
        for partition in partitions:
            try:
                mean.add(self.read_letter(partition))
            except ValueError as error:
                self.note(partition, f"its letter is left out of an average: {error}")
        masks = {name: held for name, held in mean.held().items() if not bool(held.all())}
        return Payload(mean.mixed(), masks)

    def read_letter(self, partition: int) -> Payload:
        """A published model, decoded and, where nobody has done so yet, checked. ``ValueError`` if it is bad."""
        schema = self.reply_schema(partition)
        letter = wire.from_arrays(self.letter(partition), schema.max_bytes)
        if not self.reads_letters:
            schema.check(letter)
        return letter

    # --- accounting -----------------------------------------------------------------------------------------------

    def traffic(self, num_participants: int) -> dict[str, Any]:
        """Between peers; ``bytes_up`` and ``bytes_down`` beside it are the star's."""
        self.densities |= {k: row["density"] for k, row in self.log.clients.items() if "density" in row}
        heavier = [max(self.peer_down[k], self.peer_up.get(k, 0)) for k in self.peer_down]
        _, out_degree = links(self.links)
        total = sum(tensor.numel() for tensor in self.model.values())
        charged = {k: 4.0 * total * self.densities.get(k, 1.0) for k in {*self.links, *out_degree}}
        down = [sum(charged[j] for j in senders) for senders in self.links.values()]
        up = [charged[k] * degree for k, degree in out_degree.items()]
        return {
            "busiest_node_bytes": max([*self.peer_down.values(), *self.peer_up.values()]),
            "node_bytes_mean": sum(heavier) / len(heavier),
            "peer_bytes": sum(self.peer_down.values()),
            "paper_bytes_down": sum(down),
            "paper_bytes_up": sum(up),
            "paper_busiest_bytes": max([*down, *up]),
        }

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        state = super().state()
        return State({}, {**state.meta, "densities": {str(k): d for k, d in sorted(self.densities.items())}})

    def restore(self, state: State) -> None:
        super().restore(state)
        self.densities = {int(k): float(d) for k, d in state.meta["densities"].items()}
