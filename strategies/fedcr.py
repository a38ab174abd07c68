"""FedCR, the server half: encoders are averaged, heads stay with the clients, each class has a Gaussian for its codes.

Zhang, Li, Zhuo, Lin, "FedCR: Personalized Federated Learning Based on Across-Client Common Representation with
Conditional Mutual Information Regularization", ICML 2023, as in its released code. The client half is
``clients/fedcr.py``. With ``fedcr.layer-set = "opu3"`` clients train, send and receive in full only FedP3's layers (its
Figure 2, right); ``fedp3.assignment`` and FedP3's other settings apply to the layer sets.
"""

from dataclasses import replace

import torch

from fedprune_app.config import FedP3Options
from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import LARGEST, Schema
from fedprune_app.federation.round import Reply, Round
from fedprune_app.models.variational import product_with_standard_normal
from strategies.fedp3 import FedP3

MEAN, STD = "prior.mean", "prior.std"
PRECISION, WEIGHTED = "experts.precision", "experts.weighted-mean"
_MOST_PRECISE = 1e30  # σ of 1e-15: divergences from it are finite in float32


class FedCR(FedP3):
    """Average all layers but the head, as FedP3 does, and multiply the clients' experts of each class."""

    headless = frozenset({MEAN, STD})
    paper_formula = "32 bits per parameter of the shared layers, both ways; neither heads nor Gaussians"

    @property
    def options(self) -> FedP3Options:
        return self.config.fedcr.as_fedp3(self.config.fedp3)

    def expect(self, round: Round, client: int) -> Schema:
        own_layers, _ = self.assigned(client)
        experts = {name: self.model[MEAN].double() for name in (PRECISION, WEIGHTED)}
        schema = Schema.like({name: self.model[name] for name in self.travelling(own_layers)} | experts)
        return replace(schema, unscaled=frozenset(experts))

    def begin(self, round: Round) -> None:
        super().begin(round)
        self.experts: dict[int, Payload] = {}  # small, and summed in ascending order of clients

    def receive(self, round: Round, reply: Reply) -> None:
        tensors = dict(reply.update.tensors)
        experts = {name: tensors.pop(name) for name in (PRECISION, WEIGHTED)}
        precision, weighted = experts[PRECISION], experts[WEIGHTED]
        if not bool(((precision >= 0) & (precision <= _MOST_PRECISE)).all()):
            raise ValueError(
                f"tensor '{PRECISION}' has magnitude {float(precision.abs().max()):g}, "
                f"allowed: at most {_MOST_PRECISE:g}, and none below 0"
            )
        if bool((weighted.abs() > precision * LARGEST).any()):
            raise ValueError(
                f"tensor '{WEIGHTED}' has magnitude {float(weighted.abs().max()):g}, "
                f"allowed: at most {LARGEST:g} times the precision"
            )
        reply.update = Payload(tensors)
        super().receive(round, reply)
        self.experts[reply.client] = Payload(experts)

    def end(self, round: Round) -> None:
        """Replace the Gaussian of each class that has experts by the product of these and N(0, 1)."""
        super().end(round)
        experts = [self.experts[client].tensors for client in sorted(self.experts)]
        sums = [torch.stack([tensors[name] for tensors in experts]).sum(0) for name in (PRECISION, WEIGHTED)]
        for name, value in zip((MEAN, STD), product_with_standard_normal(*sums), strict=True):
            self.model[name] = torch.where(sums[0] > 0, value.to(self.model[name].dtype), self.model[name])
