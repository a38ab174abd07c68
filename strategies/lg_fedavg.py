"""LG-FedAvg: the lower layers stay with each client, the upper ones are averaged.

Liang, Liu, Liu, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020, Algorithm 1. The client half is ``clients/lg_fedavg.py``.

The released script starts from a model that FedAvg has trained: ``lgfedavg.pretrain-rounds`` runs so many rounds of
FedAvg first. Algorithm 1 starts from the initial model, which is the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedprune_app.core.layers import last_layers
from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from strategies.base import Contents
from strategies.fedavg import FedAvg


class LGFedAvg(FedAvg):
    """FedAvg of the last ``lgfedavg.global-layers`` layers; the server's model is those alone.

    With ``lgfedavg.pretrain-rounds`` the server's model is complete: its lower layers are those that FedAvg left, from
    which every client's own lower layers begin.
    """

    headline = "accuracy_personal_mean"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.upper = last_layers(list(self.model), self.prunable, self.config.lgfedavg.global_layers)
        if not self.config.lgfedavg.pretrain_rounds:
            self.model = {name: self.model[name] for name in self.upper}
        self.averaged = list(self.model)

    def plan(self, round: int, participants: list[int]) -> Mapping[int, Payload]:
        """The upper layers; and the lower ones, until a client has trained lower layers of its own."""
        everything, upper = Payload(self.model), Payload({name: self.model[name] for name in self.upper})
        pretrained = self.config.lgfedavg.pretrain_rounds
        return {p: everything if self.state_rounds.get(p, 0) <= pretrained else upper for p in participants}

    def evaluated(self, round: int) -> Iterator[tuple[int, Contents]]:
        """Every client is tested with the upper layers as they are averaged now, on its own lower ones."""
        return self.outgoing(round, list(self.roster))

    def open_round(self, round: int, participants: list[int]) -> None:
        self.averaged = list(self.model) if round <= self.config.lgfedavg.pretrain_rounds else self.upper
        super().open_round(round, participants)

    def reply_schema(self, partition: int) -> Schema:
        return Schema.like({name: self.model[name] for name in self.averaged})

    def paper_bytes(self, num_participants: int) -> tuple[float, float]:
        dense = 4.0 * sum(self.model[name].numel() for name in self.averaged)
        return num_participants * dense, num_participants * dense
