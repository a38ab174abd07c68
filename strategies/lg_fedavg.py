"""LG-FedAvg: the lower layers stay with each client, the upper ones are averaged.

Liang, Liu, Liu, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020, Algorithm 1. The client half is ``clients/lg_fedavg.py``.
"""

from __future__ import annotations

from typing import Any

from fedprune_app.core.layers import last_layers
from strategies.fedavg import FedAvg


class LGFedAvg(FedAvg):
    """FedAvg of the last ``lgfedavg.global-layers`` layers; the server's model is those alone."""

    headline = "accuracy_personal_mean"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        names = last_layers(list(self.model), self.prunable, self.config.lgfedavg.global_layers)
        self.model = {name: self.model[name] for name in names}
