"""FedProx, the client half: local loss plus ``μ/2 ‖w − w_t‖²``.

Li et al., MLSys 2020, Algorithm 2. The released code of Sub-FedAvg gives no μ.
"""

from typing import Unpack

from clients.base import LocalTraining
from clients.fedavg import FedAvgClient
from clients.task import Task
from fedprune_app.learning.training import TrainingResult, proximal


class FedProxClient(FedAvgClient):
    """Add the gradient of the proximal term, ``μ (w − w_t)``, exactly, not as a separate step."""

    def train(self, task: Task, **how: Unpack[LocalTraining]) -> TrainingResult:
        mu = self.config.fedprox.mu
        start = {n: p.detach().clone().to(self.device) for n, p in self.model.named_parameters()}
        how["adjust_gradients"] = proximal(start, mu) if mu else None
        return super().train(task, **how)
