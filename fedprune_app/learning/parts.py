"""Training steps on a part of the network: without some weights, or as a smaller network.

The rest keeps its values, momentum and running statistics.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedprune_app.core.modules import tensors_of
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.structured import Extents, leading_block

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """The part of the network that one step trains.

    * ``masks``: weights are 0 in this step where their mask is False.
    * ``extents``: how far the step's smaller network extends into each tensor, per dimension. The extents of one unit
      agree, so that the network is consistent.
    * ``norm_groups``: the number of groups left in each GroupNorm, by its name.
    """

    masks: Tensors = field(default_factory=dict)
    extents: Extents = field(default_factory=dict)
    norm_groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The tensors that one step changes, of one client or of several at once.

    ``values``, ``gradients``, ``velocity`` and ``kept`` are parallel lists. ``by_client`` has the values and gradients
    of each client by name. ``rows`` has the gradients of several clients by parameter, each (clients, elements).
    """

    by_client: Sequence[tuple[Tensors, Tensors]]
    values: list[Tensor]
    gradients: list[Tensor]
    velocity: list[Tensor] | None
    kept: list[Tensor] | None
    keep: Tensors = field(default_factory=dict)  # by name, 1 where the step has a weight, 0 elsewhere
    rows: Sequence[Tensor] = ()


@dataclass(frozen=True, kw_only=True)
class Work(Changes):
    """The network of one client's step, and the tensors that it changes; gradients are zero before it."""

    network: Network
    named_kept: Tensors = field(default_factory=dict)  # kept, by name; empty without masks

    @property
    def named_values(self) -> Tensors:
        return self.by_client[0][0]

    @property
    def named_gradients(self) -> Tensors:
        return self.by_client[0][1]

    def trained(self) -> TensorDict:
        """Return, by name, 1 where the step changes a weight by its gradient and 0 elsewhere."""
        factors = {name: torch.ones_like(gradient) for name, gradient in self.named_gradients.items()}
        for masks in (self.named_kept, self.keep):
            factors |= {name: factors[name] * mask for name, mask in masks.items() if name in factors}
        return factors


@contextmanager
def weights_set_aside(masks: Tensors, values: Tensors, velocity: Tensors | None) -> Iterator[TensorDict]:
    """Set weights and their momentum to 0 where the masks are False; restore them afterwards.

    The context yields the masks as numbers, 1 or 0: a product with these is many times faster than with a bool tensor.
    """
    keep = {name: mask.to(values[name].dtype) for name, mask in masks.items()}
    pairs = [(tensors[name], keep[name]) for tensors in (values, velocity) if tensors is not None for name in keep]
    with torch.no_grad():
        remainders = [tensor.addcmul(tensor, mask, value=-1) for tensor, mask in pairs]
        for tensor, mask in pairs:
            tensor.mul_(mask)
    yield keep
    with torch.no_grad():
        for (tensor, _), remainder in zip(pairs, remainders, strict=True):
            tensor.add_(remainder)


@contextmanager
def leading_network(
    model: nn.Module,
    part: Part,
    values: Tensors,
    velocity: Tensors | None,
    kept: Tensors | None,
) -> Iterator[Work]:
    """Yield the network of the leading units, whose values are views of the full network's."""
    names = list(values)
    blocks = {name: leading_block(values[name], part.extents.get(name)) for name in names}
    leaves = {name: view.detach().clone().requires_grad_() for name, view in blocks.items()}  # dense in memory
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    tensors = tensors_of(model)

    other_extents = {name: dims for name, dims in part.extents.items() if name in tensors and name not in leaves}
    other_blocks = {name: leading_block(tensors[name].detach(), dims) for name, dims in other_extents.items()}

    def network(images: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(model, {**leaves, **other_blocks}, (images,))
        return logits

    def cut_tensors(tensors: Tensors) -> TensorDict:
        return {name: leading_block(tensors[name], part.extents.get(name)) for name in names}

    cut_velocity = None if velocity is None else list(cut_tensors(velocity).values())
    cut_kept = {} if kept is None else cut_tensors(kept)
    norms = [(model.get_submodule(name), count) for name, count in part.norm_groups.items()]
    counts = [getattr(norm, "num_groups") for norm, _ in norms]  # noqa: B009 - mypy knows only nn.Module
    for norm, count in norms:
        norm.num_groups = count  # type: ignore[assignment]
    try:
        yield Work(
            network=network,
            by_client=[(blocks, gradients)],
            values=list(blocks.values()),
            gradients=list(gradients.values()),
            velocity=cut_velocity,
            kept=None if kept is None else list(cut_kept.values()),
            named_kept=cut_kept,
        )
    finally:
        for (norm, _), count in zip(norms, counts, strict=True):
            norm.num_groups = count
