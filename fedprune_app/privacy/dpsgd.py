"""DP-SGD on masked models takes per-example gradients, masks and clips each, sums them, and adds noise under the mask.

Abadi et al. 2016. Noise is added where the mask is True. Batches are Poisson samples, so they differ in size and can
be empty. The sum is divided by the expected size, which is public. ``grad_sample`` says how the per-example gradients
come about; this choice changes speed alone:

* ``hooks``, ``functorch``: Opacus' GradSampleModule materialises them.
* ``ghost``: Opacus' GradSampleModuleFastGradientClipping finds the norms in one backward pass and the sum of clipped
  gradients in a second one. Opacus' own norms know no masks, so the norms here are taken under them.
* ``one-pass``: one backward pass to the layers' outputs gives both (Bu et al. 2023, "book-keeping"), with Opacus'
  rules per layer; linear layers never materialise anything. ``auto`` is this one, by benchmarks/dp_step.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.privacy.noise import Noise, noised
from fedprune_app.privacy.per_example import RULES, clip_factors

GRAD_SAMPLES = ("auto", "one-pass", "hooks", "functorch", "ghost")
ClippedSum = Callable[..., dict[str, Tensor]]
"""A clipped sum takes a batch (images, labels) to the sum of the masked and clipped gradients, by name.

``one-pass`` also takes a network (images -> logits) in place of the model, and masks.
"""


@dataclass(frozen=True)
class DPSGD:
    """DP-SGD settings say how the gradients of a private training are made.

    At most ``physical_batch`` examples are in work at a time. This number changes memory and not the result (but for
    the order of float sums). Raises ``ValueError`` for a number out of range and another ``grad_sample``.
    """

    noise_multiplier: float
    clip_norm: float
    sample_rate: float
    steps_per_epoch: int
    noise: Noise
    grad_sample: str = "auto"
    physical_batch: int = 256

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}, allowed: above 0")
        if not self.noise_multiplier >= 0:
            raise ValueError(f"noise_multiplier is {self.noise_multiplier}, allowed: at least 0")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate is {self.sample_rate}, allowed: above 0 and at most 1")
        if self.grad_sample not in GRAD_SAMPLES:
            raise ValueError(f"grad_sample is {self.grad_sample!r}, allowed: {', '.join(GRAD_SAMPLES)}")

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
        Raises ``ValueError`` for a model that cannot be trained privately. One whose own code overwrites what a layer
        took or gave is refused as soon as it is seen to. With the shape of an example the network is tried, see
        :func:`check_independence`.
        """
        check_model(model)
        if example_shape is not None:
            check_independence(model, example_shape)
        parameters = dict(model.named_parameters())
        trained = {name: parameters[name] for name in gradients}
        masks = _masks(kept)
        method = METHODS["one-pass" if self.grad_sample == "auto" else self.grad_sample]
        with (
            warnings.catch_warnings(),
            _out_of_place(model),
            method(model, trained, masks, self.clip_norm) as clipped_sum,
        ):
            # Inputs need no gradient, so hooks on the first layer see gradients of outputs alone. No more is needed.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet")
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


def check_model(model: nn.Module, name: str = "") -> None:
    """Raise ``ValueError``, one line, for a model without gradients per example: BatchNorm mixes the examples."""
    if norms := [key for key, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]:
        model_is = f"model is {name!r}" if name else "the model"
        raise ValueError(
            f"{model_is} with BatchNorm '{norms[0]}', allowed with dp.enabled: networks without, such as those with "
            "GroupNorm (-gn)"
        )
    if errors := ModuleValidator.validate(model, strict=False):
        raise ValueError(f"the model cannot be trained privately: {errors[0]}")
    owners: dict[int, str] = {}
    for key, layer in model.named_modules():
        for parameter in layer.parameters(recurse=False):
            if (other := owners.setdefault(id(parameter), key)) != key:
                raise ValueError(
                    f"layers {other!r} and {key!r} share a parameter, allowed with dp.enabled: networks whose layers "
                    "have parameters of their own"
                )
        if any(True for _ in layer.parameters(recurse=False)) and type(layer) not in RULES:
            raise ValueError(f"layer '{key}' of type {type(layer).__name__} has no rule for gradients per example")


def check_independence(model: nn.Module, example_shape: Sequence[int]) -> None:
    """Raise ``ValueError``, one line, for a network that passes something of an example on to another one.

    Clipping then bounds nobody's part. The network computes on two examples of noise. The output of each must depend on
    that example alone, and a buffer or parameter that the network changes in its forward pass is refused: it would
    leave the client without noise. The global generators are afterwards as they were. The model has to be in the mode
    of training.
    """
    device = next(model.parameters()).device
    before = {name: (id(tensor), tensor._version) for name, tensor in _tensors_of(model)}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        images = torch.randn(2, *example_shape, device=device, requires_grad=True)
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
    """Layers are watched by hooks, which keep each layer's input and output of a forward pass.

    Torch counts how often a tensor was written. So :meth:`check` finds a kept tensor that was overwritten later, by
    ``F.relu_(x)`` or ``x += y`` in the network's own code. Whatever is computed from such a tensor is wrong.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        parameters = set(trained.values())
        self.layers = {
            layer: name for name, layer in model.named_modules() if parameters & {*layer.parameters(recurse=False)}
        }
        self.seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._written: list[tuple[nn.Module, str, Tensor, int]] = []

    @contextmanager
    def forward(self, once: bool = False) -> Iterator[None]:
        """Watch forward passes, and forget them afterwards. With ``once`` a layer that is used twice is refused."""

        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if once and layer in self.seen:
                kind = type(layer).__name__
                raise ValueError(f"a layer of type {kind} is used twice, allowed: dp.grad-sample 'hooks'")
            self.seen[layer] = inputs[0], output
            for what, tensor in (("input", inputs[0]), ("output", output)):
                self._written.append((layer, what, tensor, tensor._version))

        handles = [layer.register_forward_hook(keep) for layer in self.layers]
        try:
            yield
        finally:
            self.seen.clear()
            self._written.clear()
            for handle in handles:
                handle.remove()

    def check(self) -> None:
        """Raise ``ValueError`` that names the layer whose input or output was overwritten since the hook saw it."""
        for layer, what, tensor, version in self._written:
            if tensor._version != version:
                raise ValueError(
                    f"the {what} of layer '{self.layers[layer]}' is overwritten in place, allowed with dp.enabled: "
                    "networks whose own code makes new tensors, such as F.relu(x) and x + y"
                )


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
    functorch: bool,
) -> Iterator[ClippedSum]:
    """Give a clipped sum for which Opacus keeps every example's gradient in ``grad_sample``."""

    class PerExample(GradSampleModule):  # type: ignore[misc]  # Opacus has no types
        GRAD_SAMPLERS: ClassVar = dict(RULES)

    with _wrapped(model, lambda: PerExample(model, loss_reduction="sum", force_functorch=functorch)) as wrapped:

        def clipped_sum(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            wrapped.zero_grad()
            _no_gradients(trained)
            with _overwriting_named(model, trained, images):
                F.cross_entropy(wrapped(images), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
            samples = _by_opacus("grad_sample", trained)
            for name in samples.keys() & masks.keys():
                samples[name].mul_(masks[name])
            factors = clip_factors(_over_tensors(_squared_norms(each) for each in samples.values()), clip_norm)
            fewer = _without(clipped_sum, factors, images, labels)
            if fewer is not None:
                return fewer
            return {name: torch.einsum("n,n...->...", factors, each) for name, each in samples.items()}

        yield clipped_sum


@contextmanager
def _ghost(
    model: nn.Module, trained: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor], clip_norm: float
) -> Iterator[ClippedSum]:
    """Give a clipped sum by Opacus' ghost clipping, with norms under masks."""
    mask_of: dict[Tensor, Tensor] = {trained[name]: mask for name, mask in masks.items()}

    class Masked(GradSampleModuleFastGradientClipping):  # type: ignore[misc]
        NORM_SAMPLERS: ClassVar = {kind: partial(_norms, mask_of) for kind in RULES}

    def wrap() -> Any:
        return Masked(model, loss_reduction="sum", max_grad_norm=clip_norm, use_ghost_clipping=True)

    with _wrapped(model, wrap) as wrapped:

        def clipped_sum(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            _no_gradients(trained)
            with _overwriting_named(model, trained, images):
                losses = F.cross_entropy(wrapped(images), labels, reduction="none")
                losses.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
            norms = _by_opacus("_norm_sample", trained)
            factors = clip_factors(_over_tensors(norm.square() for norm in norms.values()), clip_norm)
            fewer = _without(clipped_sum, factors, images, labels)
            if fewer is not None:
                return fewer
            _no_gradients(trained)
            wrapped.disable_hooks()
            (factors * losses).sum().backward()  # type: ignore[no-untyped-call]
            wrapped.enable_hooks()
            gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
            return {name: g * masks[name] if name in masks else g for name, g in gradients.items()}

        yield clipped_sum


def _norms(
    mask_of: Mapping[Tensor, Tensor], layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Return each parameter's norms (n,), under its mask, as Opacus asks of a norm sampler."""
    if isinstance(layer, nn.Linear) and activations[0].dim() == 2:
        found = {layer.weight: _linear_squared_norms(activations[0], backprops, mask_of.get(layer.weight))}
        if layer.bias is not None:
            found[layer.bias] = _squared_norms(_masked(backprops, mask_of.get(layer.bias)))
    else:
        gradients = RULES[type(layer)](layer, activations, backprops)
        found = {p: _squared_norms(_masked(gradient, mask_of.get(p))) for p, gradient in gradients.items()}
    return {parameter: squared.sqrt() for parameter, squared in found.items()}


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
        with watched.forward(once=True):
            loss = F.cross_entropy(network(images), labels, reduction="sum")
            watched.check()
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
        gradients = RULES[type(layer)](layer, [a], b)
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
    "hooks": partial(_materialised, functorch=False),
    "functorch": partial(_materialised, functorch=True),
    "ghost": _ghost,
}


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values * mask


def _over_tensors(squared: Any) -> Tensor:
    return torch.stack(list(squared)).sum(0)


def _by_opacus(attribute: str, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return what Opacus left at the parameters, by name; there is nothing at those without use in the network."""
    found = {name: getattr(parameter, attribute, None) for name, parameter in trained.items()}
    return {name: value for name, value in found.items() if value is not None}


def _no_gradients(trained: Mapping[str, nn.Parameter]) -> None:
    """Remove the gradients that autograd accumulated: they are not private and must not reach the optimiser.

    Opacus' norms are removed too, so that none of another batch is left at a layer that this one does not use.
    """
    for parameter in trained.values():
        parameter.grad = None
        vars(parameter).pop("_norm_sample", None)


@contextmanager
def _overwriting_named(model: nn.Module, trained: Mapping[str, nn.Parameter], images: Tensor) -> Iterator[None]:
    """Find the layer where torch refuses a tensor that was overwritten, for a ``ValueError`` on one line."""
    try:
        yield
    except RuntimeError:
        watched = _Watched(model, trained)
        with watched.forward(), torch.no_grad():
            model(images[:1])
            watched.check()
        raise


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
            "_norm_sample",
            "_forward_counter",
            "_current_grad_sample",
            "activations",
            "max_batch_len",
        )
        for owner in [*model.parameters(), *model.modules()]:
            for attribute in left:
                if attribute in vars(owner):
                    delattr(owner, attribute)
