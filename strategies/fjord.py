"""FjORD, the server half: nested sub-networks of leading units, each coordinate averaged over those that have it.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021, Algorithm 1. The client half is ``clients/fjord.py``.

Only the leading units of a client's largest sub-network travel, as smaller tensors. The mean is weighted by numbers of
examples: with all clients at full width it is FedAvg.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby

from torch import Tensor

from fedprune_app.core.layers import layers_of
from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import (
    Extents,
    extents,
    hidden_groups,
    leading_block,
    leading_count,
    leading_masks,
    zero_padded,
)
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from strategies.base import AveragingStrategy


class FjORD(AveragingStrategy):
    """Average nested sub-networks; judged at full width, and clients also evaluate at their own width."""

    by_examples = True
    headline = "accuracy_global"
    paper_formula = "32 bits per parameter of the client's sub-network, both ways"

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.shapes = {name: tensor.shape for name, tensor in self.model.items()}
        self.groups = hidden_groups(layers_of(list(self.model), self.prunable), self.shapes)

    def width(self, client: int) -> float:
        """Return p_max: the share of each layer's units that the client can train."""
        return self.clients[client].capacity or self.config.fjord.width_of(client)

    def extents_of(self, client: int) -> Extents:
        width = self.width(client)
        return extents(self.groups, {group.name: leading_count(group.size, width) for group in self.groups})

    def sub_network(self, client: int) -> dict[str, Tensor]:
        reach = self.extents_of(client)
        return {name: leading_block(tensor, reach.get(name)).contiguous() for name, tensor in self.model.items()}

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield clients of equal width in a row, so that each sub-network is made and encoded once."""
        for width, clients in groupby(sorted(round.participants, key=self.width), key=self.width):
            first, *rest = clients
            payload = Payload(self.sub_network(first))
            yield from OutgoingMessage.to_each((first, *rest), payload, width=width)

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        payload = Payload(self.model)
        for client in self.clients:
            yield OutgoingMessage(client, payload, fields={"width": self.width(client)})

    def expect(self, round: Round, client: int) -> Schema:
        reach = self.extents_of(client)
        return Schema.like({name: leading_block(tensor, reach.get(name)) for name, tensor in self.model.items()})

    def receive(self, round: Round, reply: Reply) -> None:
        masks = leading_masks(self.extents_of(reply.client), self.shapes)
        reply.update = Payload(zero_padded(reply.update.tensors, self.shapes), masks)
        super().receive(round, reply)

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        total = 4.0 * sum(t.numel() for k in round.participants for t in self.sub_network(k).values())
        return total, total
