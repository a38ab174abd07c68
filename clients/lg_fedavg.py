"""LG-FedAvg, the client half: train all layers, send the upper ones.

Liang et al. 2020, Algorithm 1. How many layers are global is not said for these networks; two, as in the released code
of FedCR (which shares fc2 and fc3 of its convolutional networks).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clients.base import FederatedClient
from fedprune_app.config import Config
from fedprune_app.core.layers import last_layers
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State


class LGFedAvgClient(FederatedClient):
    """Its own lower layers under the server's upper ones."""

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """The layers that stay are trained privately too: they are evaluated."""
        return ""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.shared = last_layers(self.shared, self.prunable, self.config.lgfedavg.global_layers)

    def begin(self, received: Payload, state: State) -> dict[str, Tensor]:
        return {**self.own_model(state), **received.tensors}

    def received_scores(self, received: Payload, state: State) -> dict[str, float | None]:
        """No model is global as a whole."""
        return {"accuracy-received": self.test_accuracy(self.begin(received, state))}
