"""FedAvg: the mean of the sampled clients' models, weighted by their numbers of training examples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from collections.abc import Iterator

from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Round
from strategies.base import AveragingStrategy


class FedAvg(AveragingStrategy):
    """The server computes ``w_{t+1} = Σ_k n_k w_k / Σ_k n_k`` over the replies."""

    by_examples = True
    headline = "accuracy_global"

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        return OutgoingMessage.to_each(round.participants, Payload(self.model))

    def expect(self, round: Round, client: int) -> Schema:
        return Schema.like(self.model)
