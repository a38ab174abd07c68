"""FedBN: normalisation layers stay with each client, all other layers are averaged.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1. Scale, shift and running statistics never travel.

Deviations: clients count by their numbers of examples (alike in the paper's algorithm). What is no weight or bias of a
convolution or linear layer counts as normalisation, so that GroupNorm stays local too. A client answers for the
averaged layers with its own norms. The setting ``batch-norm = "local"`` does the same to BatchNorm in every system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from fedprune_app import extend as fp


def without_norms(names: Iterable[str], prunable: Iterable[str]) -> list[str]:
    """Return the names of the tensors that belong to a convolution or a linear layer."""
    layers = {weight.rpartition(".")[0] for weight in prunable}
    return [name for name in names if name.rpartition(".")[0] in layers]


class FedBN(fp.FedAvg):
    """The server's model has no norms."""

    headline = "accuracy_personal_mean"

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.model = {name: model[name] for name in without_norms(model, prunable)}
        if len(self.model) == len(model) and self.config.batch_norm == "averaged":
            raise fp.ConfigError(
                "model", self.config.model, "one with norms, such as cnn-small-bn", condition="with system 'fedbn'"
            )


class FedBNClient(fp.ImageClient):
    """The client keeps all tensors, and sends all but its norms."""

    not_summed = ""

    def __init__(self, config: fp.Config, place: fp.NodeContext) -> None:
        super().__init__(config, place)
        self.shared = without_norms(self.shared, self.prunable)

    def begin(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return {**self.own_model(state), **task.payload.tensors}

    def personal_model(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return self.begin(task, state)

    def received_scores(self, task: fp.Task, state: fp.State) -> dict[str, float | None]:
        """There is no global accuracy, since no model is global as a whole."""
        return {"accuracy-received": self.test_accuracy(task, self.begin(task, state))}


fp.register_system(
    "fedbn", strategy=FedBN, client=FedBNClient, summary="FedBN: normalisation layers stay with each client"
)
