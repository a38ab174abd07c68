"""Stochastic gradient descent: its settings, the examples of each step, and the step itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedprune_app.learning.parts import Changes


@dataclass(frozen=True)
class SGD:
    """How a network is trained: the update rule of ``torch.optim.SGD``, batches and epochs.

    ``max_grad_norm`` bounds the global L2 norm of the dense gradient, before masking (Dis-PFL's code); None does not
    clip. With ``steps_per_epoch`` an epoch has that many steps, over as many passes through the examples as needed.
    With 0 an epoch is one pass. With ``skips_lone`` a last batch of one example is left out, as for a network with
    BatchNorm that cannot be trained on one example. The options declare the ranges.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 10
    epochs: int = 1
    max_grad_norm: float | None = None
    steps_per_epoch: int = 0
    skips_lone: bool = field(default=False, repr=False)  # it follows from the network

    def _pass_size(self, num_examples: int) -> tuple[int, int]:
        """Return the steps of one pass through the examples, and how many examples they use."""
        num_whole, rest = divmod(num_examples, self.batch_size)
        if self.skips_lone and num_whole and rest == 1:
            return num_whole, num_examples - 1
        return num_whole + (rest > 0), num_examples

    def examples_per_epoch(self, num_examples: int) -> int:
        """Return how many examples an epoch uses, counting repetitions."""
        steps, num_taken = self._pass_size(num_examples)
        rounds, rest = divmod(self.steps_per_epoch or steps, steps)
        return rounds * num_taken + min(rest * self.batch_size, num_taken)

    def steps_of(self, num_examples: int) -> int:
        return self.steps_per_epoch or self._pass_size(num_examples)[0]

    def batches(
        self,
        num_examples: int,
        rng: torch.Generator,
        device: torch.device | None = None,
        draws: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the positions of each step's examples in one epoch: permutations from ``rng``, cut into batches.

        With ``draws`` it yields the result of ``draws`` for each batch's positions. Each permutation is moved to
        ``device`` at once, with all its draws, not batch by batch.
        """
        steps_left, (steps, num_taken) = self.steps_of(num_examples), self._pass_size(num_examples)
        while steps_left > 0:
            order = torch.randperm(num_examples, generator=rng)[:num_taken]
            if draws is not None:
                order = torch.cat([draws(batch) for batch in torch.split(order, self.batch_size)[:steps_left]])
            yield from torch.split(order.to(device), self.batch_size)[:steps_left]
            steps_left -= steps


def sgd_step(work: Changes, sgd: SGD) -> None:
    """Do one step of ``torch.optim.SGD``, in its order of operations. It overwrites the gradients."""
    for name, keep in work.keep.items():
        for _, gradients in work.by_client:
            gradients[name].mul_(keep)
    if sgd.max_grad_norm is not None and work.rows:
        norms_by_parameter = torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in work.rows], dim=1)
        scales = (sgd.max_grad_norm / (torch.linalg.vector_norm(norms_by_parameter, dim=1) + 1e-6)).clamp_(max=1)
        for rows in work.rows:
            rows.mul_(scales[:, None])
    elif sgd.max_grad_norm is not None:
        norms = [torch.linalg.vector_norm(gradient) for gradient in work.gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        scale = (sgd.max_grad_norm / (norm + 1e-6)).clamp_(max=1)  # as torch's clip_grad_norm_
        for gradient in work.gradients:
            gradient.mul_(scale)
    for i, (values, gradient) in enumerate(zip(work.values, work.gradients, strict=True)):
        if sgd.weight_decay:
            gradient.add_(values, alpha=sgd.weight_decay)
        if work.kept is not None:  # after the decay, so that inactive weights do not decay either
            gradient.mul_(work.kept[i])
        change = gradient if work.velocity is None else work.velocity[i].mul_(sgd.momentum).add_(gradient)
        values.add_(change, alpha=-sgd.learning_rate)
