"""FedAvg: the mean of the sampled clients' models, weighted by their numbers of training examples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedprune_app.core.payload import Payload
from fedprune_app.engine.rounds import Peer
from fedprune_app.engine.wire import Schema
from strategies.base import FederatedStrategy


class FedAvg(FederatedStrategy):
    """``w_{t+1} = Σ_k n_k w_k / Σ_k n_k`` over the clients that replied; under ``robust`` every n_k is 1."""

    averages = True
    headline = "accuracy_global"

    def plan(self, round: int, participants: list[int]) -> Mapping[int, Payload]:
        return dict.fromkeys(participants, Payload(self.model))

    def reply_schema(self, partition: int) -> Schema:
        return Schema.like(self.model)

    def open_round(self, round: int, participants: list[int]) -> None:
        largest = max(map(self.weight_of, participants))
        self.mean = self.averaging(len(participants), max_weight=largest)

    def accept(self, peer: Peer, update: Payload) -> None:
        self.mean.add(update, weight=self.weight_of(peer.partition))

    def close_round(self, round: int) -> None:
        self.model = self.mean.mean(self.model)
