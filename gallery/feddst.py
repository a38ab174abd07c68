"""FedDST, federated dynamic sparse training: one sparse model whose mask clients move and the server settles.

Bibikar, Vikalo, Wang, Chen, "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning
Better", AAAI 2022, Algorithms 1 and 2. All clients train under the server's mask. In rounds 2, ΔR + 2, ... each drops a
share of its smallest weights on the way, grows as many where its dense gradient is largest, and trains on. The server
averages each weight over those that kept it, and prunes the average by magnitude to the densities of the layers (ERK).
The share is α at first, falls by a cosine over half of the rounds, and masks then stay.

Deviations: a client readjusts after half of its local epochs (the code by default after the last of ten) by the
gradient of a batch drawn anew. The code's share does not fall: it computes the cosine, and only asks whether it has
ended. All layers replace the same share; the code prunes to its own form of ERK at a lower density, and grows back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprune_app import extend as fp


@dataclass(frozen=True)
class FedDSTOptions(fp.Table):
    """When and how far masks move; ``density`` is that of the weights of convolutions and linear layers."""

    rounds_between: int = fp.option(10, "In every so many-th round clients move the mask (ΔR).", least=1)
    prune_rate: float = fp.option(0.5, "The share of the weights that is replaced at first (α).", least=0, most=1)

    def fixed_on_resume(self, common: object) -> Mapping[str, str]:
        return {"num-server-rounds": "masks move in the first half of them"}


def share_replaced(config: fp.Config, round: int) -> float:
    """Return which share of the weights clients replace in a round."""
    options, end = config.table(FedDSTOptions), max(1, config.num_server_rounds // 2)
    moves = (round - 2) % options.rounds_between == 0 and round <= end
    return fp.schedules.cosine_fraction(options.prune_rate, round - 1, end) if moves else 0.0


class FedDST(fp.FederatedStrategy):
    """The server has one sparse model, and its masks."""

    headline = "accuracy_global"
    paper_formula = "32 bits per kept weight both ways, masks not charged"

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        shapes = {name: model[name].shape for name in model if name in prunable}
        self.densities = fp.masks.erk_densities(shapes, self.config.density)
        self.masks = self.largest(model)
        self.model = dict(fp.Payload.pruned(model, self.masks).tensors)

    def largest(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks of the largest weights of each layer."""
        return {n: fp.masks.magnitude_masks({n: model[n]}, share)[n] for n, share in self.densities.items()}

    def send(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(round.participants, fp.Payload(self.model, self.masks))

    def send_to_evaluate(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(self.clients, fp.Payload(self.model, self.masks))

    def expect(self, round: fp.Round, client: int) -> fp.Schema:
        return fp.Schema.like(self.model, masked=self.prunable)

    def begin(self, round: fp.Round) -> None:
        self.mean = fp.aggregate.MaskedMean(len(round.participants), max(c.num_examples for c in self.clients.values()))

    def receive(self, round: fp.Round, reply: fp.Reply) -> None:
        self.mean.add(reply.update, reply.num_examples)

    def end(self, round: fp.Round) -> None:
        mean, holder_masks = self.mean.mixed(), self.mean.held(self.masks)
        if share_replaced(self.config, round.number):
            self.masks = {name: mask & holder_masks[name] for name, mask in self.largest(mean).items()}
        self.model = dict(fp.Payload.pruned({name: mean[name] for name in self.model}, self.masks).tensors)

    def paper_bytes(self, round: fp.Round) -> tuple[float, float]:
        num_bytes = 4.0 * len(round.participants) * fp.Payload(self.model, self.masks).num_kept()
        return num_bytes, num_bytes

    def state(self) -> fp.State:
        state = super().state()
        return fp.State({**state.tensors, **fp.grouped(masks=self.masks)}, state.meta)

    def restore(self, state: fp.State) -> None:
        super().restore(state)
        self.masks = state.group("masks")


class FedDSTClient(fp.ImageClient):
    """State: the last local ``weights`` and ``masks``."""

    validates = "received"

    def masks(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return state.group("masks") or dict(task.payload.masks)

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        masks, share = dict(task.payload.masks), share_replaced(self.config, task.round)
        epochs = self.config.local_epochs
        first_epochs = -(-epochs // 2) if share else epochs
        result, tensors = self.train_from_start(task, state, epochs=first_epochs, masks=masks)
        flops = self.costs.training(masks)
        if share and not result.diverged:
            draw = fp.rng.generator(self.config.seed, "readjust", self.client_id, task.round)
            batch = torch.randperm(self.num_examples, generator=draw)[: self.config.batch_size]
            images, labels = self.data.train_images[batch], self.data.train_labels[batch]
            slope = fp.dense_gradient(self.model, images, labels, device=self.device)
            flops += self.costs.gradient(len(labels))
            masks = fp.masks.prune_and_grow({name: tensors[name] for name in masks}, slope, masks, share)
            fp.load_state_tensors(self.model, fp.Payload.pruned(tensors, masks).tensors)
            if first_epochs < epochs:
                result = self.train(task, role="train on", epochs=epochs - first_epochs, masks=masks)
            tensors = fp.state_tensors(self.model, include_buffers=True)
        payload = fp.Payload({name: tensors[name] for name in self.shared}, masks)
        return fp.Update(payload, fp.State(fp.grouped(weights=tensors, masks=masks)), result, flops)


summary = "FedDST: one sparse model whose mask clients move and the server settles"
uses = ("density",)
fp.register_system("feddst", strategy=FedDST, client=FedDSTClient, summary=summary, options=FedDSTOptions, uses=uses)
