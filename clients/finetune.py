"""Fine-tuning: the personal model is the received global one after one more local training, and then forgotten.

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021. Dis-PFL does it after the last round; here it
is done whenever the run is evaluated. The learning rate is that of the round just ended; the released code takes the
rate of a round before the first, ``finetune.learning-rate = "code"``. FedP3 and FedCR compare with 10 epochs of the
last layer alone, ``finetune.epochs = 10`` and ``finetune.layers = "last"``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from clients.base import ImageClient
from clients.privacy import Spending, num_evaluations
from clients.task import Task
from fedprune_app.core.layers import hidden_names
from fedprune_app.engine.store import State
from fedprune_app.models import vision


class FineTuned(ImageClient):
    """Mixed into the client of a system that has a global model."""

    validates = "personal"

    def spending(self) -> Spending:
        """Add the epochs of fine-tuning: what comes of them is evaluated, so they are private and charged too."""
        epochs = self.config.finetune.epochs or self.config.local_epochs
        return replace(super().spending(), more_epochs=num_evaluations(self.config) * epochs)

    def personal_model(self, task: Task, state: State) -> dict[str, Tensor]:
        options = self.config.finetune
        epochs = options.epochs or self.config.local_epochs
        rate = self.config.learning_rates[task.round if options.learning_rate == "last" else 0]
        begin = self.begin(task, state)
        if self.privacy is not None and not self.privacy.affords(epochs):
            return begin  # its budget is spent: what is released already has to do
        vision.load_state_tensors(self.model, begin)
        self.train(
            task,
            role="fine-tune",
            epochs=epochs,
            learning_rate=rate,
            masks=self.masks(task, state),
            frozen=hidden_names(list(self.sizes), self.prunable) if options.layers == "last" else (),
        )
        return vision.state_tensors(self.model, include_buffers=True)
