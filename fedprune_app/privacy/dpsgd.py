"""DP-SGD on masked models takes per-example gradients, masks and clips each, sums them, and adds noise under the mask.

Abadi et al. 2016. Noise is added where the mask is True. Batches are Poisson samples, so they differ in size and can
be empty. The sum is divided by the expected size, which is public. ``grad_sample`` says how the per-example gradients
come about; this choice changes speed alone:

* ``hooks``: Opacus' GradSampleModule materialises them.
* ``one-pass``: one backward pass to the layers' outputs gives both (Bu et al. 2023, "book-keeping"), with Opacus'
  rules per layer; linear layers never materialise anything. ``auto`` is this one, by benchmarks/dp_step.py.

Both follow rules by layer, so a network is compared with autograd's own gradients before it is trained privately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from fedprune_app.privacy.clipped_sums import ClippedSum, attached
from fedprune_app.privacy.noise import Noise, noised
from fedprune_app.privacy.suitable import check_private


@dataclass(frozen=True)
class DPSGD:
    """DP-SGD settings say how the gradients of a private training are made.

    At most ``physical_batch`` examples are in work at a time. This number changes memory and not the result (but for
    the order of float sums). The options declare the ranges.
    """

    noise_multiplier: float
    clip_norm: float
    sample_rate: float
    steps_per_epoch: int
    noise: Noise
    grad_sample: str = "auto"
    physical_batch: int = 256

    @property
    def takes_parts(self) -> bool:
        """Return whether steps may train parts of the network.

        They may with one backward pass to the layers' outputs, which works on a part as on the whole.
        """
        return self.grad_sample in ("auto", "one-pass")

    def batches(self, num_examples: int) -> Iterator[Tensor]:
        """Draw the positions of each step's examples in one epoch: each one is in with ``sample_rate``, by itself."""
        for _ in range(self.steps_per_epoch):
            yield (self.noise.uniform(num_examples) < self.sample_rate).nonzero().squeeze(1)

    def add_noise(self, gradients: Mapping[str, Tensor], kept: Mapping[str, Tensor], expected_batch: float) -> None:
        """Add noise to a batch's sums ``gradients``, where ``kept`` is 1, and divide them by ``expected_batch``.

        The noised sum is rounded to the gradient's own type once. Whatever follows is post-processing.
        """
        std = self.noise_multiplier * self.clip_norm
        draws = self.noise.gaussian(sum(gradient.numel() for gradient in gradients.values()))
        draws = draws.to(next(iter(gradients.values())).device)
        start = 0
        for name, gradient in gradients.items():
            part = draws[start : start + gradient.numel()].view(gradient.shape)
            start += gradient.numel()
            gradient.copy_(noised(gradient, part, std)).mul_(kept[name]).div_(expected_batch)

    @contextmanager
    def attached(
        self,
        model: nn.Module,
        gradients: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        example_shape: Sequence[int] | None = None,
    ) -> Iterator[_Step]:
        """Give an object that puts private gradients into ``gradients``, for the time of a training.

        The names of ``gradients`` are the trained parameters. ``kept`` are 1 or 0 by name, in the gradients' shapes.
        With the shape of an example the network is tried, and ``ValueError`` is raised for one that cannot be trained
        privately, see :func:`check_private`.
        """
        if example_shape is not None:
            check_private(model, example_shape, list(gradients), self.grad_sample)
        with attached(model, list(gradients), _masks(kept), self.clip_norm, self.grad_sample) as clipped_sum:
            yield _Step(self, clipped_sum, gradients, kept)


@dataclass(frozen=True)
class _Step:
    settings: DPSGD
    clipped_sum: ClippedSum
    gradients: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]

    def of_part(
        self, network: Callable[[Tensor], Tensor], gradients: Mapping[str, Tensor], kept: Mapping[str, Tensor]
    ) -> _Step:
        """Return the same for a part of the model, of the same layers.

        ``gradients`` and ``kept`` have the part's shapes.
        """
        clipped_sum = partial(self.clipped_sum, network=network, masks=_masks(kept))
        return replace(self, clipped_sum=clipped_sum, gradients=gradients, kept=kept)

    def add(self, images: Tensor, labels: Tensor) -> None:
        if len(labels):
            for name, total in self.clipped_sum(images, labels).items():
                self.gradients[name].add_(total)

    def finish(self, expected_batch: float) -> None:
        """Add noise after all examples of the batch, and divide the sum by ``expected_batch``."""
        self.settings.add_noise(self.gradients, self.kept, expected_batch)


def _masks(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: mask for name, mask in kept.items() if not bool(mask.all())}
