"""Sub-FedAvg (Un), the server half: average each coordinate over the clients that kept it.

Vahidian, Morafah, Lin, "Personalized Federated Learning by Structured and Unstructured Pruning under Data
Heterogeneity", ICDCS workshops 2021, Algorithm 1, lines 1 to 10. The client half is ``clients/subfedavg.py``.
"""

from collections.abc import Iterator

from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Round
from strategies.base import AveragingStrategy


class SubFedAvg(AveragingStrategy):
    """The server computes ``w_g[i] = Σ_k w_k[i] / Σ_k m_k[i]``; a coordinate that nobody kept is unchanged.

    As in the released code, numbers of examples have no effect (the text's "intersection of unpruned parameters" is
    this count per element). Biases have no mask: a plain mean. The server's model is dense, and is sent dense.
    """

    sends_parts = True
    paper_formula = "down 32 bits per parameter; up 32 bits per kept and 1 bit per pruned one, at the target rate"

    def warnings(self) -> list[str]:
        doubt = (
            "local-epochs is 1, so no client prunes: a client compares its masks after the first and the last local "
            "epoch, and with one epoch they are equal"
        )
        return [*super().warnings(), *([doubt] if self.config.local_epochs == 1 else [])]

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        return OutgoingMessage.to_each(round.participants, Payload(self.model))

    def expect(self, round: Round, client: int) -> Schema:
        return Schema.like(self.model, masked=self.prunable)

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return Table 1's cost: dense down; up 32 bits per kept weight and 1 bit per pruned one, at the target rate.

        The paper's formula omits the number of clients per round; its table includes it, and so does this.
        """
        down, dense = super().paper_bytes(round)
        pruned_share = self.config.subfedavg.target_rate / 100
        return down, dense * (1 - pruned_share) + dense / 32 * pruned_share
