"""FedFomo, the client half: weigh other clients' models by their gain in validation loss, and move towards them.

Zhang, Sapra, Fidler, Yeung, Alvarez, ICLR 2021, equations 3 and 4, as in Dis-PFL's released code: the client's own
newly trained model is a candidate too; the others are other clients' models after their last round; losses are sums
over the validation data. If no candidate helps, the client keeps the model from before its training. It reports the
candidates' worths before negative values are set to 0 and the rest is normalised.
"""

import math
from typing import ClassVar

import torch

from clients.base import ImageClient, Update
from clients.node import ReplyFields
from clients.task import Task
from fedprune_app.core.flops import sparse_flops
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.engine.wire import Schema
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.models import vision


class FedFomoClient(ImageClient):
    """Mix candidate models by their worth on validation data, which must not be empty."""

    declares: ClassVar = ReplyFields(training=frozenset({"candidates", "worth"}))

    not_private = "it weighs models by validation losses, which one example can change at will"

    def peer_schema(self) -> Schema:
        return self.shared_schema()

    def begin(self, task: Task, state: State) -> TensorDict:
        return self.own_model(state)

    def local_update(self, task: Task, state: State) -> Update:
        if not len(self.data.validation_labels):
            raise ValueError("the client has no validation images to weigh models by, allowed: at least one")
        start = self.begin(task, state)  # θ_k^{t-1}
        vision.load_state_tensors(self.model, start)
        result = self.train(task)
        trained_tensors = vision.state_tensors(self.model, include_buffers=True)

        candidates = {k: {**trained_tensors, **update.tensors} for k, update in task.peer_updates.items()}
        peers = list(candidates)
        candidates[self.client_id] = trained_tensors
        loss_before = self.validation_loss(start)
        worth = {}
        for k, candidate in candidates.items():
            distance = _norm(candidate, start, self.shared)
            gain = loss_before - self.validation_loss(candidate)
            # eq. 3; a model whose losses overflow has a worth of 0
            worth[k] = gain / distance if distance > 0 and math.isfinite(gain / distance) else 0.0
        total = sum(max(value, 0.0) for value in worth.values())
        weights = {k: max(value, 0.0) / total if total else 0.0 for k, value in worth.items()}
        average = start
        for k, weight in weights.items():  # eq. 4
            if weight:
                average = {
                    name: tensor + weight * (candidates[k][name] - start[name]) for name, tensor in average.items()
                }

        num_tests = len(self.data.validation_labels) * (len(candidates) + 1)
        metrics = {"candidates": peers, "worth": [worth[k] for k in peers]} if peers else {}
        return Update(
            Payload({name: average[name] for name in self.shared}),
            State(grouped(weights=average)),
            result,
            self.costs.training() + num_tests * sparse_flops(self.costs.by_layer, {}),
            metrics,
        )

    def validation_loss(self, tensors: Tensors) -> float:
        vision.load_state_tensors(self.model, tensors)
        images, labels = self.data.validation_images, self.data.validation_labels
        return evaluate(self.model, images, labels, device=self.device, precision=self.config.precision).loss_sum


def _norm(a: Tensors, b: Tensors, names: list[str]) -> float:
    return float(torch.stack([(a[name] - b[name]).double().square().sum() for name in names]).sum().sqrt())
