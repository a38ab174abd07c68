"""FjORD, the client half: ordered dropout within the widest sub-network that the client can train.

Horváth et al., NeurIPS 2021, Algorithm 1. Each step draws a width p from {0.2, 0.4, ..., 1} up to the client's own and
trains that sub-network, computed as a smaller network. The paper's optional self-distillation is not offered. The paper
keeps BatchNorm statistics per width; here all widths share them.
"""

import numpy as np
from torch import nn

from clients.base import ImageClient, Update
from clients.context import NodeContext
from clients.fedp3 import FJORD_SHARES, OrderedDropout
from clients.node import parts_not_private
from clients.subfedavg import pruned
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core import rng
from fedprune_app.core.named import TensorDict
from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import (
    Extents,
    extents,
    leading_block,
    leading_count,
    leading_masks,
    zero_padded,
)
from fedprune_app.engine.store import State, grouped
from fedprune_app.models import vision
from fedprune_app.models.initial import units_of
from fedprune_app.models.names import chosen_name


class FjORDClient(ImageClient):
    """State: ``weights`` in the full network's coordinates, and ``masks``, False beyond the client's width."""

    validates = "global"  # FjORD is judged at full width

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Widths come from the server; a part's gradients are as private as the whole network's."""
        return parts_not_private(config, "system 'fjord'")

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        if any(isinstance(layer, nn.GroupNorm) for layer in self.model.modules()):
            name = chosen_name(config.model, config.dataset)
            raise ValueError(
                f"model is {name!r}, which has GroupNorm, allowed with system 'fjord': one without, or with BatchNorm"
            )
        if self.unshared:  # a client trains none beyond its width, so it could not evaluate at full width
            raise ValueError("batch-norm is 'local', allowed with system 'fjord' and a model with BatchNorm: averaged")
        self.shapes = {name: tensor.shape for name, tensor in vision.named_tensors(self.model).items()}
        self.groups = units_of(*self.origin, alike=True)

    def extents(self, task: Task) -> Extents:
        width = float(task.fields["width"])
        return extents(self.groups, {group.name: leading_count(group.size, width) for group in self.groups})

    def masks(self, task: Task, state: State) -> TensorDict:
        return state.group("masks") or leading_masks(self.extents(task), self.shapes)

    def begin(self, task: Task, state: State) -> TensorDict:
        """Return the sub-network in full coordinates; tensors that are not sent (local norms) are the client's own."""
        start = {**self.own_model(state), **zero_padded(task.payload.tensors, self.shapes)}
        return start | pruned(start, leading_masks(self.extents(task), self.shapes))

    def shares(self, width: float) -> list[float]:  # each step draws one
        return [*(share for share in FJORD_SHARES if share < width - 1e-9), width]

    def local_update(self, task: Task, state: State) -> Update:
        width, widest = float(task.fields["width"]), self.extents(task)
        shares = self.shares(width)

        def law(draw: np.random.Generator) -> float:
            return shares[int(draw.integers(len(shares)))]

        draw = rng.numpy_generator(self.config.seed, "ordered dropout", self.client_id, task.round)
        dropout = OrderedDropout(self.model, self.groups, (), {}, law, draw, self.costs.by_layer)
        result, tensors = self.train_from_start(task, state, part=dropout)
        sent = {name: leading_block(tensors[name], widest.get(name)).contiguous() for name in self.shared}
        masks = {n: m for n, m in leading_masks(widest, self.shapes).items() if n in tensors}
        return Update(Payload(sent), State(grouped(weights=tensors, masks=masks)), result, dropout.flops)
