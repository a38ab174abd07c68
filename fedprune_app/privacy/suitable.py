"""A network is suitable if its clipped sums are autograd's, and if its examples do not depend on one another."""

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.computation import computation_key, generic_copy
from fedprune_app.privacy.clipped_sums import attached, clip_factors, over_tensors


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
