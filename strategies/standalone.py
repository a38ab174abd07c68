"""Standalone (Local): every client trains its own model on its own data; nothing but the order to do so is sent.

The baseline of Sub-FedAvg's Tables 1 and 2 and Dis-PFL's Table 1. Clients are sampled as in the federated systems, so
that each spends the same local epochs in a comparison; ``fraction-train = 1`` trains all of them every round.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedprune_app.core.payload import Payload
from fedprune_app.engine.rounds import Peer
from fedprune_app.engine.wire import Schema
from strategies.base import FederatedStrategy

_NOTHING = Payload({})


class Standalone(FederatedStrategy):
    """No server model."""

    has_global_model = False
    paper_formula = "nothing is sent"

    def plan(self, round: int, participants: list[int]) -> Mapping[int, Payload]:
        return dict.fromkeys(participants, _NOTHING)

    def reply_schema(self, partition: int) -> Schema:
        return Schema.like({})

    def accept(self, peer: Peer, update: Payload) -> None:
        """There is nothing to take in."""

    def evaluation_payload(self) -> Payload:
        return _NOTHING

    def paper_bytes(self, num_participants: int) -> tuple[float, float]:
        return 0.0, 0.0
