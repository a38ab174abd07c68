"""Sub-FedAvg (Hy), the client half: remove convolution channels by BatchNorm scale, prune linear layers by weight.

Vahidian, Morafah, Lin, "Personalized Federated Learning by Structured and Unstructured Pruning under Data
Heterogeneity", ICDCS workshops 2021, Algorithm 2, as in the released code: the two gates are independent of each other,
linear layers first; channels are ranked within their layer; thresholds are the code's (the text has 0.05).

Training and evaluation run on the small network, without the removed channels. State and messages are in the full
network's coordinates, which all clients share.
"""

import copy
from typing import ClassVar

import torch
from torch import nn

from clients.base import Update
from clients.context import NodeContext
from clients.node import ReplyFields, never_private
from clients.subfedavg import SubFedAvgClient, pruned
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core.flops import forward_flops, training_flops
from fedprune_app.core.masks import full_masks, mask_distance, prune_percent
from fedprune_app.core.named import TensorDict, Tensors, ValueDict
from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import (
    Kept,
    channel_distance,
    choose_channels,
    coordinate_masks,
    full_channels,
    gather,
    scatter,
    shrink,
)
from fedprune_app.engine.store import State, grouped
from fedprune_app.models import vision
from fedprune_app.models.initial import channels_of


class SubFedAvgHyClient(SubFedAvgClient):
    """State: ``weights`` in full coordinates, the ``channels`` kept per group, and the linear masks ``fc``."""

    declares: ClassVar = ReplyFields(evaluation=frozenset({"channel-density"}))

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        return never_private(config, "it ranks channels by BatchNorm, which mixes the examples of a batch")

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        self.groups = channels_of(*self.origin)
        self.full = self.model  # self.model is the small network from now on
        self.shapes = {name: t.shape for name, t in vision.state_tensors(self.full, include_buffers=True).items()}
        linear = [name for name, layer in self.full.named_modules() if isinstance(layer, nn.Linear)]
        self.fc_shapes = {f"{name}.weight": self.shapes[f"{name}.weight"] for name in linear}

    def begin(self, task: Task, state: State) -> TensorDict:
        """Return the received tensors under the masks; local norms are the client's own, at first the initial ones."""
        initial = vision.state_tensors(self.full, include_buffers=True)
        return pruned({**initial, **state.group("weights"), **task.payload.tensors}, self.masks(task, state))

    # --- masks --------------------------------------------------------------------------------------------------

    def channels(self, state: State) -> Kept:
        """Return masks of the kept channels, bool, by the name of their norm; all True at first."""
        return state.group("channels") or full_channels(self.groups)

    def evaluation(self, task: Task, state: State) -> tuple[int, ValueDict]:
        num_examples, fields = super().evaluation(task, state)
        mask = torch.cat(list(self.channels(state).values()))
        return num_examples, {**fields, "channel-density": int(mask.sum()) / len(mask)}

    def fc_masks(self, state: State) -> TensorDict:
        """Return the masks of the linear layers' weights, bool, by name; all True at first."""
        return state.group("fc") or full_masks(self.fc_shapes)

    def masks(self, task: Task, state: State) -> TensorDict:
        return self.coordinates(self.channels(state), self.fc_masks(state))

    def coordinates(self, kept: Kept, fc: Tensors) -> TensorDict:
        """Return masks of all full tensors, by the kept channels and the linear masks."""
        masks = full_masks(self.shapes) | coordinate_masks(self.groups, kept, self.shapes)
        return masks | {name: masks[name] & mask for name, mask in fc.items()}

    # --- the small network ----------------------------------------------------------------------------------------

    def work_with(self, tensors: Tensors, kept: Kept) -> None:
        """Set ``self.model`` to the network of these channels, with values from these full tensors."""
        self.model = shrink(copy.deepcopy(self.full), self.groups, kept)
        vision.load_state_tensors(self.model, gather(tensors, self.groups, kept))

    def test_accuracy(self, task: Task, tensors: Tensors, masks: Tensors | None = None) -> float | None:
        # a group's scales are masked where its channels are gone
        kept = {group.name: masks[group.scales[0]] for group in self.groups} if masks else full_channels(self.groups)
        self.work_with(tensors, kept)
        return self.accuracy(task, "test")

    # --- a round --------------------------------------------------------------------------------------------------

    def local_update(self, task: Task, state: State) -> Update:
        options = self.config.subfedavg
        kept, fc = self.channels(state), self.fc_masks(state)
        self.work_with(self.begin(task, state), kept)
        small_fc = gather(fc, self.groups, kept)
        scale_names = [name for group in self.groups for name in group.scales]

        def proposals() -> tuple[TensorDict, Kept]:
            weights = self.weights(small_fc)
            scales = scatter(self.weights(scale_names), self.groups, kept, self.shapes)
            return (
                prune_percent(weights, small_fc, options.prune_step),
                choose_channels(self.groups, scales, kept, options.channel_fraction, options.channel_floor),
            )

        first = small_fc, kept

        def after_epoch(epoch: int) -> None:
            nonlocal first
            if epoch == 0:
                first = proposals()

        result = self.train(task, masks=small_fc, after_epoch=after_epoch)
        layers = forward_flops(self.model, self.dataset.image_shape)
        flops = training_flops(layers, self.costs.examples(), small_fc)
        last = proposals()
        tensors = scatter(vision.state_tensors(self.model, include_buffers=True), self.groups, kept, self.shapes)

        percent_pruned = self._percent_pruned(self.coordinates(kept, fc))
        distance = mask_distance(first[0], last[0])
        if distance > options.fc_mask_distance and percent_pruned < self.target_rate:
            new_masks = scatter(
                self.mask_towards_target(small_fc, last[0], percent_pruned), self.groups, kept, self.shapes
            )
            candidate = tensors | pruned(tensors, new_masks)
            self.work_with(candidate, kept)
            if self.is_accurate_enough(task):
                tensors, fc = candidate, new_masks
        if channel_distance(first[1], last[1]) > options.channel_distance:
            candidate = tensors | pruned(tensors, self.coordinates(last[1], fc))
            self.work_with(candidate, last[1])
            if self.is_accurate_enough(task):
                tensors, kept = candidate, last[1]

        masks = self.coordinates(kept, fc)
        payload = Payload({n: tensors[n] for n in self.shared}, {n: masks[n] for n in self.shared})
        return Update(payload, State(grouped(weights=tensors, channels=kept, fc=fc)), result, flops)

    def last_step(self, missing: float, percent_pruned: float) -> float:
        """Return the step's percentage as in the released code: no cap, 5 less above 16, and at least 0.01."""
        percent = missing / (100 - percent_pruned) * 100
        percent = percent - 5 if percent > 16 else percent
        return percent if percent > 0 else 0.01
