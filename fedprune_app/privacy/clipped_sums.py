"""Sums of clipped per-example gradients, in one backward pass or by Opacus' hooks, and the rules per layer."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from opacus.grad_sample import GradSampleModule
from opacus.utils.tensor_utils import sum_over_all_but_batch_and_last_n
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.named import TensorDict, Tensors, Values

Samplers = Mapping[type[nn.Module], Callable[[nn.Module, list[Tensor], Tensor], dict[Tensor, Tensor]]]


def _convolution(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    """Return Opacus' per-example gradients of a convolution, but correct for channels last in memory too.

    Opacus 1.6 assumes the strides of contiguous tensors for the windows of its input, and silently reads wrong numbers
    from other tensors. Without groups this rule is also faster.
    """
    assert isinstance(layer, nn.Conv2d)
    inputs, backprops = activations[0].contiguous(), backprops.contiguous()
    if layer.groups != 1 or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return dict(GradSampleModule.GRAD_SAMPLERS[nn.Conv2d](layer, [inputs], backprops))
    gradients: dict[Tensor, Tensor] = {}
    outputs = backprops.flatten(2)  # (n, o, q), q positions
    if layer.weight.requires_grad:
        shape = outputs.shape[1], inputs.shape[1], *layer.kernel_size  # of the weight, in a smaller network too
        gradients[layer.weight] = (outputs @ windows(layer, inputs).mT).view(-1, *shape)
    if layer.bias is not None and layer.bias.requires_grad:
        gradients[layer.bias] = outputs.sum(2)
    return gradients


def windows(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return the result of ``F.unfold``, (n, p, q): the inputs that a convolution multiplies at each position.

    A strided copy takes a third to nine tenths of the time of ``F.unfold`` on a CPU.
    """
    assert not isinstance(layer.padding, str)
    height, width = layer.padding
    patches = F.pad(inputs, (width, width, height, height))
    for dim in range(2):
        dilation = layer.dilation[dim]
        patches = patches.unfold(2 + dim, dilation * (layer.kernel_size[dim] - 1) + 1, layer.stride[dim])[
            ..., ::dilation
        ]
    patches = patches.permute(0, 1, 4, 5, 2, 3)
    return patches.reshape(len(patches), math.prod(patches.shape[1:4]), -1)


def _layer_norm(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    """Return Opacus' per-example gradients of a layer norm; Opacus 1.6 fails for one without a bias."""
    assert isinstance(layer, nn.LayerNorm)
    normalised = F.layer_norm(activations[0], layer.normalized_shape, eps=layer.eps)
    gradients = {layer.weight: normalised * backprops, layer.bias: backprops}
    num_dims = len(layer.normalized_shape)
    return {
        parameter: sum_over_all_but_batch_and_last_n(gradient, num_dims)
        for parameter, gradient in gradients.items()
        if parameter is not None and parameter.requires_grad
    }


# A rule computes per-example gradients of a layer's parameters from its inputs and the gradients of its outputs.
RULES: Samplers = {
    kind: GradSampleModule.GRAD_SAMPLERS[kind] for kind in (nn.Linear, nn.GroupNorm, nn.RMSNorm, nn.Embedding)
} | {nn.Conv2d: _convolution, nn.LayerNorm: _layer_norm}


def clip_factors(squared_norms: Tensor, clip_norm: float) -> Tensor:
    """Return ``min(1, C / ‖g‖)`` per example (n,); NaN where the norm is not finite.

    >>> clip_factors(torch.tensor([0.25, 16.0]), clip_norm=1.0).round(decimals=3).tolist()
    [1.0, 0.25]
    """
    norms = squared_norms.sqrt()
    return torch.where(norms.isfinite(), (clip_norm / (norms + 1e-6)).clamp(max=1), torch.nan)


# Maps a batch (images, labels) to the sum of its masked and clipped gradients, by name. ``one-pass`` also accepts a
# network (images -> logits) instead of the model, and masks.
ClippedSum = Callable[..., TensorDict]


class _Watch:
    """Record each layer's input and output of a forward pass, by hooks."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        parameters = set(trained.values())
        self.layers = {
            layer: name
            for name, layer in model.named_modules()
            if parameters & {*layer.parameters(recurse=False)} and _rule_of(layer) is not None
        }
        self.activations: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record a forward pass until the context ends. ``ValueError`` for a layer that is used twice."""

        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if layer in self.activations:
                raise ValueError(
                    f"layer '{self.layers[layer]}' is used twice, allowed with dp.enabled: networks that use each "
                    "layer once"
                )
            self.activations[layer] = inputs[0], output

        handles = [layer.register_forward_hook(keep) for layer in self.layers]
        try:
            yield
        finally:
            self.activations.clear()
            for handle in handles:
                handle.remove()


def _without(clipped_sum: ClippedSum, factors: Tensor, images: Tensor, labels: Tensor) -> TensorDict | None:
    """Return the sum recomputed without the examples whose norm is not finite: their part in the sum is unbounded.

    None if all norms are finite.
    """
    is_finite = factors.isfinite()
    if bool(is_finite.all()):
        return None
    return clipped_sum(images[is_finite], labels[is_finite]) if bool(is_finite.any()) else {}


_LARGEST_SQUARED_NORM = 1e16  # of a linear layer's inputs, and of its backprops, for one example


def _squared_norms(gradients: Tensor) -> Tensor:
    """Return the squared norm per example (n,) of gradients (n, ...)."""
    return gradients.flatten(1).square().sum(1)


def _linear_squared_norms(inputs: Tensor, backprops: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``‖(b aᵀ) ⊙ M‖²`` per example of inputs a (n, j) and backprops b (n, o), without a tensor (n, o, j).

    The result is NaN where ``‖a‖`` or ``‖b‖`` is above 10⁸, which no honest network reaches. Below it an entry whose
    square underflows adds less than 10⁻¹¹ to a gradient, whatever the other factor. Above it such an entry could evade
    the clipping.
    """
    a, b = inputs.square(), backprops.square()
    of_inputs, of_backprops = a.sum(1), b.sum(1)
    squared = of_inputs * of_backprops if mask is None else ((b @ mask) * a).sum(1)  # (n, o) @ (o, j) * (n, j)
    return torch.where(torch.maximum(of_inputs, of_backprops) > _LARGEST_SQUARED_NORM, torch.nan, squared)


@contextmanager
def _materialised(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    masks: Tensors,
    clip_norm: float,
) -> Iterator[ClippedSum]:
    """Yield a clipped sum for which Opacus stores every example's gradient in ``grad_sample``."""

    class PerExample(GradSampleModule):  # type: ignore[misc]  # Opacus has no types
        GRAD_SAMPLERS: ClassVar = dict(RULES)

    with _wrapped_model(model, PerExample(model, loss_reduction="sum")) as module:

        def clipped_sum(images: Tensor, labels: Tensor) -> TensorDict:
            module.zero_grad()
            for parameter in trained.values():
                parameter.grad = None  # autograd's sum is not private and must not reach the optimiser
            F.cross_entropy(module(images), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
            grad_samples = {name: getattr(parameter, "grad_sample", None) for name, parameter in trained.items()}
            samples = {name: value for name, value in grad_samples.items() if value is not None}  # parameters in use
            for name in samples.keys() & masks.keys():
                samples[name].mul_(masks[name])
            factors = clip_factors(over_tensors(_squared_norms(sample) for sample in samples.values()), clip_norm)
            finite_sums = _without(clipped_sum, factors, images, labels)
            if finite_sums is not None:
                return finite_sums
            return {name: torch.einsum("n,n...->...", factors, sample) for name, sample in samples.items()}

        yield clipped_sum


@contextmanager
def _one_pass(
    model: nn.Module, trained: Mapping[str, nn.Parameter], masks: Tensors, clip_norm: float
) -> Iterator[ClippedSum]:
    """Yield a clipped sum that stores every layer's inputs and outputs and stops the backward pass at the outputs."""
    name_of: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
    watch = _Watch(model, trained)

    def clipped_sum(
        images: Tensor,
        labels: Tensor,
        network: Callable[[Tensor], Tensor] = model,
        masks: Tensors = masks,
    ) -> TensorDict:
        with watch.forward():
            loss = F.cross_entropy(network(images), labels, reduction="sum")
            layers = [layer for layer in watch.layers if layer in watch.activations]  # unused layers have no gradient
            inputs = [watch.activations[layer][0].detach() for layer in layers]
            outputs = [watch.activations[layer][1] for layer in layers]
            backprops = torch.autograd.grad(loss, outputs, materialize_grads=True)
        norms: list[Tensor] = []
        sums: dict[str, ClippedTensor] = {}
        for layer, a, b in zip(layers, inputs, backprops, strict=True):
            for name, squared_norms, total in _layer_terms(layer, a, b, name_of, masks):
                norms.append(squared_norms)
                sums[name] = total
        factors = clip_factors(over_tensors(norms), clip_norm)
        finite_sums = _without(partial(clipped_sum, network=network, masks=masks), factors, images, labels)
        return {name: total(factors) for name, total in sums.items()} if finite_sums is None else finite_sums

    yield clipped_sum


def _rule_of(layer: nn.Module) -> Any:
    """Return the rule of a layer's type, or of a base class; None if there is none.

    :func:`check_gradients` raises for a network in which a layer without a rule has gradients.
    """
    return next((RULES[kind] for kind in type(layer).__mro__ if kind in RULES), None)


ClippedTensor = Callable[[Tensor], Tensor]  # from clipping factors (n,) to the sum of clipped gradients


def _layer_terms(
    layer: nn.Module, a: Tensor, b: Tensor, name_of: Mapping[Tensor, str], masks: Tensors
) -> Iterator[tuple[str, Tensor, ClippedTensor]]:
    """Yield each trained parameter of a layer, its squared norms (n,) and its clipped sum.

    ``a`` are the layer's inputs and ``b`` the gradients of its outputs, both per example.
    """
    if isinstance(layer, nn.Linear) and a.dim() == 2:
        gradients: dict[Tensor, Tensor] = {} if layer.bias is None else {layer.bias: b}
        if (name := name_of.get(layer.weight)) is not None:
            mask = masks.get(name)
            yield name, _linear_squared_norms(a, b, mask), partial(_clip_linear_sum, a, b, mask)
    else:
        gradients = _rule_of(layer)(layer, [a], b)
    for parameter, gradient in gradients.items():
        if (name := name_of.get(parameter)) is not None:
            example_gradients = _apply_mask(gradient, masks.get(name))
            yield name, _squared_norms(example_gradients), partial(torch.tensordot, b=example_gradients, dims=1)


def _clip_linear_sum(a: Tensor, b: Tensor, mask: Tensor | None, factors: Tensor) -> Tensor:
    return _apply_mask((b * factors[:, None]).T @ a, mask)


METHODS: Values = {
    "one-pass": _one_pass,
    "hooks": _materialised,
}


def _apply_mask(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values * mask


def over_tensors(squared: Any) -> Tensor:
    """Return the sum over tensors of squared norms per example."""
    return torch.stack(list(squared)).sum(0)


@contextmanager
def _wrapped_model(model: nn.Module, module: Any) -> Iterator[Any]:
    """Yield the Opacus ``module`` around the model, and restore the model afterwards."""
    try:
        yield module
    finally:
        module.to_standard_module()
        attributes = (
            "grad_sample",
            "_forward_counter",
            "_current_grad_sample",
            "activations",
            "max_batch_len",
        )
        for owner in [*model.parameters(), *model.modules()]:
            for attribute in attributes:
                if attribute in vars(owner):
                    delattr(owner, attribute)


@contextmanager
def out_of_place(model: nn.Module) -> Iterator[None]:
    """Disable ``inplace=True`` of modules within the context: per-example gradients need layers' outputs."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in modules:
        module.inplace = False
    try:
        yield
    finally:
        for module in modules:
            module.inplace = True


@contextmanager
def attached(
    model: nn.Module, names: Sequence[str], masks: Tensors, clip_norm: float, grad_sample: str
) -> Iterator[ClippedSum]:
    """Yield the clipped sum of a method over the parameters of these names."""
    parameters = dict(model.named_parameters())
    method = METHODS["one-pass" if grad_sample == "auto" else grad_sample]
    trained = {name: parameters[name] for name in names}
    with warnings.catch_warnings(), out_of_place(model), method(model, trained, masks, clip_norm) as clipped_sum:
        # Inputs need no gradient, so hooks on the first layer see gradients of outputs alone, which is enough.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet")
        yield clipped_sum
