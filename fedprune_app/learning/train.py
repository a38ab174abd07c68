"""There is only one training loop: SGD on examples, with a few small arguments for what systems do differently."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from fedprune_app.learning.device import fast_layout, module_mode, move_to_device
from fedprune_app.learning.evaluate import check_examples
from fedprune_app.learning.flat import FlatParameters, flat_masks
from fedprune_app.learning.hooks import GradientHook, Objective, StepHook, cross_entropy, self_distillation
from fedprune_app.learning.parts import Part, Work, leading_network, weights_set_aside
from fedprune_app.learning.sgd import SGD, sgd_step

if TYPE_CHECKING:  # Opacus takes seconds to import, and most runs do without
    from fedprune_app.privacy.dpsgd import DPSGD

Augmenter = Callable[[Tensor, torch.Generator], Tensor]
"""An augmenter maps the positions (B,) of a batch's examples to images (B, ...), with draws from a CPU generator."""


class HowToTrain(TypedDict, total=False):
    """These are the arguments of :func:`train` with which a system says how its training differs from plain SGD."""

    masks: Mapping[str, Tensor] | None
    active: Mapping[str, Tensor] | None
    frozen: Collection[str]
    adjust_gradients: GradientHook | None
    after_step: StepHook | None
    after_epoch: Callable[[int], None] | None
    objective: Objective
    part: Callable[[int], Part] | None


@dataclass(frozen=True)
class TrainingResult:
    """A training result says what one call of :func:`train` did.

    ``loss_mean`` is over all examples of all epochs, each loss taken just before the step that it caused. It is nan or
    inf if training diverged; the caller decides what follows. Private training has no ``loss_mean``, since the loss is
    not private: there the weights tell whether training diverged.
    """

    loss_mean: float | None
    num_steps: int
    num_examples: int
    finite: bool = True  # the trained weights

    @property
    def diverged(self) -> bool:
        """This says whether the weights or the loss are not finite."""
        return not self.finite or (self.loss_mean is not None and not math.isfinite(self.loss_mean))


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    sgd: SGD,
    *,
    rng: torch.Generator,
    masks: Mapping[str, Tensor] | None = None,
    active: Mapping[str, Tensor] | None = None,
    frozen: Collection[str] = (),
    augment: Augmenter | None = None,
    adjust_gradients: GradientHook | None = None,
    after_step: StepHook | None = None,
    after_epoch: Callable[[int], None] | None = None,
    objective: Objective = cross_entropy,
    part: Callable[[int], Part] | None = None,
    private: DPSGD | None = None,
    device: torch.device | str | None = None,
) -> TrainingResult:
    """This trains ``model`` in place on images (N, ...) and labels (N,) by mean cross entropy, or by ``objective``.

    Every epoch takes the examples in a fresh permutation from ``rng``, a CPU generator. With ``sgd.steps_per_epoch`` an
    epoch takes as many permutations as that needs. The last batch of a permutation may be smaller. With ``augment``
    the images of a batch are ``augment(positions, rng)``, in place of rows of ``images``. The optimiser starts fresh.

    A step is, in this order:

    1. the gradient;
    2. ``adjust_gradients`` (a proximal term, say);
    3. clipping to ``sgd.max_grad_norm``;
    4. weight decay;
    5. the product with ``masks``;
    6. momentum, and the update of the parameters that are not in ``frozen``;
    7. ``after_step`` on the new values (a decoupled proximal step, say).

    Weights are set to 0 first where their mask in ``masks`` is False, and stay exactly 0. ``after_step`` must keep them
    so: nothing masks it. ``active`` takes the place of ``masks`` where a weight whose mask is False keeps its value.

    ``part(num_examples)`` says what of the network a step of so many examples trains. Hooks and clipping then see that
    part alone. The loss of a part with a student is :func:`~fedprune_app.learning.hooks.self_distillation`. The size of
    a private batch is itself private, so ``part`` then gets the expected size.

    ``after_epoch(epoch)``, from 0, can read the weights in the model, and copies what it keeps. In all hooks
    4-D tensors may have their channels last in memory: ``view(-1)`` does not work there. Model and data go to
    ``device`` once (default: where the model is), and the model stays there. The modules are in train mode during the
    call and in their former mode after it.

    With ``private`` the batches are Poisson samples. The gradient is then the sum of the examples' own gradients, each
    times ``masks`` and clipped, plus noise where the masks are True, over the expected batch size (see
    :mod:`fedprune_app.privacy.dpsgd`). Hooks see that gradient. An epoch is ``private.steps_per_epoch`` steps.

    The same arguments give the same bits, for one torch thread count. Raises ``ValueError`` for no examples, unequal
    counts, or a mask or frozen name that does not fit the model.
    """
    check_examples(images, labels)
    if masks and active:
        raise ValueError("masks and active are given, allowed: one of them")
    if private is not None and objective is not cross_entropy:
        raise ValueError("private training has no other objective than cross entropy")
    if private is not None and part is not None and not private.takes_parts:
        raise ValueError(f"grad_sample is {private.grad_sample!r}, allowed with parts of a network: auto, one-pass")
    num_examples = len(labels)
    device = move_to_device(model, device)
    labels = labels.to(device)
    if augment is None:
        images = images.to(device)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_steps = 0

    def examples(batch: Tensor) -> tuple[Tensor, Tensor]:
        return images.index_select(0, batch) if augment is None else augment(batch, rng), labels.index_select(0, batch)

    with (
        module_mode(model, training=True),
        fast_layout(model),
        FlatParameters(model, frozen) as flat,
        ExitStack() as on,
    ):
        kept = flat_masks(model, flat, masks or active or {}) if masks or active else None
        if masks:
            _prune(model, masks)
        velocity = torch.zeros_like(flat.values) if sgd.momentum else None
        whole = Work(
            model,
            flat.named_values,
            flat.named_gradients,
            [flat.values],
            [flat.gradients],
            None if velocity is None else [velocity],
            None if kept is None else [kept],
            named_kept={} if kept is None else flat.views(kept),
        )
        if private is not None:
            gradient = on.enter_context(private.attached(model, flat.named_gradients, whole.trained()))
        for epoch in range(sgd.epochs):
            if private is not None:
                batches = private.batches(num_examples)
            else:
                batches = sgd.batches(num_examples, rng, device)
            for batch in batches:
                size = len(batch) if private is None else round(private.sample_rate * num_examples)
                with _work(whole, model, flat, velocity, kept, part and part(size)) as work:
                    if private is not None:
                        if work.student is not None:
                            raise ValueError("private training has no students")
                        summed = gradient
                        if part is not None:
                            summed = gradient.of_part(work.network, work.named_gradients, work.trained())
                        for some in torch.split(batch.to(device), private.physical_batch):
                            if len(some):
                                summed.add(*examples(some))
                        summed.finish(private.sample_rate * num_examples)
                    else:
                        image_batch, label_batch = examples(batch)
                        if work.student is None:
                            loss = objective(work.network, image_batch, label_batch)
                        else:
                            loss = self_distillation(work.network, work.student, image_batch, label_batch)
                        loss.backward()  # type: ignore[no-untyped-call]
                        loss_sum.add_(loss.detach(), alpha=len(label_batch))
                    if adjust_gradients is not None:
                        adjust_gradients(work.named_values, work.named_gradients)
                    sgd_step(work, sgd)
                    if after_step is not None:
                        after_step(work.named_values)
                num_steps += 1
            if after_epoch is not None:
                after_epoch(epoch)
                flat.bind_gradients()
        finite = private is None or bool(flat.values.isfinite().all())
    num_taken = sgd.epochs * sgd.examples_per_epoch(num_examples)
    loss_mean = float(loss_sum) / num_taken if private is None else None
    return TrainingResult(loss_mean, num_steps, num_examples, finite)


@contextmanager
def _work(
    whole: Work, model: nn.Module, flat: FlatParameters, velocity: Tensor | None, kept: Tensor | None, part: Part | None
) -> Iterator[Work]:
    """The context gives what a step works on: the whole network as two flat tensors, or a part of the network."""
    named_velocity = None if part is None or velocity is None else flat.views(velocity)
    if part is not None and (part.extents or part.student is not None):
        named_kept = None if kept is None else flat.views(kept)
        with leading_network(model, part, flat.named_values, named_velocity, named_kept) as work:
            yield work
        return
    flat.gradients.zero_()
    if part is None:
        yield whole
        return
    with weights_set_aside(part.masks, flat.named_values, named_velocity) as keep:
        yield replace(whole, keep=keep)


def _prune(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """This sets the weights to 0 where their mask is False."""
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        weight = parameters[name].data
        weight.masked_fill_(~mask.to(weight.device), 0)  # and not times 0, which leaves -0 behind
