"""A training step on a part of the network: some weights left out, or really a smaller network of leading units.

Whatever a step leaves out is as it was when the step is over: value, momentum and running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedprune_app.core.structured import Extents, lead

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """What one step trains.

    ``masks``: weights where False are 0 in this step. ``extents``: how far the step's smaller network reaches into
    tensors, per dimension; those of one unit agree, so that the network is whole. ``norm_groups``: groups that a
    GroupNorm then has left, by its name. ``student``: how far a still smaller network within reaches, that learns from
    the step's in the same step (self-distillation).
    """

    masks: Mapping[str, Tensor] = field(default_factory=dict)
    extents: Extents = field(default_factory=dict)
    norm_groups: Mapping[str, int] = field(default_factory=dict)
    student: Extents | None = None


@dataclass(frozen=True)
class Work:
    """What one step computes with, and the tensors it changes: four parallel lists, the gradients zero before it."""

    network: Network
    named_values: Mapping[str, Tensor]
    named_gradients: Mapping[str, Tensor]
    values: list[Tensor]
    gradients: list[Tensor]
    velocity: list[Tensor] | None
    kept: list[Tensor] | None
    keep: Mapping[str, Tensor] = field(default_factory=dict)  # by name, 1 where the step has a weight, 0 elsewhere
    named_kept: Mapping[str, Tensor] = field(default_factory=dict)  # kept, by name; empty without masks
    student: Network | None = None  # its gradients add up with the network's

    def trained(self) -> dict[str, Tensor]:
        """By name, 1 where the step changes a weight by its gradient, 0 elsewhere."""
        ones = {name: torch.ones_like(gradient) for name, gradient in self.named_gradients.items()}
        for masks in (self.named_kept, self.keep):
            ones |= {name: ones[name] * mask for name, mask in masks.items() if name in ones}
        return ones


@contextmanager
def put_aside(
    masks: Mapping[str, Tensor], values: Mapping[str, Tensor], velocity: Mapping[str, Tensor] | None
) -> Iterator[dict[str, Tensor]]:
    """Meanwhile, weights and their momentum are 0 where the masks are False; then they come back.

    The masks as numbers, 1 or 0: a product with those is many times faster than anything with a bool tensor.
    """
    keep = {name: mask.to(values[name].dtype) for name, mask in masks.items()}
    at_work = [(tensors[name], keep[name]) for tensors in (values, velocity) if tensors is not None for name in keep]
    with torch.no_grad():
        aside = [tensor.addcmul(tensor, kept, value=-1) for tensor, kept in at_work]
        for tensor, kept in at_work:
            tensor.mul_(kept)
    yield keep
    with torch.no_grad():
        for (tensor, _), rest in zip(at_work, aside, strict=True):
            tensor.add_(rest)


@contextmanager
def smaller(
    model: nn.Module,
    part: Part,
    values: Mapping[str, Tensor],
    velocity: Mapping[str, Tensor] | None,
    kept: Mapping[str, Tensor] | None,
) -> Iterator[Work]:
    """The network of the leading units: the values to change are views of the full one's."""
    names = list(values)
    cut = {name: lead(values[name], part.extents.get(name)) for name in names}
    leaves = {name: view.detach().clone().requires_grad_() for name, view in cut.items()}  # dense in memory
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def network_of(reach: Extents) -> Network:
        inner = {name: lead(leaf, reach.get(name)) for name, leaf in leaves.items()}
        others = {n: lead(own[n].detach(), dims) for n, dims in reach.items() if n in own and n not in leaves}

        def network(images: Tensor) -> Tensor:
            logits: Tensor = torch.func.functional_call(model, {**inner, **others}, (images,))
            return logits

        return network

    def cut_too(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: lead(tensors[name], part.extents.get(name)) for name in names}

    cut_velocity = None if velocity is None else list(cut_too(velocity).values())
    cut_kept = {} if kept is None else cut_too(kept)
    norms = [(model.get_submodule(name), count) for name, count in part.norm_groups.items()]
    counts = [getattr(norm, "num_groups") for norm, _ in norms]  # noqa: B009 - mypy knows only nn.Module
    for norm, count in norms:
        norm.num_groups = count  # type: ignore[assignment]
    try:
        yield Work(
            network_of(part.extents),
            cut,
            gradients,
            list(cut.values()),
            list(gradients.values()),
            cut_velocity,
            None if kept is None else list(cut_kept.values()),
            named_kept=cut_kept,
            student=None if part.student is None else network_of(part.student),
        )
    finally:
        for (norm, _), count in zip(norms, counts, strict=True):
            norm.num_groups = count
