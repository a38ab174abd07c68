"""D-PSGD, decentralised FedAvg, the server half: in each round average with the neighbours, then train some epochs.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, with local epochs in place
of single steps, as Dis-PFL (section 4.1) compares with it. It is judged by the accuracy of the consensus model, the
uniform average of all clients' models.
"""

from collections.abc import Iterator

from fedprune_app.config import DPSGDOptions
from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Round
from strategies.gossip import Gossip


class DPSGD(Gossip):
    """Average neighbours' models, dense or under a fixed random mask (the restricted version of Table 3).

    The consensus model is made for evaluation only; for it the server reads all updates, whatever ``dpsgd.gossip`` is.
    """

    headline = "accuracy_global"
    has_global_model = True

    @property
    def options(self) -> DPSGDOptions:
        return self.config.dpsgd

    def published(self) -> Schema:
        return Schema.like(self.model, masked=self.prunable if self.options.density < 1 else frozenset())

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        self.release_updates()
        self.model = {**self.model, **self.average(sorted(self.update_rounds), round.log).tensors}
        return OutgoingMessage.to_each(self.clients, Payload(self.model))
