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

from fedprune_app.extend import (
    Config,
    FedAvg,
    ImageClient,
    Payload,
    Place,
    RunContext,
    State,
    Table,
    Task,
    Update,
    grouped,
    layers,
    load_state_tensors,
    option,
    register_system,
    state_tensors,
)


@dataclass(frozen=True)
class FedPerOptions(Table):
    """These options are FedPer's."""

    personal_layers: int = option(1, "How many of the last layers stay with the client (K_P).", least=1)
    head_epochs: int = option(
        0,
        "If above 0, FedRep: so many epochs on the client's own layers alone, then local-epochs on the others.",
        least=0,
    )


class FedPer(FedAvg):
    """The server's model is the base layers, and it averages them as FedAvg does."""

    headline = "accuracy_personal_mean"

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        own = layers.last_layers(list(model), prunable, self.config.table(FedPerOptions).personal_layers)
        self.model = {name: tensor for name, tensor in model.items() if name not in own}


class FedPerClient(ImageClient):
    """The client keeps all tensors and sends those of the base layers."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__(config, place)
        count = self.config.table(FedPerOptions).personal_layers
        self.own = set(layers.last_layers(self.shared, self.prunable, count))
        self.shared = [name for name in self.shared if name not in self.own]

    def begin(self, task: Task, state: State) -> dict[str, Tensor]:
        return {**self.own_model(state), **task.payload.tensors}

    def personal_model(self, task: Task, state: State) -> dict[str, Tensor]:
        return self.begin(task, state)

    def received_scores(self, task: Task, state: State) -> dict[str, float | None]:
        """There is no global accuracy, since no model is global as a whole."""
        return {"accuracy-received": self.test_accuracy(task, self.begin(task, state))}

    def local_update(self, task: Task, state: State) -> Update:
        head_epochs = self.config.table(FedPerOptions).head_epochs
        if not head_epochs:
            return super().local_update(task, state)
        base = [name for name in self.sizes if name not in self.own]
        load_state_tensors(self.model, self.begin(task, state))
        self.train(task, role="train head", epochs=head_epochs, frozen=base)
        result = self.train(task, frozen=self.own & self.sizes.keys())
        tensors = state_tensors(self.model, include_buffers=True)
        flops = self.costs.training(epochs=head_epochs + self.config.local_epochs)
        return Update(Payload({n: tensors[n] for n in self.shared}), State(grouped(weights=tensors)), result, flops)


register_system(
    "fedper",
    strategy=FedPer,
    client=FedPerClient,
    summary="FedPer and FedRep: the last layers stay with each client",
    options=FedPerOptions,
)
