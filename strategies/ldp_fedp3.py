"""LDP-FedP3, the server half: the next value of each coordinate is that of one client of the round, drawn at random.

Yi, Gazagnadou, Richtárik, Lyu, "FedP3", ICLR 2024, Algorithm 5, with the sketches of Definition 2. The client half is
``clients/ldp_fedp3.py``. Where the text leaves something open:

* In the text all n clients take part. Here n is the number of the round's participants: the sketches are drawn anew
  each round over them, so that ``(1/n) Σ S_i = I`` holds. A part whose client does not reply is unchanged; read
  literally, the text would set it to 0.
* Definition 2 names coordinates, and then whole layers, of which there would have to be as many as clients. Here the
  sketches are of coordinates.
* No pruning from server to client: Algorithm 5 sets it aside as "orthogonal". Numbers of examples have no effect.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedprune_app.core import rng
from fedprune_app.core.fedp3 import perm_k_owners
from fedprune_app.core.layers import layers_of
from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from strategies.base import FederatedStrategy


class LDPFedP3(FederatedStrategy):
    """Replace each coordinate by one client's value. A reply's ``part`` is n times its coordinates, in model order."""

    headline = "accuracy_global"
    paper_formula = "32 bits per parameter: the whole model down to each client, one model up from all of them together"

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        layers = layers_of(list(self.model), self.prunable)
        self.order = [name for names in layers.values() for name in names]
        self.dimension = sum(self.model[name].numel() for name in self.order)

    # --- lines 1 and 3: S_i and w ---------------------------------------------------------------------------------

    def begin(self, round: Round) -> None:
        self.places = {client: position for position, client in enumerate(round.participants)}
        draw = rng.generator(self.config.seed, "sketch", round=round.number)
        self.owners = perm_k_owners(self.dimension, len(self.places), draw)
        self.next = torch.cat([self.model[name].flatten() for name in self.order])  # (d,)

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        payload = Payload(self.model)
        for client, position in self.places.items():
            yield OutgoingMessage(client, payload, fields={"clients": len(self.places), "place": position})

    # --- line 11: w ← (1/n) Σ S_i ũ_i -----------------------------------------------------------------------------

    def expect(self, round: Round, client: int) -> Schema:
        count = self.owners.bincount(minlength=len(self.places))[self.places[client]]
        return Schema({"part": torch.Size([int(count)])}, {"part": self.next.dtype})

    def receive(self, round: Round, reply: Reply) -> None:
        is_own = self.owners == self.places[reply.client]  # sets are disjoint: the sum has one term
        self.next[is_own] = reply.update.tensors["part"] / len(self.places)

    def end(self, round: Round) -> None:
        parts = torch.split(self.next, [self.model[name].numel() for name in self.order])
        parts_by_name: dict[str, Tensor] = dict(zip(self.order, parts, strict=True))
        self.model = {name: parts_by_name[name].view(tensor.shape).clone() for name, tensor in self.model.items()}

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return (down, up): the dense model for each client; Theorem 2's d/n from each client, so d from all."""
        dense = 4.0 * self.dimension
        return len(round.participants) * dense, dense
