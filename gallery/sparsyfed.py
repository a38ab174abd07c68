"""SparsyFed: weights that like to be 0, activations that are pruned alike, and the largest weights alone are sent.

Guastella, Sani, Iacob, Mora, Bellavista, Lane, "SparsyFed: Sparse Adaptive Federated Training", ICLR 2025, Algorithm 1.

Each weight is ``θ = sign(ω) |ω|^β``, and steps are taken on ω, so that small weights move little (Powerpropagation). A
weight's gradient is of its layer's largest inputs alone, of as large a share as the layer has weights. A client keeps
and sends its largest weights, of all layers together. The server averages ω, zeros included, so that weights may grow.

Deviations: what travels and is stored is θ, the network that computes, and the server takes the roots. θ begins as the
usual initial weights. Clipping and weight decay are of θ; momentum is refused, since a step on ω would not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from fedprune_app import extend as fp


@dataclass(frozen=True)
class SparsyFedOptions(fp.Table):
    """Exponent of the weights; ``density`` is that of the weights of convolutions and linear layers."""

    exponent: float = fp.option(1.25, "The power that makes weights of parameters (β); with 1 they are alike.", least=1)


def power(tensors: Mapping[str, Tensor], names: Iterable[str], exponent: float) -> dict[str, Tensor]:
    """Return tensors of which those of these ``names`` are to the power, with their signs."""
    return {**tensors, **{name: tensors[name].sign() * tensors[name].abs() ** exponent for name in names}}


class SparsyFed(fp.FedAvg):
    """The server averages parameters, and keeps and sends weights."""

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.exponent = self.config.table(SparsyFedOptions).exponent
        if self.config.momentum:
            raise fp.ConfigError("momentum", self.config.momentum, "0", condition="with system 'sparsyfed'")

    def expect(self, round: fp.Round, client: int) -> fp.Schema:
        return fp.Schema.like(self.model, masked=self.prunable)

    def receive(self, round: fp.Round, reply: fp.Reply) -> None:
        tensors = power(reply.update.tensors, self.prunable, 1 / self.exponent)
        self.mean.add(fp.Payload(tensors), self.weight_of(reply.client))

    def end(self, round: fp.Round) -> None:
        self.model = power(self.mean.mean(self.model), self.prunable, self.exponent)


class SparsyFedClient(fp.ImageClient):
    """State: the last local ``weights`` and their ``masks``."""

    validates = "received"

    def __init__(self, config: fp.Config, place: fp.NodeContext) -> None:
        super().__init__(config, place)
        self.saving: list[saved_tensors_hooks] = []
        self.inputs: dict[str, float] = {}  # by weight, the share of the layer's inputs that its gradient sees
        for name in self.prunable:
            layer = self.model.get_submodule(name.rpartition(".")[0])
            layer.register_forward_pre_hook(self.begin_saving(name))
            layer.register_forward_hook(lambda *_: self.saving.pop().__exit__() if self.saving else None)

    def begin_saving(self, name: str) -> Callable[[nn.Module, object], None]:
        """Return a hook that prunes what a layer saves of its inputs for the backward pass, while it trains."""

        def largest(saved: Tensor, weight: Tensor) -> Tensor:
            if saved.data_ptr() == weight.data_ptr():
                return saved
            mask = fp.masks.magnitude_masks({name: saved}, self.inputs.get(name, 1.0))[name]
            return torch.where(mask, saved, 0)

        def enter(layer: nn.Module, _: object) -> None:
            if layer.training:
                weight = layer.get_parameter("weight")
                self.saving.append(saved_tensors_hooks(lambda saved: largest(saved, weight), lambda saved: saved))
                self.saving[-1].__enter__()

        return enter

    def masks(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return state.group("masks")

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        exponent, rate = self.config.table(SparsyFedOptions).exponent, self.config.learning_rates[task.round]
        begin = self.begin(task, state)
        kept = {name: begin[name] != 0 for name in self.prunable}
        self.inputs = {name: float(mask.double().mean()) for name, mask in kept.items()}

        def on_parameters(values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
            roots = power(values, self.prunable, 1 / exponent)
            slope = {name: exponent * roots[name].abs() ** (exponent - 1) * gradients[name] for name in self.prunable}
            for name, weight in power({n: roots[n] - rate * slope[n] for n in slope}, slope, exponent).items():
                gradients[name].copy_((values[name] - weight) / rate)

        def objective(network: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(network(images), labels)  # under a name of its own: layers with hooks train alone

        result, tensors = self.train_from_start(task, state, adjust_gradients=on_parameters, objective=objective)
        masks = fp.masks.magnitude_masks_across({name: tensors[name] for name in self.prunable}, self.config.density)
        tensors = dict(fp.Payload.pruned(tensors, masks).tensors)
        payload = fp.Payload({name: tensors[name] for name in self.shared}, masks)
        flops = self.costs.training(kept if exponent > 1 else None)  # a step on ω = 0 is 0, so no weight grows
        return fp.Update(payload, fp.State(fp.grouped(weights=tensors, masks=masks)), result, flops)


fp.register_system(
    "sparsyfed",
    strategy=SparsyFed,
    client=SparsyFedClient,
    summary="SparsyFed: weights that like to be 0, and the largest alone are sent",
    options=SparsyFedOptions,
    uses=("density",),
)
