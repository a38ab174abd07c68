"""FedP3's Q_i says which part of the network one local step trains; FjORD's ordered dropout is one such rule.

Each call draws the part of one step. The client's own layers are always trained in full. ``flops`` counts what the
steps so far took, forward and backward.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedprune_app.core.flops import BACKWARD_PER_FORWARD, training_flops
from fedprune_app.core.structured import ChannelGroup, LeadingCounts, extents, leading_count
from fedprune_app.learning.parts import Part

FJORD_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
Law = Callable[[np.random.Generator], float]


def share_law(minimum: float) -> Law:
    """Return the law by which a step's share q is drawn: uniformly in [least, 1]."""
    return lambda draw: minimum + (1 - minimum) * draw.random()


class UniformPruning:
    """Uniform pruning keeps each weight of these names with probability q, to 2^-16.

    Where ``masks`` are False there is no weight to keep.

    Source: FedP3, section 2, "uniform pruning".
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        masks: Mapping[str, Tensor],
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
    """Ordered dropout keeps the first ``ceil(q · size)`` of each group of hidden units.

    A group that only ``full_layers`` touch stays whole.

    A layer in ``full_layers`` keeps its units unless the next layer, not being full, takes in only the first ones.
    GroupNorm keeps whole groups, so that the small network computes what the masked one would. Source: FedP3, section
    2, "uniform ordered dropout"; Horváth et al., "FjORD", NeurIPS 2021.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ChannelGroup],
        full_layers: Collection[str],
        masks: Mapping[str, Tensor],
        law: Law,
        draw: np.random.Generator,
        layer_flops: Mapping[str, int],
    ) -> None:
        self.groups, self.law, self.draw, self.layer_flops = groups, law, draw, layer_flops
        self.norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, nn.GroupNorm)}
        self.whole = {g.name for g in groups if all(p.tensor.rpartition(".")[0] in full_layers for p in g.slices)}
        weights = {name: p for name, p in model.named_parameters() if name.removesuffix(".weight") in layer_flops}
        self.sizes = {name: weight.numel() for name, weight in weights.items()}
        all_masks = {n: masks.get(n, torch.ones(1, dtype=torch.bool).expand(w.shape)) for n, w in weights.items()}
        self.counts = {name: LeadingCounts(mask) for name, mask in all_masks.items()}
        self.flops = 0.0

    def sized(self, share: float) -> Part:
        """Return the part of the network that has this share of units."""
        counts = {
            g.name: g.size if g.name in self.whole else leading_count(g.size, share, self._multiple(g))
            for g in self.groups
        }
        groups_of = {
            name: counts[g.name] * norm.num_groups // g.size for g in self.groups for name, norm in self._norms_of(g)
        }
        return Part(extents=extents(self.groups, counts), norm_groups=groups_of)

    def __call__(self, num_examples: int) -> Part:
        part = self.sized(self.law(self.draw))
        densities = {name: self.counts[name].within(part.extents.get(name)) / n for name, n in self.sizes.items()}
        small_flops = sum(flops * densities[f"{layer}.weight"] for layer, flops in self.layer_flops.items())
        self.flops += (1 + BACKWARD_PER_FORWARD) * small_flops * num_examples
        return part

    def _norms_of(self, group: ChannelGroup) -> list[tuple[str, nn.GroupNorm]]:
        names = dict.fromkeys(piece.tensor.rpartition(".")[0] for piece in group.slices if piece.dim == 0)
        return [(name, self.norms[name]) for name in names if name in self.norms]

    def _multiple(self, group: ChannelGroup) -> int:
        return max([1, *(norm.num_channels // norm.num_groups for _, norm in self._norms_of(group))])
