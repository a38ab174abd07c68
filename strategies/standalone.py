"""Standalone (Local): every client trains its own model on its own data; messages and replies have no tensors.

The baseline of Sub-FedAvg's Tables 1 and 2 and Dis-PFL's Table 1. Clients are sampled as in the federated systems, so
that each spends the same local epochs in a comparison; ``fraction-train = 1`` trains all of them every round.
"""

from collections.abc import Iterator

from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Reply, Round
from strategies.base import FederatedStrategy


class Standalone(FederatedStrategy):
    """The baseline of local training; the server has no model."""

    has_global_model = False
    paper_formula = "nothing is sent"

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        return OutgoingMessage.to_each(round.participants, Payload({}))

    def expect(self, round: Round, client: int) -> Schema:
        return Schema.like({})

    def receive(self, round: Round, reply: Reply) -> None:
        """Do nothing: the reply has no tensors."""

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        return 0.0, 0.0
