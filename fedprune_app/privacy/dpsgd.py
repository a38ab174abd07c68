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

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.flops import computation_key, generic_copy
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

    The network is tried once, see :func:`check_model`, :func:`check_independence` and :func:`check_gradients`. It has
    to be in the mode of training.
    """
    computation = computation_key(model)
    key = computation, tuple(example_shape), tuple(names), grad_sample
    if computation is not None and key in _checked_keys:
        return
    check_model(model)
    try:
        with warnings.catch_warnings(action="ignore"):  # of tensors that need a gradient here alone
            check_independence(model, example_shape)
            check_gradients(model, example_shape, names, grad_sample)
    except ValueError:
        raise
    except Exception as error:  # a user's network raises what it likes
        error_text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the network cannot be trained privately: {error_text}") from None
    _checked_keys.add(key)


def check_gradients(model: nn.Module, example_shape: Sequence[int], names: Sequence[str], grad_sample: str) -> None:
    """Raise ``ValueError``, one line, where a method sums other clipped gradients than autograd's own, by example.

    A rule for a layer does not see what the network does with the layer's parameters elsewhere: two layers may have one
    weight, or a function may use it. Two examples of noise are compared, at first below the clipping norm, which shows
    whose gradient is wrong, and then above it.
    """
    draw = torch.Generator().manual_seed(0)
    model = generic_copy(model, draw)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    first = next(model.parameters())
    images = torch.randn(2, *example_shape, generator=draw).to(first)
    gradients_by_example = _autograd_gradients(model, names, images)
    squared = torch.stack(
        [over_tensors(gradient.square().sum() for gradient in gradients.values()) for gradients in gradients_by_example]
    )
    norms = squared.sqrt()
    for clip_norm in (2 * float(norms.max()) or 1.0, float(norms.min()) / 2 or 1.0):
        factors = clip_factors(squared, clip_norm)
        with attached(model, names, {}, clip_norm, grad_sample) as clipped_sum, _same_draws(first.device):
            sums = clipped_sum(images * 1, torch.arange(2, device=first.device))
        stacked_gradients = {
            name: torch.stack([gradients[name] for gradients in gradients_by_example]) for name in names
        }
        _compare(sums, {name: torch.tensordot(factors, gradients, 1) for name, gradients in stacked_gradients.items()})


def _autograd_gradients(model: nn.Module, names: Sequence[str], images: Tensor) -> list[dict[str, Tensor]]:
    """Return the gradients of each image's loss by name; the labels are 0, 1, ..."""
    parameters = dict(model.named_parameters())
    with _same_draws(images.device):
        losses = F.cross_entropy(model(images * 1), torch.arange(len(images), device=images.device), reduction="none")
    gradients = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
    return [dict(zip(names, gradients(loss, [parameters[name] for name in names]), strict=True)) for loss in losses]


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """Let a network that draws draw the same each time; the global generators are afterwards as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _compare(sums: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(gradient.abs().sum()) for gradient in expected.values())
    for name, gradient in expected.items():
        if not gradient.numel():
            continue
        atol = 1e-3 * float(gradient.abs().mean()) + 1e-7 * largest  # float32 rounds, also what would be 0
        if not torch.allclose(sums.get(name, gradient * 0), gradient, rtol=1e-3, atol=atol):
            raise ValueError(
                f"the gradient of {name!r} is not what its layer's rule finds, allowed with dp.enabled: networks that "
                "use each layer once, as a layer, and overwrite nothing"
            )


def check_independence(model: nn.Module, example_shape: Sequence[int]) -> None:
    """Raise ``ValueError``, one line, for a network that passes something of an example on to another one.

    Clipping then bounds nobody's part. The network computes on two examples of noise. The output of each must depend on
    that example alone, and a buffer or parameter that the network changes in its forward pass is refused: it would
    leave the client without noise. The global generators are afterwards as they were. The model has to be in the mode
    of training.
    """
    first = next(model.parameters())
    versions = {name: (id(tensor), tensor._version) for name, tensor in _tensors_of(model)}
    with _same_draws(first.device):
        images = torch.randn(2, *example_shape, device=first.device, dtype=first.dtype, requires_grad=True)
        outputs = model(images * 1)  # a network may overwrite what it takes
        is_mixing = False
        for i, j in ((0, 1), (1, 0)):
            if outputs.requires_grad:
                (gradient,) = torch.autograd.grad(outputs[i].sum(), images, retain_graph=True, allow_unused=True)
                is_mixing |= gradient is not None and bool(gradient[j].any())
        with torch.no_grad():
            first_outputs, second_outputs = model(images * 1), model(images * 1)
            if torch.equal(first_outputs, second_outputs):  # else it draws, and examples are drawn for in turn
                single_outputs = torch.cat([model(images[k : k + 1] * 1) for k in (0, 1)])
                scale = float(first_outputs.abs().max())
                is_mixing |= not torch.allclose(first_outputs, single_outputs, rtol=1e-3, atol=1e-3 * scale)
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
    """DP-SGD settings say how the gradients of a private training are made.

    At most ``physical_batch`` examples are in work at a time. This number changes memory and not the result (but for
    the order of float sums). The options declare the ranges. ``num_examples`` count as known, with blanks for what
    lacks; by default they are those that there are.
    """

    noise_multiplier: float
    clip_norm: float
    sample_rate: float
    steps_per_epoch: int
    noise: Noise
    grad_sample: str = "auto"
    physical_batch: int = 256
    num_examples: int = 0

    def batches(self, num_examples: int) -> Iterator[Tensor]:
        """Draw the positions of each step's examples in one epoch: each one is in with ``sample_rate``, by itself."""
        for _ in range(self.steps_per_epoch):
            yield (self.noise.uniform(num_examples) < self.sample_rate).nonzero().squeeze(1)

    def add_noise(self, gradients: Mapping[str, Tensor], kept: Mapping[str, Tensor], expected_batch: float) -> None:
        """Add noise to a batch's sums ``gradients``, where ``kept`` is 1, and divide them by ``expected_batch``.

        The noised sum is rounded to the gradient's own type once. Whatever follows is post-processing.
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
