"""DP-SGD on masked models: per-example gradients are masked, clipped and summed, and noise is added under the mask.

Abadi et al. 2016. Noise is added where the mask is True. Batches are Poisson samples, so they differ in size and can be
empty. The sum is divided by the expected size, which is public. ``grad_sample`` is the method for per-example
gradients; it changes speed alone:

* ``hooks``: Opacus' GradSampleModule materialises them.
* ``one-pass``: one backward pass to the layers' outputs yields norms and clipped sums (Bu et al. 2023, "book-keeping"),
  with Opacus' rules per layer; linear layers never materialise anything. ``auto`` is this one, by
  benchmarks/dp_step.py.

Both use rules by layer, so a network is compared with autograd's own gradients before it is trained privately.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.modules import computation_key, generic_copy
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.rng import global_draws_of
from fedprune_app.privacy.clipped_sums import ClippedSum, attached, clip_factors, over_tensors
from fedprune_app.privacy.noise import Noise, noised


def check_model(model: nn.Module, name: str = "") -> None:
    """Raise ``ValueError``, one line, for a model with BatchNorm, which mixes the examples of a batch."""
    if norms := [key for key, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]:
        model_is = f"model is {name!r}" if name else "the model"
        raise ValueError(
            f"{model_is} with BatchNorm '{norms[0]}', allowed with dp.enabled: networks without, such as those with "
            "GroupNorm (-gn)"
        )


_checked_keys: set[Hashable] = set()  # networks that passed


def check_private(model: nn.Module, example_shape: Sequence[int], names: Sequence[str], grad_sample: str) -> None:
    """Raise ``ValueError``, one line, for a network whose parameters ``names`` cannot be trained privately.

    Each network is checked once, by :func:`check_model`, :func:`check_independence` and :func:`check_gradients`. It
    must be in training mode.
    """
    computation = computation_key(model)
    key = computation, tuple(example_shape), tuple(names), grad_sample
    if computation is not None and key in _checked_keys:
        return
    check_model(model)
    try:
        with warnings.catch_warnings(action="ignore"):  # about tensors that need a gradient only here
            check_independence(model, example_shape)
            check_gradients(model, example_shape, names, grad_sample)
    except ValueError:
        raise
    except Exception as error:  # a user's network may raise anything
        error_text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the network cannot be trained privately: {error_text}") from None
    _checked_keys.add(key)


def check_gradients(model: nn.Module, example_shape: Sequence[int], names: Sequence[str], grad_sample: str) -> None:
    """Raise ``ValueError``, one line, if a method's clipped sum differs from that of autograd's per-example gradients.

    A layer's rule knows neither the other uses of the layer's parameters nor to which example a row belongs. An
    example's own gradient is that of a batch of one; if the network draws, that of its loss in the batch, because draws
    depend on places. One example occurs twice, with two labels. A sum without clipping shows whose gradient is wrong.
    """
    draw = torch.Generator().manual_seed(0)
    model = generic_copy(model, draw)
    trained = {name: parameter.requires_grad_(name in names) for name, parameter in model.named_parameters()}
    trained = {name: trained[name] for name in names}
    images = _noise(model, example_shape, 16, draw)
    images[-1] = images[0]
    labels = torch.arange(len(images), device=images.device) % _outputs(model, images[:2]).shape[1]
    is_drawing = _is_drawing(model, images)

    def losses() -> Iterator[Tensor]:
        for part in [slice(None)] if is_drawing else [slice(k, k + 1) for k in range(len(images))]:
            with global_draws_of(0):
                losses_of_part = F.cross_entropy(model(images[part] * 1), labels[part], reduction="none")
            yield from losses_of_part

    def wrong_tensor(clip_norm: float) -> str | None:
        """Return the name of the first tensor with a wrong sum; a norm of 0 stands for half of the first example's."""
        expected = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
        for loss in losses():
            own = torch.autograd.grad(loss, [*trained.values()], retain_graph=is_drawing, materialize_grads=True)
            norm = over_tensors(torch.linalg.vector_norm(gradient).square() for gradient in own).sqrt()
            clip_norm = clip_norm or float(norm) / 2 or 1.0
            factor = float(clip_factors(norm.square(), clip_norm))
            for total, gradient in zip(expected.values(), own, strict=True):
                total.add_(gradient, alpha=factor)
        with attached(model, names, {}, clip_norm, grad_sample) as clipped_sum, global_draws_of(0):
            return _first_difference(clipped_sum(images * 1, labels), expected)

    if wrong_tensor(0.0) is None:
        return
    if name := wrong_tensor(math.inf):
        raise ValueError(
            f"the gradient of {name!r} is not what its layer's rule finds, allowed with dp.enabled: networks that "
            "use each layer once, as a layer, and overwrite nothing"
        )
    raise ValueError(
        "the network reorders or joins the examples of a batch, allowed with dp.enabled: networks in which each layer "
        "takes each example once, in its place"
    )


def _first_difference(sums: Tensors, expected: Tensors) -> str | None:
    """Return the name of the first tensor that differs by more than float32 rounding, also where 0 is expected."""
    largest = max(float(gradient.abs().sum()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((sums.get(name, gradient * 0) - gradient).norm())
        if not error <= 2e-3 * float(gradient.norm()) + 1e-7 * largest * gradient.numel() ** 0.5:
            return name
    return None


def _noise(model: nn.Module, example_shape: Sequence[int], most: int, draw: torch.Generator) -> Tensor:
    """Return ``most`` examples of noise on several scales, or fewer, but at least 6, for a large network."""
    cost = sum(parameter.numel() for parameter in model.parameters()) + 64 * math.prod(example_shape)
    shape = max(6, min(most, 2**24 // cost)), *example_shape
    scales = torch.rand(shape[0], generator=draw).add(0.2).view(-1, *[1] * len(example_shape))
    return (torch.randn(shape, generator=draw) * scales).to(next(model.parameters()))


@torch.no_grad()
def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    with global_draws_of(0):
        outputs: Tensor = model(images * 1)  # a copy, since a network may overwrite its input
    return outputs


def _is_drawing(model: nn.Module, images: Tensor) -> bool:
    """Return whether a network uses a global generator; equal outputs would not show that."""
    with global_draws_of(0):
        model(images[:1] * 1)
        later = _draws(images.device)
    with global_draws_of(0):
        return later != _draws(images.device)


def _draws(device: torch.device) -> tuple[float, ...]:
    return float(torch.rand(())), float(torch.rand((), device=device)), float(np.random.rand()), random.random()


def check_independence(model: nn.Module, example_shape: Sequence[int]) -> None:
    """Raise ``ValueError``, one line, for a network in which examples of a batch influence each other.

    Clipping then bounds no example's part. A copy computes on noise. An example's output must be the same in batches of
    other sizes, orders and repetitions; if the network draws, it must be the same when other examples are replaced.
    Also raises for a buffer or parameter that the forward pass changes: it would leave the client without noise. The
    model and the global generators are not changed.
    """
    draw = torch.Generator().manual_seed(0)
    model = generic_copy(model, draw)
    versions = {name: (id(tensor), tensor._version) for name, tensor in _tensors_of(model)}
    pool = torch.cat([_noise(model, example_shape, 128, draw) for _ in range(2)])
    size = len(pool) // 2
    outputs = torch.cat([_outputs(model, images) for images in (pool[:size], pool[size:])])
    if _is_drawing(model, pool):  # draws depend on places
        parts = torch.arange(size) % 2, torch.randint(2, (size,), generator=draw)
        batches = [torch.arange(size) + size * part for part in parts]
    else:
        batches = [torch.randint(2 * size, (count,), generator=draw) for count in (1, 3, size)]
    atol = 1e-4 * float(outputs.abs().max())
    is_mixing = not all(torch.allclose(_outputs(model, pool[batch]), outputs[batch], 1e-4, atol) for batch in batches)
    for name, tensor in _tensors_of(model):
        if versions.get(name) != (id(tensor), tensor._version):
            raise ValueError(
                f"the network changes {name!r} as it computes, allowed with dp.enabled: networks that change nothing "
                "of theirs, which would leave the client without noise"
            )
    if is_mixing:
        raise ValueError(
            "the network mixes the examples of a batch, allowed with dp.enabled: networks in which the output for an "
            "example depends on that example alone"
        )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    yield from model.named_parameters()


# --- DP-SGD -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DPSGD:
    """How private gradients are made: noise, clipping, Poisson sampling and groups.

    At most ``physical_batch`` examples are processed at a time, which changes memory and not the result (except the
    order of float sums). The options declare the ranges. ``num_units`` count as known, with blanks for missing ones; by
    default it is the actual number.

    The protected unit is an example, or with ``groups`` (N,), which numbers each example's group from 0 on, all
    examples of a group. A group in a step has at most ``group_limit`` examples there, redrawn for each step, and adds
    the clipped mean of their gradients to the sum.
    """

    noise_multiplier: float
    clip_norm: float
    sample_rate: float
    steps_per_epoch: int
    noise: Noise
    grad_sample: str = "auto"
    physical_batch: int = 256
    num_units: int = 0
    groups: Tensor | None = None
    group_limit: int = 1

    def count(self, num_examples: int) -> int:
        """Return how many examples or groups there are."""
        return num_examples if self.groups is None else len(self.groups.bincount())

    def batches(self, num_examples: int) -> Iterator[Tensor]:
        """Draw the positions of each step's examples in one epoch.

        Each example or group is sampled independently with ``sample_rate``.
        """
        for _ in range(self.steps_per_epoch):
            drawn = self.noise.uniform(self.count(num_examples)) < self.sample_rate
            yield drawn.nonzero().squeeze(1) if self.groups is None else self._examples_of(drawn, self.groups)

    def _examples_of(self, drawn: Tensor, groups: Tensor) -> Tensor:
        """Return the positions of the drawn groups' examples, at most ``group_limit`` per group."""
        positions = drawn[groups].nonzero().squeeze(1)
        counts = groups[positions].bincount()
        if not bool((counts > self.group_limit).any()):
            return positions
        shuffled = positions[self.noise.uniform(len(positions)).argsort()]
        by_group = shuffled[groups[shuffled].argsort(stable=True)]
        ranks = torch.cat([torch.arange(count) for count in counts.tolist()])  # of each example within its group
        return by_group[ranks < self.group_limit].sort().values

    def parted(self, batch: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the positions of a batch's examples that are alone of their group, and those of each other group."""
        if self.groups is None:
            return batch, ()
        groups = self.groups[batch]
        counts = groups.bincount()
        is_alone = counts[groups] == 1
        others = batch[~is_alone]
        by_group = others[self.groups[others].argsort(stable=True)]
        return batch[is_alone], torch.split(by_group, counts[counts > 1].tolist())

    def add_noise(self, gradients: Tensors, kept: Tensors, expected_batch: float) -> None:
        """Add noise to a batch's sums ``gradients``, where ``kept`` is 1, and divide them by ``expected_batch``.

        The noised sum is rounded to the gradient's dtype once. All that follows is post-processing.
        """
        std = self.noise_multiplier * self.clip_norm
        size, device = sum(gradient.numel() for gradient in gradients.values()), next(iter(gradients.values())).device
        draws = self.noise.gaussian(size, device)
        start = 0
        for name, gradient in gradients.items():
            part = draws[start : start + gradient.numel()].view(gradient.shape)
            start += gradient.numel()
            gradient.copy_(noised(gradient, part, std)).mul_(kept[name]).div_(expected_batch)

    @contextmanager
    def attached(
        self,
        model: nn.Module,
        gradients: Tensors,
        kept: Tensors,
        example_shape: Sequence[int] | None = None,
    ) -> Iterator[Step]:
        """Yield an object that writes private gradients into ``gradients`` during a training.

        The names of ``gradients`` are the trained parameters. ``kept`` are 1 or 0 by name, in the gradients' shapes.
        With ``example_shape`` the network is checked by :func:`check_private`, which raises ``ValueError`` for one that
        cannot be trained privately.
        """
        if example_shape is not None:
            check_private(model, example_shape, list(gradients), self.grad_sample)
        with attached(model, list(gradients), _masks(kept), self.clip_norm, self.grad_sample) as clipped_sum:
            yield Step(self, model, clipped_sum, gradients, kept)


@dataclass(frozen=True)
class Step:
    """A step puts private gradients into ``gradients``: examples and groups are added, then noise."""

    settings: DPSGD
    network: Callable[[Tensor], Tensor]
    clipped_sum: ClippedSum
    gradients: Tensors
    kept: Tensors

    def of_part(self, network: Callable[[Tensor], Tensor], gradients: Tensors, kept: Tensors) -> Step:
        """Return the same step for a part of the model, with the same layers.

        ``gradients`` and ``kept`` have the part's shapes.
        """
        clipped_sum = partial(self.clipped_sum, network=network, masks=_masks(kept))
        return replace(self, network=network, clipped_sum=clipped_sum, gradients=gradients, kept=kept)

    def add(self, images: Tensor, labels: Tensor) -> None:
        if len(labels):
            for name, total in self.clipped_sum(images, labels).items():
                self.gradients[name].add_(total)

    def add_group(self, chunks: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the clipped mean of the gradients of one group's examples, processed chunk by chunk.

        ``gradients`` are the tensors to which autograd adds. A group whose gradient is not finite adds nothing.
        """
        totals = {name: gradient.clone() for name, gradient in self.gradients.items()}
        for gradient in self.gradients.values():
            gradient.zero_()
        count = 0
        for images, labels in chunks:
            F.cross_entropy(self.network(images), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
            count += len(labels)
        norms = []
        for name, gradient in self.gradients.items():
            gradient.mul_(self.kept[name])
            gradient.div_(count)
            norms.append(torch.linalg.vector_norm(gradient))
        squares = torch.stack(norms).square().sum()
        factor = float(clip_factors(squares, self.settings.clip_norm))
        for name, gradient in self.gradients.items():
            if math.isfinite(factor):
                totals[name].add_(gradient, alpha=factor)
            gradient.copy_(totals[name])

    def finish(self, expected_batch: float) -> None:
        """Add noise after all examples of the batch, and divide the sum by ``expected_batch``."""
        self.settings.add_noise(self.gradients, self.kept, expected_batch)


def _masks(kept: Tensors) -> TensorDict:
    return {name: mask for name, mask in kept.items() if not bool(mask.all())}
