"""Several clients' networks alike compute as one network, derived from the network itself: its grouped form.

A step of a small network is a long list of small operations, each of which costs more to start than to do. One
operation for all clients is started once. Convolutions become grouped ones, with each client's channels as a group.
Linear layers become batched matrix products. Group norms have each client's groups.

oneDNN computes a convolution of one group otherwise than one of several, which changes the last bits. So each client's
batch is two groups: one half of its examples beside the other. A client's numbers are then the same alone and beside
any others, and a step of a client alone takes no longer than that of the network itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from fedprune_app.core.flops import forward_flops
from fedprune_app.learning.device import module_mode

Weights = Mapping[str, Tensor]
_Operation = Callable[[Weights, int, Sequence[Tensor]], Tensor]
_ALIGNED_ROWS = 16  # so many rows of whatever length are a multiple of 64 bytes
_ELEMENTWISE = (nn.ReLU, nn.Identity, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU)
_BY_CHANNEL = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


_KNOWN = ("torch.nn.", "torchvision.", "fedprune_app.")


class NoGroupedForm(ValueError):
    """The network has no grouped form; the message says which of its parts has none."""


@dataclass(frozen=True)
class _Step:
    """A step of the network computes one value from earlier ones."""

    operation: _Operation
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class GroupedForm:
    """A grouped form computes a network for ``clients`` at once, each with weights and images of its own.

    ``flops`` are those of one example's forward pass through one client's network, which has so many ``parameters``.
    """

    steps: tuple[_Step, ...]
    flops: int
    parameters: int

    def __call__(self, weights: Weights, images: Tensor) -> Tensor:
        """This maps images (clients, B, ...) to logits (clients, B, classes).

        ``weights`` are all clients' parameters by name: matrices stacked (clients, out, in), the first dimensions of
        all others joined (clients · out, ...).
        """
        clients = len(images)
        values = [images]
        for step in self.steps:
            values.append(step.operation(weights, clients, [values[i] for i in step.inputs]))
        return values[-1][:, : images.shape[1]]


_MOST_FORMS = 64
_forms: dict[str, GroupedForm | str] = {}  # or why there is none


def grouped_form(model: nn.Module, example_shape: Sequence[int]) -> GroupedForm:
    """This derives the grouped form of a network that maps a batch of such examples to logits.

    Networks of the same structure have one form. Raises :class:`NoGroupedForm` for a network with other parts than
    convolutions, linear layers, group norms, pooling, activations, flattening and sums, and for one with hooks.
    """
    modules = list(model.modules())
    if any(_has_hooks(module) for module in modules):
        raise NoGroupedForm("a part of it has hooks, a forward of its own, or parameters that are computed")
    structure = f"{model} {tuple(example_shape)}"
    if not all(_tells_what_it_does(module) for module in modules):
        structure += _graph_of(model)
    if structure not in _forms:
        if len(_forms) == _MOST_FORMS:
            _forms.pop(next(iter(_forms)))
        _forms[structure] = _derived(model, example_shape)
    form = _forms[structure]
    if isinstance(form, str):
        raise NoGroupedForm(form)
    return form


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or parametrize.is_parametrized(module) or "forward" in vars(module)


def _tells_what_it_does(module: nn.Module) -> bool:
    """This says whether a module's text, as of ``str``, decides its computation.

    That of a user's class does not show what its ``forward`` does.
    """
    return type(module).__module__.startswith(_KNOWN)


def _graph_of(model: nn.Module) -> str:
    """This returns the operations of a network in their order, or an empty text where torch.fx cannot follow it."""
    try:
        return str(_traced(model))
    except Exception:  # torch.fx may raise anything
        return ""


def _traced(model: nn.Module) -> fx.Graph:
    """This returns the operations of a network in training, which may be others than in a test."""
    with module_mode(model, training=True):
        return fx.Tracer().trace(model)


def _derived(model: nn.Module, example_shape: Sequence[int]) -> GroupedForm | str:
    names = {name for name, _ in model.named_parameters()}
    steps, at = list[_Step](), dict[fx.Node, int]()
    try:
        for node in _traced(model).nodes:
            inputs = tuple(at[each] for each in node.all_input_nodes)
            if node.op == "output":
                if inputs != (len(steps),):
                    raise NoGroupedForm("its output is not its last value")
                continue
            if node.op != "placeholder":
                steps.append(_Step(_operation(model, node, names), inputs))
            at[node] = len(steps)
        flops = sum(forward_flops(model, example_shape).values())
    except Exception as error:  # torch.fx may raise anything where it cannot follow a network
        return str(error)
    return GroupedForm(tuple(steps), flops, sum(p.numel() for p in model.parameters()))


def _operation(model: nn.Module, node: fx.Node, names: set[str]) -> _Operation:
    if node.op == "call_module":
        path = str(node.target)
        layer = model.get_submodule(path)
        own = [f"{path}.{name}" for name, _ in layer.named_parameters()]
        if not names.issuperset(own):
            raise NoGroupedForm(f"layer '{path}' shares its parameters with another one")
        return _of_layer(path, layer)
    if node.target in (operator.add, torch.add) and len(node.all_input_nodes) == 2 and not node.kwargs:
        return lambda _weights, _clients, values: values[0] + values[1]
    if node.target in (torch.relu, F.relu):
        return lambda _weights, _clients, values: F.relu(values[0])
    if node.target is torch.flatten and tuple(node.args[1:]) == (1,) and not node.kwargs:
        return _flatten
    raise NoGroupedForm(f"'{node.name}' ({node.op} {node.target}) is none of the operations that it has for groups")


def _of_layer(path: str, layer: nn.Module) -> _Operation:
    def for_halves(weights: Weights, clients: int) -> tuple[Tensor, Tensor | None]:
        bias = weights.get(f"{path}.bias")
        return _for_halves(weights[f"{path}.weight"], clients), None if bias is None else _for_halves(bias, clients)

    match layer:
        case nn.Conv2d() if layer.groups == 1 and layer.padding_mode == "zeros":
            convolve = partial(F.conv2d, stride=layer.stride, padding=layer.padding, dilation=layer.dilation)
            return lambda weights, clients, values: convolve(
                _channels(values[0]), *for_halves(weights, clients), groups=2 * clients
            )
        case nn.Linear():
            return lambda weights, _clients, values: _multiplied(
                values[0], weights[f"{path}.weight"], weights.get(f"{path}.bias")
            )
        case nn.GroupNorm() if layer.affine:
            groups, eps = layer.num_groups, layer.eps
            return lambda weights, clients, values: F.group_norm(
                _channels(values[0]), 2 * clients * groups, *for_halves(weights, clients), eps
            )
        case nn.Flatten() if layer.start_dim == 1 and layer.end_dim == -1:
            return _flatten
        case _ if type(layer) in _ELEMENTWISE:
            return lambda _weights, _clients, values: layer(values[0])
        case _ if type(layer) in _BY_CHANNEL:
            return lambda _weights, _clients, values: layer(_channels(values[0]))
    raise NoGroupedForm(f"layer '{path}' is of type {type(layer).__name__}, which has no form for groups")


# --- values: images (clients, B, C, H, W); between convolutions (B / 2, clients · 2 · C, H, W); vectors (clients, B, F)


def _channels(value: Tensor) -> Tensor:
    """This returns images as (B / 2, clients · 2 · C, H, W), with the channels last in memory on a CPU.

    Each client's batch is two groups of channels: the first half of its examples beside the second one.
    """
    if value.dim() != 5:
        return value
    value = F.pad(value, (0, 0, 0, 0, 0, 0, 0, value.shape[1] % 2))
    clients, batch, depth, height, width = value.shape
    halves = value.view(clients, 2, batch // 2, depth, height, width)
    if value.device.type != "cpu":
        return halves.permute(2, 0, 1, 3, 4, 5).reshape(batch // 2, -1, height, width)
    last = value.new_empty(batch // 2, height * width, clients * 2 * depth)
    for transposed, images in zip(last, halves.unbind(2), strict=True):  # a matrix at a time: torch is fast at that
        transposed.copy_(images.reshape(clients * 2 * depth, -1).t())
    return last.view(batch // 2, height, width, -1).permute(0, 3, 1, 2)


def _flatten(_weights: Weights, clients: int, values: Sequence[Tensor]) -> Tensor:
    value = values[0]
    if value.dim() == 5:
        return _aligned(value.flatten(2))
    if value.dim() == 3:
        return value
    half, _, *area = value.shape
    halves = value.reshape(half, clients, 2, -1, *area).permute(1, 2, 0, *range(3, 4 + len(area)))
    return _aligned(halves.reshape(clients, 2 * half, -1))


def _aligned(vectors: Tensor) -> Tensor:
    """This fills up each client's batch with zeros, so that its vectors begin at an aligned address.

    The last bits of a matrix product can depend on where its operands begin in memory.
    """
    return F.pad(vectors, (0, 0, 0, -vectors.shape[1] % _ALIGNED_ROWS))


def _multiplied(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    clients, outputs, _ = weight.shape
    if bias is None:
        return torch.bmm(value, weight.transpose(1, 2))
    return torch.baddbmm(bias.reshape(clients, 1, outputs), value, weight.transpose(1, 2))


def _for_halves(parameter: Tensor, clients: int) -> Tensor:
    """This returns clients' parameters (clients · n, ...) with those of each client twice, once for each half."""
    channels_last = parameter.dim() == 4 and parameter.device.type == "cpu"
    last = parameter.permute(0, 2, 3, 1) if channels_last else parameter  # as it is in memory
    each = last.reshape(clients, 1, -1, *last.shape[1:])
    both = each.expand(-1, 2, *each.shape[2:]).reshape(2 * len(last), *last.shape[1:])
    return both.permute(0, 3, 1, 2) if channels_last else both
