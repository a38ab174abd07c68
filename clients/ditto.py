"""Ditto, the client half: train the global model, which is sent, and the personal one, which stays.

Li, Hu, Beirami, Smith, ICML 2021, Algorithm 1. As in Dis-PFL's released code the pull is decoupled from the step: first
SGD on the local loss (clipped, decayed), then ``v ← v − η λ (v − w)`` with the updated v and the received w.
"""

import torch

from clients.base import ImageClient, Update
from clients.privacy import PlannedReleases
from clients.task import Task
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.models import vision


class DittoClient(ImageClient):
    """State: the personal model's ``weights``, and ``local``, the global model's tensors that stay (local norms)."""

    not_summed = ""
    not_private = ""  # both models are trained privately and charged, the personal one too since it is evaluated

    def planned_releases(self) -> PlannedReleases:
        options = self.config.ditto
        return PlannedReleases(options.global_epochs + options.personal_epochs, evaluation_counts=3)

    def begin(self, task: Task, state: State) -> TensorDict:
        return {**state.group("local"), **task.payload.tensors}

    def personal_model(self, task: Task, state: State) -> TensorDict:
        return self.own_model(state)

    def local_update(self, task: Task, state: State) -> Update:
        options = self.config.ditto
        personal = self.personal_model(task, state)
        global_result, tensors = self.train_from_start(task, state, epochs=options.global_epochs)
        payload = Payload({name: tensors[name] for name in self.shared})

        vision.load_state_tensors(self.model, personal)
        received = {**personal, **self.begin(task, state)}  # norms that stay: those that the phase began with
        anchor = {name: tensor.to(self.device) for name, tensor in received.items()}
        step = self.config.learning_rates[task.round] * options.pull

        def pull(values: Tensors) -> None:
            torch._foreach_lerp_(list(values.values()), [anchor[name] for name in values], step)

        result = self.train(task, role="train personal", epochs=options.personal_epochs, after_step=pull)
        weights = vision.state_tensors(self.model, include_buffers=True)
        local = {name: tensor for name, tensor in tensors.items() if name not in self.shared}
        return Update(
            payload,
            State(grouped(weights=weights, local=local)),
            global_result if global_result.diverged else result,
            self.costs.training(epochs=options.global_epochs + options.personal_epochs),
        )
