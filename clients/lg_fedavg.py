"""LG-FedAvg, the client half: train all layers, send the upper ones.

Liang et al. 2020, Algorithm 1. The paper does not give the number of global layers for these networks; the default is
two, as in the released code of FedCR (which shares fc2 and fc3 of its convolutional networks). Configurations and
matrices beside Sub-FedAvg have three, whose upload is nearest to Sub-FedAvg's table; of ``cnn5`` that leaves conv1
local alone.

A client evaluates its own lower layers under the averaged upper ones, as the released code does. Its last local model,
with its own upper layers, would be FedAvg's after local training.
"""

from collections.abc import Iterable

from clients.base import ImageClient, Scores, Update
from clients.context import NodeContext
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core.layers import last_layers
from fedprune_app.core.named import TensorDict
from fedprune_app.engine.store import State


class LGFedAvgClient(ImageClient):
    """Train all layers: the client's own lower ones under the server's upper ones."""

    not_summed = ""
    not_private = ""  # the lower layers are trained privately too, since they are evaluated

    @classmethod
    def names_from_server(
        cls, config: Config, names: Iterable[str], prunable: Iterable[str], trained_in: int
    ) -> list[str]:
        if trained_in <= config.lgfedavg.pretrain_rounds:
            return list(names)
        return last_layers(list(names), frozenset(prunable), config.lgfedavg.global_layers)

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        self.all_names = self.shared
        number = self.config.lgfedavg.global_layers
        try:
            self.shared = last_layers(self.shared, self.prunable, number)
        except ValueError as error:
            raise ValueError(f"lgfedavg.global-layers is {number}: {error}") from None

    def begin(self, task: Task, state: State) -> TensorDict:
        is_whole = task.state_round <= self.config.lgfedavg.pretrain_rounds  # a newcomer's test has all layers, too
        received = task.payload.tensors.items()
        return {**self.own_model(state), **{name: t for name, t in received if is_whole or name in self.shared}}

    def local_update(self, task: Task, state: State) -> Update:
        """Send the upper layers; during ``lgfedavg.pretrain-rounds`` all layers, as FedAvg does."""
        is_whole = task.round <= self.config.lgfedavg.pretrain_rounds
        return self.dense_update(task, state, self.all_names if is_whole else self.shared)

    def personal_model(self, task: Task, state: State) -> TensorDict:
        return self.begin(task, state)

    def received_scores(self, task: Task, state: State) -> Scores:
        """Return no global accuracy, since no complete model is global."""
        return {"accuracy-received": self.test_accuracy(task, self.begin(task, state))}
