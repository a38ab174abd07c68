"""FedAvg-FT, the client half: FedAvg's, with fine-tuning before an evaluation.

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021. Dis-PFL fine-tunes after the last round; here
every evaluation does, for as many epochs as a round. The learning rate is that of the round just ended; the released
code takes the rate of a round before the first.
"""

from dataclasses import replace

from clients.base import ImageClient
from clients.fedavg import FedAvgClient
from clients.privacy import PlannedReleases
from clients.task import Task
from fedprune_app.core.named import TensorDict
from fedprune_app.engine.store import State
from fedprune_app.learning.planned_noise import num_evaluations
from fedprune_app.models import vision


class FineTuned(ImageClient):
    """Mixin for clients of a system with a global model: each evaluation fine-tunes it, and keeps nothing."""

    validates = "personal"

    def planned_releases(self) -> PlannedReleases:
        """Add the epochs of fine-tuning, which are private and charged too, since the result is evaluated."""
        epochs = num_evaluations(self.config) * self.config.local_epochs
        return replace(super().planned_releases(), more_epochs=epochs)

    def personal_model(self, task: Task, state: State) -> TensorDict:
        begin = self.begin(task, state)
        private = self.privacy
        if private is not None and not private.ledger.affords(private.steps(self.config.local_epochs)):
            return begin  # the budget is exhausted: evaluate the received model, which is released already
        vision.load_state_tensors(self.model, begin)
        self.train(
            task,
            role="fine-tune",
            epochs=self.config.local_epochs,
            learning_rate=self.config.learning_rates[task.round],
            masks=self.masks(task, state),
        )
        return vision.state_tensors(self.model, include_buffers=True)


class FedAvgFTClient(FineTuned, FedAvgClient):
    """Evaluate the global model, fine-tuned on the client's own data."""
