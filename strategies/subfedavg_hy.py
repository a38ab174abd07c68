"""Sub-FedAvg (Hy), the server half: average each coordinate over the clients that still have its channels and weight.

Vahidian, Morafah, Lin, ICDCS workshops 2021, Algorithm 2. The client half is ``clients/subfedavg_hy.py``.
"""

from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import Round
from strategies.subfedavg import SubFedAvg


class SubFedAvgHy(SubFedAvg):
    """Average as in Sub-FedAvg (Un), with a mask for every tensor.

    A removed channel is masked in the convolution's weight and bias, in its norm's scale, shift and statistics, and in
    the next layer's weight.
    """

    paper_formula = f"Sub-FedAvg (Un)'s: {SubFedAvg.paper_formula}; the paper has none for removed channels"

    def expect(self, round: Round, client: int) -> Schema:
        return Schema.like(self.model, masked=frozenset(self.model))
