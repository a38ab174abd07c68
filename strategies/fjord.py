"""FjORD, the server half: nested sub-networks of leading units, each coordinate averaged over those that have it.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021, Algorithm 1. The client half is ``clients/fjord.py``.

Only the leading units of a client's largest sub-network travel, as smaller tensors. Weighted by numbers of examples
(alike under ``robust``), so that with all clients at full width it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

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
from fedprune_app.engine import wire
from fedprune_app.engine.rounds import Peer
from fedprune_app.engine.wire import Schema
from strategies.base import Contents, FederatedStrategy


class FjORD(FederatedStrategy):
    """What is judged is the network at full width; clients also answer for the width that they can bear."""

    averages = True
    headline = "accuracy_global"
    paper_formula = "32 bits per parameter of the client's sub-network, both ways"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.shapes = {name: tensor.shape for name, tensor in self.model.items()}
        self.groups = hidden_groups(layers_of(list(self.model), self.prunable), self.shapes)

    def width(self, partition: int) -> float:
        """p_max: the share of each layer's units that a client can bear."""
        return self.roster[partition].capacity or self.config.fjord.width_of(partition)

    def reach(self, partition: int) -> Extents:
        width = self.width(partition)
        return extents(self.groups, {group.name: leading_count(group.size, width) for group in self.groups})

    def sub_network(self, partition: int) -> dict[str, Tensor]:
        reach = self.reach(partition)
        return {name: leading_block(tensor, reach.get(name)).contiguous() for name, tensor in self.model.items()}

    def plan(self, round: int, participants: list[int]) -> Mapping[int, Payload]:
        return {partition: Payload(self.sub_network(partition)) for partition in participants}

    def outgoing(self, round: int, participants: list[int]) -> Iterator[tuple[int, Contents]]:
        for width, partitions in groupby(sorted(participants, key=self.width), key=self.width):
            first, *others = partitions
            arrays = wire.to_arrays(Payload(self.sub_network(first)))
            for partition in (first, *others):
                yield partition, Contents(arrays, fields={"width": width})

    def evaluated(self, round: int) -> Iterator[tuple[int, Contents]]:
        arrays = wire.to_arrays(self.evaluation_payload())
        for partition in self.roster:
            yield partition, Contents(arrays, fields={"width": self.width(partition)})

    def reply_schema(self, partition: int) -> Schema:
        reach = self.reach(partition)
        return Schema.like({name: leading_block(tensor, reach.get(name)) for name, tensor in self.model.items()})

    def open_round(self, round: int, participants: list[int]) -> None:
        self.participants = participants
        largest = max(map(self.weight_of, participants))
        self.mean = self.averaging(len(participants), max_weight=largest)

    def accept(self, peer: Peer, update: Payload) -> None:
        masks = leading_masks(self.reach(peer.partition), self.shapes)
        full = Payload(zero_padded(update.tensors, self.shapes), masks)
        self.mean.add(full, weight=self.weight_of(peer.partition))

    def close_round(self, round: int) -> None:
        self.model = self.mean.mean(self.model)

    def paper_bytes(self, num_participants: int) -> tuple[float, float]:
        total = 4.0 * sum(t.numel() for k in self.participants for t in self.sub_network(k).values())
        return total, total
