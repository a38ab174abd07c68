"""LG-FedAvg: the lower layers stay with each client, the upper ones are averaged.

Liang, Liu, Liu, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020, Algorithm 1. The client half is ``clients/lg_fedavg.py``.

Algorithm 1 starts from the initial model, which is the default. The released script starts from a model that FedAvg has
trained: ``lgfedavg.pretrain-rounds`` is the number of FedAvg rounds that come first.
"""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from fedprune_app.core.layers import last_layers
from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Round, RunContext
from strategies.fedavg import FedAvg


class LGFedAvg(FedAvg):
    """Average the last ``lgfedavg.global-layers`` layers, which are the server's whole model.

    With ``lgfedavg.pretrain-rounds`` the server's model is complete: every client starts from the lower layers that
    FedAvg has trained.
    """

    headline = "accuracy_personal_mean"

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.upper = last_layers(list(self.model), self.prunable, self.config.lgfedavg.global_layers)
        if not self.config.lgfedavg.pretrain_rounds:
            self.model = {name: self.model[name] for name in self.upper}
        self.averaged = list(self.model)

    def begin(self, round: Round) -> None:
        self.averaged = list(self.model) if round.number <= self.config.lgfedavg.pretrain_rounds else self.upper
        super().begin(round)

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        return self.upper_layers_to(round.participants)

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield the averaged upper layers; each client evaluates them on top of its own lower ones."""
        return self.upper_layers_to(self.clients)

    def upper_layers_to(self, clients: Iterable[int]) -> Iterator[OutgoingMessage]:
        """Yield the upper layers, with the lower ones for a client that has not trained its own yet."""
        full_payload, upper = Payload(self.model), Payload({name: self.model[name] for name in self.upper})
        pretrain_rounds = self.config.lgfedavg.pretrain_rounds
        for client in clients:
            yield OutgoingMessage(
                client, full_payload if self.state_rounds.get(client, 0) <= pretrain_rounds else upper
            )

    def expect(self, round: Round, client: int) -> Schema:
        return Schema.like({name: self.model[name] for name in self.averaged})

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        dense = 4.0 * sum(self.model[name].numel() for name in self.averaged)
        return len(round.participants) * dense, len(round.participants) * dense
