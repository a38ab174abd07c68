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
from typing import Any, ClassVar

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.computation import computation_key, generic_copy
from fedprune_app.privacy.noise import Noise, noised
from fedprune_app.privacy.per_example import RULES, clip_factors

ClippedSum = Callable[..., dict[str, Tensor]]
"""A clipped sum takes a batch (images, labels) to the sum of the masked and clipped gradients, by name.

``one-pass`` also takes a network (images -> logits) in place of the model, and masks.
"""


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
        with _attached(model, list(gradients), _masks(kept), self.clip_norm, self.grad_sample) as clipped_sum:
            yield _Step(self, clipped_sum, gradients, kept)


@dataclass(frozen=True)
class _Step:
    how: DPSGD
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
        """Add the clipped gradients of some examples of the batch."""
        if len(labels):
            for name, total in self.clipped_sum(images, labels).items():
                self.gradients[name].add_(total)

    def finish(self, expected_batch: float) -> None:
        """Add noise after all examples of the batch, and divide the sum by ``expected_batch``."""
        self.how.add_noise(self.gradients, self.kept, expected_batch)


def _masks(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the masks that do not keep everything."""
    return {name: mask for name, mask in kept.items() if not bool(mask.all())}


@contextmanager
def _attached(
    model: nn.Module, names: Sequence[str], masks: Mapping[str, Tensor], clip_norm: float, grad_sample: str
) -> Iterator[ClippedSum]:
    """Give the clipped sum of a method over the parameters of these names."""
    parameters = dict(model.named_parameters())
    method = METHODS["one-pass" if grad_sample == "auto" else grad_sample]
    trained = {name: parameters[name] for name in names}
    with warnings.catch_warnings(), _out_of_place(model), method(model, trained, masks, clip_norm) as clipped_sum:
        # Inputs need no gradient, so hooks on the first layer see gradients of outputs alone. No more is needed.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet")
        yield clipped_sum


# --- networks that can be trained privately ---------------------------------------------------------------------------


def check_model(model: nn.Module, name: str = "") -> None:
    """Raise ``ValueError``, one line, for a model with BatchNorm, which mixes the examples of a batch."""
    if norms := [key for key, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]:
        model_is = f"model is {name!r}" if name else "the model"
        raise ValueError(
            f"{model_is} with BatchNorm '{norms[0]}', allowed with dp.enabled: networks without, such as those with "
            "GroupNorm (-gn)"
        )


_checked: set[Hashable] = set()  # networks that passed


def check_private(model: nn.Module, example_shape: Sequence[int], names: Sequence[str], grad_sample: str) -> None:
    """Raise ``ValueError``, one line, for a network whose parameters ``names`` cannot be trained privately.

    The network is tried once, see :func:`check_model`, :func:`check_independence` and :func:`check_gradients`. It has
    to be in the mode of training.
    """
    computation = computation_key(model)
    key = computation, tuple(example_shape), tuple(names), grad_sample
    if computation is not None and key in _checked:
        return
    check_model(model)
    try:
        with warnings.catch_warnings(action="ignore"):  # of tensors that need a gradient here alone
            check_independence(model, example_shape)
            check_gradients(model, example_shape, names, grad_sample)
    except ValueError:
        raise
    except Exception as error:  # a user's network raises what it likes
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the network cannot be trained privately: {said}") from None
    _checked.add(key)


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
    by_example = _by_autograd(model, names, images)
    squared = torch.stack([_over_tensors(gradient.square().sum() for gradient in each.values()) for each in by_example])
    norms = squared.sqrt()
    for clip_norm in (2 * float(norms.max()) or 1.0, float(norms.min()) / 2 or 1.0):
        factors = clip_factors(squared, clip_norm)
        with _attached(model, names, {}, clip_norm, grad_sample) as clipped_sum, _drawing_alike(first.device):
            sums = clipped_sum(images * 1, torch.arange(2, device=first.device))
        stacked = {name: torch.stack([each[name] for each in by_example]) for name in names}
        _compare(sums, {name: torch.tensordot(factors, each, 1) for name, each in stacked.items()})


def _by_autograd(model: nn.Module, names: Sequence[str], images: Tensor) -> list[dict[str, Tensor]]:
    """Return the gradients of each image's loss by name; the labels are 0, 1, ..."""
    parameters = dict(model.named_parameters())
    with _drawing_alike(images.device):
        losses = F.cross_entropy(model(images * 1), torch.arange(len(images), device=images.device), reduction="none")
    gradients = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
    return [dict(zip(names, gradients(loss, [parameters[name] for name in names]), strict=True)) for loss in losses]


@contextmanager
def _drawing_alike(device: torch.device) -> Iterator[None]:
    """Let a network that draws draw the same each time; the global generators are afterwards as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(gradient.abs().sum()) for gradient in expected.values())
    for name, gradient in expected.items():
        if not gradient.numel():
            continue
        atol = 1e-3 * float(gradient.abs().mean()) + 1e-7 * largest  # float32 rounds, also what would be 0
        if not torch.allclose(found.get(name, gradient * 0), gradient, rtol=1e-3, atol=atol):
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
    before = {name: (id(tensor), tensor._version) for name, tensor in _tensors_of(model)}
    with _drawing_alike(first.device):
        images = torch.randn(2, *example_shape, device=first.device, dtype=first.dtype, requires_grad=True)
        outputs = model(images * 1)  # a network may overwrite what it takes
        mixes = False
        for one, other in ((0, 1), (1, 0)):
            if outputs.requires_grad:
                (gradient,) = torch.autograd.grad(outputs[one].sum(), images, retain_graph=True, allow_unused=True)
                mixes |= gradient is not None and bool(gradient[other].any())
        with torch.no_grad():
            again, once_more = model(images * 1), model(images * 1)
            if torch.equal(again, once_more):  # else it draws, and examples are drawn for in turn
                alone = torch.cat([model(images[k : k + 1] * 1) for k in (0, 1)])
                scale = float(again.abs().max())
                mixes |= not torch.allclose(again, alone, rtol=1e-3, atol=1e-3 * scale)
    for name, tensor in _tensors_of(model):
        if before.get(name) != (id(tensor), tensor._version):
            raise ValueError(
                f"the network changes {name!r} as it computes, allowed with dp.enabled: networks that change nothing "
                "of theirs, which would leave the client without noise"
            )
    if mixes:
        raise ValueError(
            "the network mixes the examples of a batch, allowed with dp.enabled: networks in which the output for an "
            "example depends on that example alone"
        )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    yield from model.named_parameters()


@contextmanager
def _out_of_place(model: nn.Module) -> Iterator[None]:
    """Let modules with ``inplace=True`` give new tensors meanwhile: gradients per example need what layers gave."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in modules:
        module.inplace = False
    try:
        yield
    finally:
        for module in modules:
            module.inplace = True


class _Watched:
    """Layers are watched by hooks, which keep each layer's input and output of a forward pass."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        parameters = set(trained.values())
        self.layers = {
            layer: name
            for name, layer in model.named_modules()
            if parameters & {*layer.parameters(recurse=False)} and _rule_of(layer) is not None
        }
        self.seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch a forward pass, and forget it afterwards. A layer that is used twice is refused."""

        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if layer in self.seen:
                raise ValueError(f"layer '{self.layers[layer]}' is used twice, allowed: dp.grad-sample 'hooks'")
            self.seen[layer] = inputs[0], output

        handles = [layer.register_forward_hook(keep) for layer in self.layers]
        try:
            yield
        finally:
            self.seen.clear()
            for handle in handles:
                handle.remove()


def _without(clipped_sum: ClippedSum, factors: Tensor, images: Tensor, labels: Tensor) -> dict[str, Tensor] | None:
    """Return the sum anew without the examples whose norm is not finite: they have no bounded part in the sum.

    The result is None where all norms are finite.
    """
    good = factors.isfinite()
    if bool(good.all()):
        return None
    return clipped_sum(images[good], labels[good]) if bool(good.any()) else {}


# --- by layer ---------------------------------------------------------------------------------------------------------


_LARGEST_SQUARED_NORM = 1e16  # of a linear layer's inputs, and of its backprops, for one example


def _squared_norms(gradients: Tensor) -> Tensor:
    """Return the squared norm per example (n,) of gradients (n, ...)."""
    return gradients.flatten(1).square().sum(1)


def _linear_squared_norms(inputs: Tensor, backprops: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``‖(b aᵀ) ⊙ M‖²`` per example of inputs a (n, j) and backprops b (n, o), without a tensor (n, o, j).

    The result is NaN where ``‖a‖`` or ``‖b‖`` is above 10⁸, which no honest network reaches. Below it an entry whose
    square underflows adds less than 10⁻¹¹ to a gradient, however large the other factor is. Above it such an entry
    could pass the clipping unseen.
    """
    a, b = inputs.square(), backprops.square()
    of_inputs, of_backprops = a.sum(1), b.sum(1)
    squared = of_inputs * of_backprops if mask is None else ((b @ mask) * a).sum(1)  # (n, o) @ (o, j) * (n, j)
    return torch.where(torch.maximum(of_inputs, of_backprops) > _LARGEST_SQUARED_NORM, torch.nan, squared)


# --- the methods ------------------------------------------------------------------------------------------------------


@contextmanager
def _materialised(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    masks: Mapping[str, Tensor],
    clip_norm: float,
) -> Iterator[ClippedSum]:
    """Give a clipped sum for which Opacus keeps every example's gradient in ``grad_sample``."""

    class PerExample(GradSampleModule):  # type: ignore[misc]  # Opacus has no types
        GRAD_SAMPLERS: ClassVar = dict(RULES)

    with _wrapped(model, lambda: PerExample(model, loss_reduction="sum")) as wrapped:

        def clipped_sum(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            wrapped.zero_grad()
            _no_gradients(trained)
            F.cross_entropy(wrapped(images), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
            found = {name: getattr(parameter, "grad_sample", None) for name, parameter in trained.items()}
            samples = {name: value for name, value in found.items() if value is not None}  # of used parameters
            for name in samples.keys() & masks.keys():
                samples[name].mul_(masks[name])
            factors = clip_factors(_over_tensors(_squared_norms(each) for each in samples.values()), clip_norm)
            fewer = _without(clipped_sum, factors, images, labels)
            if fewer is not None:
                return fewer
            return {name: torch.einsum("n,n...->...", factors, each) for name, each in samples.items()}

        yield clipped_sum


@contextmanager
def _one_pass(
    model: nn.Module, trained: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor], clip_norm: float
) -> Iterator[ClippedSum]:
    """Give a clipped sum that keeps inputs and outputs of every layer and stops the backward pass at the outputs."""
    name_of: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
    watched = _Watched(model, trained)

    def clipped_sum(
        images: Tensor,
        labels: Tensor,
        network: Callable[[Tensor], Tensor] = model,
        masks: Mapping[str, Tensor] = masks,
    ) -> dict[str, Tensor]:
        with watched.forward():
            loss = F.cross_entropy(network(images), labels, reduction="sum")
            layers = [layer for layer in watched.layers if layer in watched.seen]  # one without use has no gradient
            inputs = [watched.seen[layer][0].detach() for layer in layers]
            outputs = [watched.seen[layer][1] for layer in layers]
            backprops = torch.autograd.grad(loss, outputs, materialize_grads=True)
        squared: list[Tensor] = []
        sums: dict[str, ClippedTensor] = {}
        for layer, a, b in zip(layers, inputs, backprops, strict=True):
            for name, squared_norms, total in _of_layer(layer, a, b, name_of, masks):
                squared.append(squared_norms)
                sums[name] = total
        factors = clip_factors(_over_tensors(squared), clip_norm)
        fewer = _without(partial(clipped_sum, network=network, masks=masks), factors, images, labels)
        return {name: total(factors) for name, total in sums.items()} if fewer is None else fewer

    yield clipped_sum


def _rule_of(layer: nn.Module) -> Any:
    """Return the rule of a layer's type, or of the type that it is made from; None where there is none.

    :func:`check_gradients` refuses a network in which a layer without a rule has gradients.
    """
    return next((RULES[kind] for kind in type(layer).__mro__ if kind in RULES), None)


ClippedTensor = Callable[[Tensor], Tensor]  # from clipping factors (n,) to the sum of clipped gradients


def _of_layer(
    layer: nn.Module, a: Tensor, b: Tensor, name_of: Mapping[Tensor, str], masks: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, ClippedTensor]]:
    """Yield each trained parameter of a layer, its squared norms (n,) and its clipped sum.

    ``a`` are the layer's inputs and ``b`` the gradients of its outputs, both by example.
    """
    if isinstance(layer, nn.Linear) and a.dim() == 2:
        gradients: dict[Tensor, Tensor] = {} if layer.bias is None else {layer.bias: b}
        if (name := name_of.get(layer.weight)) is not None:
            mask = masks.get(name)
            yield name, _linear_squared_norms(a, b, mask), partial(_clipped_linear, a, b, mask)
    else:
        gradients = _rule_of(layer)(layer, [a], b)
    for parameter, gradient in gradients.items():
        if (name := name_of.get(parameter)) is not None:
            each = _masked(gradient, masks.get(name))
            yield name, _squared_norms(each), partial(_clipped, each)


def _clipped_linear(a: Tensor, b: Tensor, mask: Tensor | None, factors: Tensor) -> Tensor:
    return _masked((b * factors[:, None]).T @ a, mask)


def _clipped(each: Tensor, factors: Tensor) -> Tensor:
    total: Tensor = torch.tensordot(factors, each, 1)
    return total


METHODS: Mapping[str, Any] = {
    "one-pass": _one_pass,
    "hooks": _materialised,
}


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values * mask


def _over_tensors(squared: Any) -> Tensor:
    return torch.stack(list(squared)).sum(0)


def _no_gradients(trained: Mapping[str, nn.Parameter]) -> None:
    """Remove the gradients that autograd accumulated: they are not private and must not reach the optimiser."""
    for parameter in trained.values():
        parameter.grad = None


@contextmanager
def _wrapped(model: nn.Module, wrap: Callable[[], Any]) -> Iterator[Any]:
    """Give an Opacus module around the model, and leave the model as it was before."""
    wrapped = wrap()
    try:
        yield wrapped
    finally:
        wrapped.to_standard_module()
        left = (
            "grad_sample",
            "_forward_counter",
            "_current_grad_sample",
            "activations",
            "max_batch_len",
        )
        for owner in [*model.parameters(), *model.modules()]:
            for attribute in left:
                if attribute in vars(owner):
                    delattr(owner, attribute)
