"""FedAvg-FT, the client half: FedAvg's, and fine-tuning before it is evaluated.

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021. Dis-PFL does it after the last round; here it
is done whenever the run is evaluated, as long as in a round. The learning rate is that of the round just ended; the
released code takes the rate of a round before the first.
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
    """The personal model is the received global one after one more local training, and then forgotten.

    Mixed into the client of a system that has a global model.
    """

    validates = "personal"

    def planned_releases(self) -> PlannedReleases:
        """Add the epochs of fine-tuning: what comes of them is evaluated, so they are private and charged too."""
        epochs = num_evaluations(self.config) * self.config.local_epochs
        return replace(super().planned_releases(), more_epochs=epochs)

    def personal_model(self, task: Task, state: State) -> TensorDict:
        begin = self.begin(task, state)
        private = self.privacy
        if private is not None and not private.ledger.affords(private.steps(self.config.local_epochs)):
            return begin  # its budget is spent: what is released already has to do
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
    """A FedAvg-FT client answers for the global model, fine-tuned on its own data."""
