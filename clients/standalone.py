"""Standalone (Local), the client half: train the client's own model; send nothing."""

from dataclasses import replace

from clients.base import ImageClient, Update
from clients.privacy import PlannedReleases
from clients.task import Task
from fedprune_app.core.named import TensorDict
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State


class StandaloneClient(ImageClient):
    """Train from the common initial model on, without receiving any other."""

    not_private = ""  # only evaluations are sent; for these the training is private

    def planned_releases(self) -> PlannedReleases:
        return replace(super().planned_releases(), evaluation_counts=2)  # nothing is received

    def begin(self, task: Task, state: State) -> TensorDict:
        return self.own_model(state)

    def local_update(self, task: Task, state: State) -> Update:
        update = super().local_update(task, state)
        return Update(Payload({}), update.state, update.training, update.flops)
