"""The training loop: SGD on examples, with arguments for the differences between systems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import Tensor, nn

from fedprune_app.core.cohort import train_in_cohort
from fedprune_app.core.graphs import CudaGraphs, RepeatedSteps
from fedprune_app.core.modules import module_mode
from fedprune_app.core.named import Tensors
from fedprune_app.core.rng import global_draws_of
from fedprune_app.learning.device import fast_layout, move_to_device
from fedprune_app.learning.flat import Flat, FlatLayout, FlatParameters, trained_names
from fedprune_app.learning.parts import Part
from fedprune_app.learning.sgd import SGD, sgd_step
from fedprune_app.learning.training import (
    Augmenter,
    GradientHook,
    Objective,
    StepHook,
    Training,
    TrainingResult,
)
from fedprune_app.learning.work import Grouped, SingleClient

if TYPE_CHECKING:  # Opacus takes seconds to import, and most runs do not need it
    from fedprune_app.privacy.dpsgd import DPSGD


class TrainingSettings(TypedDict, total=False):
    """Fields of :class:`Training` by which a system's training differs from plain SGD."""

    masks: Tensors | None
    active: Tensors | None
    frozen: Collection[str]
    adjust_gradients: GradientHook | None
    after_step: StepHook | None
    after_epoch: Callable[[int], None] | None
    objective: Objective
    part: Callable[[int], Part] | None


class TrainingFields(TrainingSettings, total=False):
    """All fields of :class:`Training` that :func:`train` passes on; the additional ones are the run's."""

    augment: Augmenter | None
    private: DPSGD | None
    precision: str
    grouped: bool
    recorder: CudaGraphs | None


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    sgd: SGD,
    *,
    rng: torch.Generator,
    device: torch.device | str | None = None,
    **how: Unpack[TrainingFields],
) -> TrainingResult:
    """Train ``model`` in place on images (N, ...) and labels (N,) by mean cross entropy, or by ``objective``.

    Every epoch uses the examples in a new permutation from ``rng``, a CPU generator. With ``sgd.steps_per_epoch`` an
    epoch uses as many permutations as needed. The last batch of a permutation may be smaller. With ``augment`` the
    images of a batch are ``augment(augment.draws(positions, rng))``, of the shape of ``images``' rows. The optimiser's
    state starts empty.

    A step is, in this order:

    1. the gradient;
    2. ``adjust_gradients`` (such as a proximal term);
    3. clipping to ``sgd.max_grad_norm``;
    4. weight decay;
    5. the product with ``masks``;
    6. momentum, and the update of the parameters that are not in ``frozen``;
    7. ``after_step`` on the new values (such as a decoupled proximal step).

    Weights are first set to 0 where their mask in ``masks`` is False, and stay exactly 0. ``after_step`` must keep them
    so: it is not masked. With ``active`` instead of ``masks`` a weight whose mask is False keeps its value.

    ``part(num_examples)`` returns the part of the network that a step of so many examples trains. Hooks and clipping
    then apply to that part alone. The size of a private batch is itself private, so ``part`` then gets the expected
    size.

    ``after_epoch(epoch)``, from 0, can read the weights in the model, and must copy what it keeps. In all hooks 4-D
    tensors may have their channels last in memory: ``view(-1)`` does not work there. Model and data are moved to
    ``device`` once (default: the model's), and the model stays there. ``precision`` is as in the key of that name;
    weights, gradients and the loss are always float32. The modules are in train mode during the call and in their
    former mode after it.

    With ``private`` the batches are Poisson samples. The gradient is then the sum of the examples' own gradients, each
    times ``masks`` and clipped, plus noise where the masks are True, over the expected batch size (see
    :mod:`fedprune_app.privacy.dpsgd`). Hooks get that gradient. An epoch is ``private.steps_per_epoch`` steps.

    With a ``recorder`` a step is recorded and replayed (see :mod:`fedprune_app.core.graphs`), unless it has hooks, is
    private, trains a part of the network or has another objective.

    With ``grouped`` a small network computes in the form in which clients of one process train together, even alone, so
    that its bits do not depend on the others. Without it the network is computed as it is, alone.

    The same arguments give the same bits, for one torch thread count. Raises ``ValueError`` for no examples, unequal
    counts, or a mask or frozen name that does not fit the model.
    """
    training = Training(model, images, labels, sgd, rng, device=move_to_device(model, device), **how)
    return train_in_cohort(training, train_cohort, waits=training.form is not None)


def train_cohort(trainings: Sequence[Training]) -> list[TrainingResult | Exception]:
    """Run several clients' trainings, those of the same form as one; the results are in the given order.

    The exception of a client's hook becomes the client's result. It does not end other trainings.
    """
    torch.set_num_threads(trainings[0].num_threads)  # each thread of this process has its own number of threads
    results: dict[int, TrainingResult | Exception] = {}
    pending = dict(enumerate(trainings))
    while pending:
        first = next(iter(pending.values()))
        group = [i for i, training in pending.items() if training is first or training.trains_alike(first)]
        group.sort(key=lambda i: -trainings[i].num_steps)  # so the last clients at work are a leading block
        try:
            results |= zip(group, _train([trainings[i] for i in group]), strict=True)
        except Exception as error:
            results |= dict.fromkeys(group, error)
        pending = {i: training for i, training in pending.items() if i not in results}
    return [results[i] for i in range(len(trainings))]


def _train(trainings: Sequence[Training]) -> list[TrainingResult | Exception]:
    """Run trainings of the same form as one; those with more steps come first."""
    first, sgd = trainings[0], trainings[0].sgd
    with ExitStack() as stack:
        learners = [_Learner(training, stack) for training in trainings]
        layout = FlatLayout(first.model, trained_names(first.model, first.frozen), len(trainings))
        flat = Flat(layout, sgd.momentum > 0, any(training.kept for training in trainings))
        for number, learner in enumerate(learners):
            learner.take_place(flat, number, stack)
        steps: SingleClient | Grouped = (
            SingleClient(first, flat, stack) if first.form is None else Grouped(trainings, flat)
        )
        # Only a plug-in's network draws, and it is trained alone. With one example less, the others in its batch get
        # other draws: so these must be secret if data are private.
        seed = first.rng.initial_seed() if first.private is None else first.private.noise.seed()
        stack.enter_context(global_draws_of(seed))
        is_plain = all(training.has_plain_steps for training in trainings)
        is_long = first.num_steps >= _WORTH_RECORDING
        repeated_steps = RepeatedSteps(first.recorder) if first.recorder and is_plain and is_long else None
        active = learners
        while active and not all(learner.error for learner in active):
            draws = [next(learner.batches) for learner in active]
            batches = [batch for batch, _ in draws]
            if repeated_steps is not None:
                size = steps.put(batches)
                repeated_steps(size, partial(_plain_step, steps, size, sgd))
            else:
                with steps.step(batches) as work:
                    for learner, (values, gradients) in zip(active, work.by_client, strict=True):
                        learner.call(learner.training.adjust_gradients, values, gradients)
                    sgd_step(work, sgd)
                    for learner, (values, _) in zip(active, work.by_client, strict=True):
                        learner.call(learner.training.after_step, values)
            for number, (learner, (_, epoch)) in enumerate(zip(active, draws, strict=True)):
                if epoch is not None:
                    learner.end_epoch(epoch, steps.loss_sums, number)
            active = [learner for learner in active if learner.result is None]
    return [outcome for learner in learners if (outcome := learner.error or learner.result) is not None]


_WORTH_RECORDING = 16  # steps; recording takes as long as some of ResNet-18's, whose time a graph cuts by an eighth


def _plain_step(steps: SingleClient | Grouped, size: int, sgd: SGD) -> None:
    sgd_step(steps.find_gradients(size), sgd)


class _Learner:
    """One client's training in progress.

    Until ``stack`` closes, its model is in train mode, and its parameters are views of flat tensors. Afterwards the
    model is as before, except for its values.
    """

    def __init__(self, training: Training, stack: ExitStack) -> None:
        self.training = training
        self.batches = training.batches()
        self.result: TrainingResult | None = None
        self.error: Exception | None = None
        model = training.model
        stack.enter_context(module_mode(model, training=True))
        frozen = {name for name, _ in model.named_parameters()}.difference(trained_names(model, training.frozen))
        stack.enter_context(fast_layout(model, training.images.shape[1:], frozen))

    def take_place(self, flat: Flat, number: int, stack: ExitStack) -> None:
        """Copy values and masks into the flat tensors; weights whose mask in ``masks`` is False become 0."""
        training = self.training
        stack.enter_context(FlatParameters(training.model, flat, number))
        if flat.kept is not None:
            kept = flat.layout.views(flat.kept, number)
            for name in kept.keys() & training.kept.keys():
                kept[name].copy_(training.kept[name])
        parameters = dict(training.model.named_parameters())
        for name, mask in (training.masks or {}).items():
            weight = parameters[name].data
            weight.masked_fill_(~mask.to(weight.device), 0)  # not times 0, which would leave -0

    def call(self, hook: Callable[..., object] | None, *arguments: object) -> None:
        """Call a hook, if there is one. After an error no hook is called again."""
        if hook is None or self.error is not None:
            return
        try:
            hook(*arguments)
        except Exception as error:
            self.error = error

    def end_epoch(self, epoch: int, loss_sums: Tensor, number: int) -> None:
        training = self.training
        self.call(training.after_epoch, epoch)
        if epoch == training.sgd.epochs - 1:
            self.result = training.result(float(loss_sums[number]))
