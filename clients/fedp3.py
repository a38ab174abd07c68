"""FedP3, the client half: train its own layers and the kept weights of the others, send only its own layers.

Yi, Gazagnadou, Richtárik, Lyu, ICLR 2024, Algorithm 1, lines 7 to 13, and Algorithm 2. Where text and code differ:

* Weights that the server pruned stay pruned while the client trains, as in Algorithm 2; in the code they grow back
  until the next round overwrites them.
* ``Q_i`` selects the part of the network that a local step trains, as FjORD's ordered dropout does. Each call draws
  the part of one step. The client's own layers are trained in full, where the next layer uses them.
* All layers are trained, those that are not sent too, as in both. In its last round the code trains only the last
  layer, for 10 epochs; the text does not mention it, and it is not done here.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from clients.base import ImageClient, Scores, Update
from clients.context import NodeContext
from clients.node import parts_not_private
from clients.subfedavg import pruned
from clients.task import Task
from fedprune_app.config import FEDP3_COUNTS, Config, FedP3Options
from fedprune_app.core import rng
from fedprune_app.core.flops import BACKWARD_PER_FORWARD, training_flops
from fedprune_app.core.layers import layers_of
from fedprune_app.core.masks import magnitude_masks
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import ChannelGroup, LeadingCounts, leading_part
from fedprune_app.engine.store import State, grouped
from fedprune_app.learning.parts import Part
from fedprune_app.models import vision
from fedprune_app.models.initial import units_of

FJORD_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
Law = Callable[[np.random.Generator], float]


def share_law(minimum: float) -> Law:
    """Return the distribution of a step's share q: uniform in [minimum, 1]."""
    return lambda draw: minimum + (1 - minimum) * draw.random()


class UniformPruning:
    """Q_i that keeps each weight of these names with probability q, rounded to 2^-16, where ``masks`` are True.

    Source: FedP3, section 2, "uniform pruning".
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        masks: Tensors,
        law: Law,
        draw: np.random.Generator,
        layer_flops: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.shapes, self.masks, self.law, self.draw = shapes, masks, law, draw
        self.layer_flops, self.device = layer_flops, device
        self.flops = 0.0

    def __call__(self, num_examples: int) -> Part:
        threshold = round(self.law(self.draw) * 2**16)
        masks = {}
        for name, shape in self.shapes.items():
            numbers = np.frombuffer(self.draw.bytes(2 * shape.numel()), dtype="<u2")
            masks[name] = torch.from_numpy(numbers < threshold).view(shape)
        combined_masks = dict(self.masks) | {n: m & self.masks[n] if n in self.masks else m for n, m in masks.items()}
        self.flops += training_flops(self.layer_flops, num_examples, combined_masks)
        return Part(masks={name: mask.to(self.device) for name, mask in masks.items()})


class OrderedDropout:
    """Q_i that keeps the first ``ceil(q · size)`` of each group of hidden units.

    A group stays whole only if all its layers are in ``full_layers``: a full layer loses units if the next layer, which
    is not full, uses only the first ones.
    Source: FedP3, section 2, "uniform ordered dropout"; Horváth et al., "FjORD", NeurIPS 2021.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ChannelGroup],
        full_layers: Collection[str],
        masks: Tensors,
        law: Law,
        draw: np.random.Generator,
        layer_flops: Mapping[str, int],
    ) -> None:
        self.groups, self.law, self.draw, self.layer_flops = groups, law, draw, layer_flops
        self.model = model
        self.whole = {g.name for g in groups if all(p.tensor.rpartition(".")[0] in full_layers for p in g.slices)}
        weights = {name: p for name, p in model.named_parameters() if name.removesuffix(".weight") in layer_flops}
        self.sizes = {name: weight.numel() for name, weight in weights.items()}
        all_masks = {n: masks.get(n, torch.ones(1, dtype=torch.bool).expand(w.shape)) for n, w in weights.items()}
        self.counts = {name: LeadingCounts(mask) for name, mask in all_masks.items()}
        self.flops = 0.0

    def sized(self, share: float) -> Part:
        """Return the part of the network with this share of units."""
        shares = {group.name: 1.0 if group.name in self.whole else share for group in self.groups}
        reach, norm_groups = leading_part(self.model, self.groups, shares)
        return Part(extents=reach, norm_groups=norm_groups)

    def __call__(self, num_examples: int) -> Part:
        part = self.sized(self.law(self.draw))
        densities = {name: self.counts[name].within(part.extents.get(name)) / n for name, n in self.sizes.items()}
        small_flops = sum(flops * densities.get(f"{layer}.weight", 1) for layer, flops in self.layer_flops.items())
        self.flops += (1 + BACKWARD_PER_FORWARD) * small_flops * num_examples
        return part


# --- the client -------------------------------------------------------------------------------------------------------


class FedP3Client(ImageClient):
    """State: all ``weights``, and ``masks``, the P_i under which they were trained."""

    headless: frozenset[str] = frozenset()  # tensors that belong to no layer, which are only received
    not_summed = ""
    sends_parts = True

    @classmethod
    def why_not_summed(cls, config: Config) -> str:
        if (found := config.fedp3.aggregation) != "simple":
            return f"fedp3.aggregation is {found!r}, allowed with secure-sums: simple"
        return super().why_not_summed(config)

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Layers and masks need no noise: the server makes them from released values only."""
        return parts_not_private(config, f"fedp3.local {config.fedp3.local!r}") if config.fedp3.local != "fixed" else ""

    @property
    def options(self) -> FedP3Options:
        return self.config.fedp3

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        names = [name for name in vision.named_tensors(self.model) if name not in self.headless]
        self.layers = layers_of(names, self.prunable)
        self.head = list(self.layers)[-1]
        self.groups = units_of(*self.origin, alike=False) if self.options.local == "ordered-dropout" else ()
        if self.options.personal_head:
            self.shared = [name for name in self.shared if name not in self.layers[self.head]]

    # --- requested layers -------------------------------------------------------------------------------------------

    def own_layers(self, task: Task, state: State) -> list[str]:
        """Return L_i, as requested by the server, and the last layer.

        Raises ``ValueError`` for layers that the server must not request.
        """
        layer_names = list(task.fields["layers"])
        if unknown_names := [layer for layer in layer_names if layer not in self.layers]:
            raise ValueError(f"layer '{unknown_names[0]}' is asked for, allowed: {', '.join(self.layers)}")
        counts = FEDP3_COUNTS.get(self.options.layer_set, (len(layer_names),))
        if len(layer_names) not in counts:
            allowed = f"with fedp3.layer-set {self.options.layer_set!r}: {' or '.join(map(str, counts))}"
            raise ValueError(f"{len(layer_names)} layers are asked for, allowed {allowed}")
        latest = None if state.tensors else self.store.load()  # a server may claim that the client never trained
        last_names = (latest[1] if latest else state).meta.get("layers", layer_names)
        if last_names != layer_names and self.options.assignment != "per-round":
            allowed = f"{', '.join(last_names)}, as before: with others in turn the server would see the whole model"
            raise ValueError(f"layers {', '.join(layer_names)} are asked for, allowed: {allowed}")
        return [*layer_names, self.head]

    def global_masks(self, task: Task) -> TensorDict:
        """Return P_i: as received, or by the server's own rule for a dense model that is evaluated."""
        if task.payload.masks or not task.payload.tensors or "density" not in task.fields:
            return dict(task.payload.masks)
        density = float(task.fields["density"])
        dense = {n for layer in (*task.fields["layers"], self.head) for n in self.layers[layer]}
        weights = {n: t for n, t in task.payload.tensors.items() if n in self.prunable and n not in dense}
        if density == 1 or not weights:
            return {}
        return magnitude_masks(weights, density)

    def masks(self, task: Task, state: State) -> TensorDict:
        return state.group("masks") if state.tensors else self.global_masks(task)

    def begin(self, task: Task, state: State) -> TensorDict:
        """Line 8; tensors that are never sent (a personal head, local norms) are the client's own."""
        start = {**self.own_model(state), **task.payload.tensors}
        return start | pruned(start, self.global_masks(task))

    def received_scores(self, task: Task, state: State) -> Scores:
        start = self.begin(task, state)
        scores = {"accuracy-received": self.test_accuracy(task, start)}
        if not self.options.personal_head:  # with a personal head no global model is complete
            dense = {**start, **task.payload.tensors}
            has_pruned = bool(self.global_masks(task))
            scores["accuracy-global"] = self.test_accuracy(task, dense) if has_pruned else scores["accuracy-received"]
        return scores

    # --- a round ----------------------------------------------------------------------------------------------------

    def local_update(self, task: Task, state: State) -> Update:
        own_layers = self.own_layers(task, state)
        masks = self.global_masks(task)
        part = self.local_pruning(own_layers, masks, task.round)
        result, tensors = self.train_from_start(task, state, masks=masks, part=part)
        names = [name for layer in own_layers for name in self.layers[layer] if name in self.shared]
        payload = Payload({name: tensors[name] for name in names})  # line 12
        new_state = State(grouped(weights=tensors, masks=masks), {"layers": own_layers[:-1]})
        return Update(payload, new_state, result, part.flops if part else self.costs.training(masks))

    # --- Q_i --------------------------------------------------------------------------------------------------------

    def local_pruning(
        self, own_layers: list[str], masks: Tensors, round: int
    ) -> UniformPruning | OrderedDropout | None:
        """Return Q_i, which prunes each step's network further outside the client's own layers; None if fixed."""
        options = self.options
        if options.local == "fixed":
            return None
        law = share_law(options.local_density)
        draw = rng.numpy_generator(self.config.seed, "local pruning", self.client_id, round)
        shapes = {name: tensor.shape for name, tensor in vision.named_tensors(self.model).items()}
        if options.local == "uniform":
            own_names = {name for layer in own_layers for name in self.layers[layer]}
            other_shapes = {name: shapes[name] for name in self.prunable if name not in own_names}
            return UniformPruning(other_shapes, masks, law, draw, self.costs.by_layer, self.device)
        full_layers = {name.rpartition(".")[0] for layer in own_layers for name in self.layers[layer]}  # norms too
        return OrderedDropout(self.model, self.groups, full_layers, masks, law, draw, self.costs.by_layer)
