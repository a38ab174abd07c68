"""FedProx, the client half: local loss plus ``μ/2 ‖w − w_t‖²``.

Li et al., MLSys 2020, Algorithm 2. The released code of Sub-FedAvg gives no μ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clients.fedavg import FedAvgClient
from clients.training import TrainingResult


class FedProxClient(FedAvgClient):
    """The gradient of the proximal term, ``μ (w − w_t)``, is added exactly, not by a step of its own."""

    def train(self, round: int, **how: Any) -> TrainingResult:
        mu = self.config.fedprox.mu
        start = {n: p.detach().clone().to(self.device) for n, p in self.model.named_parameters()}

        def pull_back(values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
            away = torch._foreach_sub(list(values.values()), [start[name] for name in values])
            torch._foreach_add_([gradients[name] for name in values], away, alpha=mu)

        return super().train(round, adjust_gradients=pull_back if mu else None, **how)
