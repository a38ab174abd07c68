"""One training: its settings, hooks and data, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.graphs import CudaGraphs
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.learning.evaluate import check_examples
from fedprune_app.learning.flat import check_masks, check_names, trained_names
from fedprune_app.learning.grouped import GroupedForm, NoGroupedForm, grouped_form
from fedprune_app.learning.parts import Network, Part
from fedprune_app.learning.sgd import SGD

if TYPE_CHECKING:  # Opacus takes seconds to import, and most runs do not need it
    from fedprune_app.privacy.dpsgd import DPSGD

# changes gradients in place, given all trained (parameters, gradients) by name
GradientHook = Callable[[Tensors, Tensors], None]
# changes all trained parameters in place, given by name, after an update
StepHook = Callable[[Tensors], None]
# the loss to differentiate, given the network, a batch's images and its labels
Objective = Callable[[Network, Tensor, Tensor], Tensor]


def cross_entropy(network: Network, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network(images), labels)


def proximal(anchor: Tensors, strength: float) -> GradientHook:
    """Return a hook that adds the gradient of ``strength / 2 ‖w − anchor‖²``, over the tensors in ``anchor``."""

    def pull(values: Tensors, gradients: Tensors) -> None:
        names = [name for name in values if name in anchor]
        differences = torch._foreach_sub([values[name] for name in names], [anchor[name] for name in names])
        torch._foreach_add_([gradients[name] for name in names], differences, alpha=strength)

    return pull


def adam() -> GradientHook:
    """Return a hook that turns each gradient into Adam's step, ``m̂ / (√v̂ + ε)``.

    Plain SGD without momentum is then Adam. A hook stores the moments of one training. Source: Kingma and Ba, ICLR
    2015, Algorithm 1.
    """
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    first: TensorDict = {}
    second: TensorDict = {}
    steps = 0

    def precondition(_: Tensors, gradients: Tensors) -> None:
        nonlocal steps
        steps += 1
        for name, gradient in gradients.items():
            if steps == 1:
                first[name], second[name] = torch.zeros_like(gradient), torch.zeros_like(gradient)
            m = first[name].mul_(beta1).add_(gradient, alpha=1 - beta1)
            v = second[name].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (v / (1 - beta2**steps)).sqrt_().add_(epsilon)
            gradient.copy_(m / (1 - beta1**steps) / scale)

    return precondition


_CPU = torch.device("cpu")


class Augmenter(Protocol):
    """How the images of a batch are made: in two steps, so that a device gets the draws of many batches at once."""

    def draws(self, positions: Tensor, rng: torch.Generator) -> Tensor:
        """Map the positions (B,) of a batch's examples to choices (B, ...), with draws from a CPU generator.

        The first number of each choice is the position.
        """

    def __call__(self, choices: Tensor) -> Tensor:
        """Return the images (B, ...) of these choices."""


# Up to these sizes of a step's forward pass and of a network, clients are trained faster together than one by one, by
# benchmarks/cohort_step.py on a CPU.
MOST_FLOPS, MOST_PARAMETERS = 100_000_000, 250_000


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of one call of :func:`train`: mean loss, steps, and whether it diverged.

    ``loss_mean`` is over all examples of all epochs, each loss computed just before its step. It is nan or inf if
    training diverged; the caller decides how to proceed. Private training has no ``loss_mean``, because the loss is not
    private: there only the weights show divergence.
    """

    loss_mean: float | None
    num_steps: int
    num_examples: int
    finite: bool = True  # the trained weights

    @property
    def diverged(self) -> bool:
        """Return whether the weights or the loss are not finite."""
        return not self.finite or (self.loss_mean is not None and not math.isfinite(self.loss_mean))


@dataclass(frozen=True, eq=False)
class Training:
    """The arguments of one call of :func:`train`, checked, and the values derived from them."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    sgd: SGD
    rng: torch.Generator
    masks: Tensors | None = None
    active: Tensors | None = None
    frozen: Collection[str] = ()
    augment: Augmenter | None = None
    adjust_gradients: GradientHook | None = None
    after_step: StepHook | None = None
    after_epoch: Callable[[int], None] | None = None
    objective: Objective = cross_entropy
    part: Callable[[int], Part] | None = None
    private: DPSGD | None = None
    device: torch.device = _CPU
    precision: str = "float32"
    grouped: bool = True
    recorder: CudaGraphs | None = None
    num_threads: int = field(default_factory=torch.get_num_threads)

    def __post_init__(self) -> None:
        if self.private is None or len(self.labels):  # all examples of a private client may be blanks
            check_examples(self.images, self.labels)
        if self.masks and self.active:
            raise ValueError("masks and active are given, allowed: one of them")
        is_plain = self.objective is cross_entropy and self.augment is None and self.precision == "float32"
        if self.private is not None and not is_plain:
            raise ValueError("private training is by cross entropy, without augmentation and in float32")
        # one backward pass to the layers' outputs works on a part of a network as on the whole
        private = self.private
        has_groups_or_parts = self.part is not None or (private is not None and private.groups is not None)
        if private is not None and private.grad_sample == "hooks" and has_groups_or_parts:
            raise ValueError("grad_sample is 'hooks', allowed with groups or parts of a network: auto, one-pass")
        check_names("frozen", self.frozen, self.model)
        check_masks(self.model, self.kept)

    @property
    def kept(self) -> Tensors:
        return self.masks or self.active or {}

    @property
    def has_plain_steps(self) -> bool:
        """Return whether each step has the same operations: cross entropy and SGD on a whole network."""
        has_hooks = self.adjust_gradients is not None or self.after_step is not None
        is_plain = self.objective is cross_entropy and self.part is None and self.private is None
        return is_plain and not has_hooks

    @property
    def steps_per_epoch(self) -> int:
        return self.sgd.steps_of(len(self.labels)) if self.private is None else self.private.steps_per_epoch

    @property
    def num_steps(self) -> int:
        return self.sgd.epochs * self.steps_per_epoch

    @property
    def batch_size(self) -> int:
        """Return the size of all batches except the last one of a permutation."""
        return min(self.sgd.batch_size, len(self.labels))

    @property
    def expected_batch(self) -> float:
        """Return the mean number of examples or groups in a private batch, whose own size is private."""
        private = self.private
        return 0 if private is None else private.sample_rate * (private.num_units or private.count(len(self.labels)))

    def batches(self) -> Iterator[tuple[Tensor, int | None]]:
        """Yield the positions of each step's examples, and the number of the epoch that ends with the step.

        With an augmentation it yields choices instead of positions.
        """
        num_examples = len(self.labels)
        draws = None if self.augment is None else partial(self.augment.draws, rng=self.rng)
        for epoch in range(self.sgd.epochs):
            if self.private is None:
                batches = self.sgd.batches(num_examples, self.rng, self.device, draws)
            else:
                batches = self.private.batches(num_examples)
            steps_left = self.steps_per_epoch
            for batch in batches:
                steps_left -= 1
                yield batch, None if steps_left else epoch

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """Return images and labels on the device; images to augment are not moved."""
        return self.images if self.augment else self.images.to(self.device), self.labels.to(self.device)

    def examples(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels of the examples at these positions, or for these choices."""
        images, labels = self.on_device
        if self.augment is None:
            return images.index_select(0, batch), labels.index_select(0, batch)
        return self.augment(batch), labels.index_select(0, batch[:, 0])

    def put_examples(self, batch: Tensor, images: Tensor, labels: Tensor) -> None:
        """Copy the examples at these positions, or for these choices, to the front of ``images`` and ``labels``."""
        if self.augment is None and len(batch) == len(images):
            torch.index_select(self.on_device[0], 0, batch, out=images)
            torch.index_select(self.on_device[1], 0, batch, out=labels)
        else:
            images[: len(batch)], labels[: len(batch)] = self.examples(batch)

    def result(self, loss_sum: float) -> TrainingResult:
        """Return the result of the finished training, given the sum of the examples' losses."""
        num_examples, private = len(self.labels), self.private is not None
        # a step may overflow after the last loss, which then would not show it
        finite = bool(torch.stack([p.isfinite().all() for p in self.model.parameters()]).all())
        loss_mean = None if private else loss_sum / (self.sgd.epochs * self.sgd.examples_per_epoch(num_examples))
        return TrainingResult(loss_mean, self.num_steps, num_examples, finite)

    @cached_property
    def form(self) -> GroupedForm | None:
        """Return the grouped form in which the network is trained; None if it is trained as it is.

        It depends on this training alone, so that a client's result does not depend on the others. A large step gains
        nothing: arithmetic and memory dominate its time, not the start of operations. A private step gains nothing
        either, by measurement: its time goes into per-example gradients and noise.
        """
        if not self.grouped or self.part is not None or self.private is not None or self.objective is not cross_entropy:
            return None
        if self.precision == "bf16" or sum(p.numel() for p in self.model.parameters()) > MOST_PARAMETERS:
            return None
        try:
            form = grouped_form(self.model, self.images.shape[1:])
        except NoGroupedForm:
            return None
        return form if form.flops * self.batch_size <= MOST_FLOPS else None

    def trains_alike(self, other: Training) -> bool:
        return (
            self.form is not None
            and self.form is other.form
            and self.sgd == other.sgd
            and self.batch_size == other.batch_size
            and trained_names(self.model, self.frozen) == trained_names(other.model, other.frozen)
            and self.device == other.device
        )
