"""FedPer, and FedRep: the last layers stay with each client, the layers below them are averaged.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2.
With ``fedper.head-epochs`` a client first trains its own layers on the received ones, and then the received ones under
its own: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning" (FedRep), ICML 2021, Algorithm 1.

Deviations: all clients begin with the same last layers, and FedRep's clients count by their numbers of examples, as in
its released code (the text averages without weights). A client answers for its own layers on the averaged ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedprune_app import extend as fp


@dataclass(frozen=True)
class FedPerOptions(fp.Table):
    """Which layers stay with the client, and how they are trained."""

    personal_layers: int = fp.option(1, "How many of the last layers stay with the client (K_P).", least=1)
    head_epochs: int = fp.option(
        0,
        "If above 0, FedRep: so many epochs on the client's own layers alone, then local-epochs on the others.",
        least=0,
    )


class FedPer(fp.FedAvg):
    """The server averages the base layers, as FedAvg does; they are its whole model."""

    headline = "accuracy_personal_mean"

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        personal_names = fp.layers.last_layers(list(model), prunable, self.config.table(FedPerOptions).personal_layers)
        self.model = {name: tensor for name, tensor in model.items() if name not in personal_names}


class FedPerClient(fp.ImageClient):
    """The client keeps all tensors and sends those of the base layers."""

    not_summed = ""

    def __init__(self, config: fp.Config, place: fp.NodeContext) -> None:
        super().__init__(config, place)
        count = self.config.table(FedPerOptions).personal_layers
        self.own = set(fp.layers.last_layers(self.shared, self.prunable, count))
        self.shared = [name for name in self.shared if name not in self.own]

    def begin(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return {**self.own_model(state), **task.payload.tensors}

    def personal_model(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return self.begin(task, state)

    def received_scores(self, task: fp.Task, state: fp.State) -> dict[str, float | None]:
        """There is no global accuracy, since no model is global as a whole."""
        return {"accuracy-received": self.test_accuracy(task, self.begin(task, state))}

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        head_epochs = self.config.table(FedPerOptions).head_epochs
        if not head_epochs:
            return super().local_update(task, state)
        base = [name for name in self.sizes if name not in self.own]
        fp.load_state_tensors(self.model, self.begin(task, state))
        self.train(task, role="train head", epochs=head_epochs, frozen=base)
        result = self.train(task, frozen=self.own & self.sizes.keys())
        tensors = fp.state_tensors(self.model, include_buffers=True)
        flops = self.costs.training(epochs=self.config.local_epochs)
        flops += self.costs.training(epochs=head_epochs) / 3  # no backward pass of the base
        payload = fp.Payload({name: tensors[name] for name in self.shared})
        return fp.Update(payload, fp.State(fp.grouped(weights=tensors)), result, flops)


fp.register_system(
    "fedper",
    strategy=FedPer,
    client=FedPerClient,
    summary="FedPer and FedRep: the last layers stay with each client",
    options=FedPerOptions,
)
