"""Several clients' networks alike compute as one network, derived from the network itself: its grouped form.

A step of a small network is a long list of small operations, each of which costs more to start than to do. One
operation for all clients is started once. Convolutions become grouped ones, with each client's channels as a group.
Linear layers become batched matrix products. Group norms have each client's groups.

oneDNN computes a convolution of one group otherwise than one of several, which changes the last bits. So a single
client's convolution is computed twice, as two groups. A client's numbers are then the same whoever is beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedprune_app.core.flops import forward_flops

Weights = Mapping[str, Tensor]
_Operation = Callable[[Weights, int, Sequence[Tensor]], Tensor]
_ALIGNED_ROWS = 16  # so many rows of whatever length are a multiple of 64 bytes
_ELEMENTWISE = (nn.ReLU, nn.Identity, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU)
_BY_CHANNEL = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


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
_forms: dict[str, GroupedForm | NoGroupedForm] = {}


def grouped_form(model: nn.Module, example_shape: Sequence[int]) -> GroupedForm:
    """This derives the grouped form of a network that maps a batch of such examples to logits.

    Networks of the same structure have one form. Raises :class:`NoGroupedForm` for a network with other parts than
    convolutions, linear layers, group norms, pooling, activations, flattening and sums.
    """
    structure = f"{model} {tuple(example_shape)}"
    if structure not in _forms:
        if len(_forms) == _MOST_FORMS:
            _forms.pop(next(iter(_forms)))
        _forms[structure] = _derived(model, example_shape)
    form = _forms[structure]
    if isinstance(form, NoGroupedForm):
        raise form
    return form


def _derived(model: nn.Module, example_shape: Sequence[int]) -> GroupedForm | NoGroupedForm:
    names = {name for name, _ in model.named_parameters()}
    steps, at = list[_Step](), dict[fx.Node, int]()
    try:
        for node in fx.Tracer().trace(model).nodes:
            inputs = tuple(at[each] for each in node.all_input_nodes)
            if node.op == "output":
                if inputs != (len(steps),):
                    raise NoGroupedForm("its output is not its last value")
                continue
            if node.op != "placeholder":
                steps.append(_Step(_operation(model, node, names), inputs))
            at[node] = len(steps)
        flops = sum(forward_flops(model, example_shape).values())
    except NoGroupedForm as error:
        return error
    except Exception as error:  # a network that torch.fx cannot follow; it may raise anything
        return NoGroupedForm(str(error))
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
    def of_weights(weights: Weights) -> tuple[Tensor, Tensor | None]:
        return weights[f"{path}.weight"], weights.get(f"{path}.bias")

    match layer:
        case nn.Conv2d() if layer.groups == 1 and layer.padding_mode == "zeros":
            convolve = partial(F.conv2d, stride=layer.stride, padding=layer.padding, dilation=layer.dilation)
            return lambda weights, clients, values: _convolved(
                convolve, _channels(values[0]), *of_weights(weights), clients
            )
        case nn.Linear():
            return lambda weights, _clients, values: _multiplied(values[0], *of_weights(weights))
        case nn.GroupNorm() if layer.affine:
            groups, eps = layer.num_groups, layer.eps
            return lambda weights, clients, values: F.group_norm(
                _channels(values[0]), clients * groups, *of_weights(weights), eps
            )
        case nn.Flatten() if layer.start_dim == 1 and layer.end_dim == -1:
            return _flatten
        case _ if type(layer) in _ELEMENTWISE:
            return lambda _weights, _clients, values: layer(values[0])
        case _ if type(layer) in _BY_CHANNEL:
            return lambda _weights, _clients, values: layer(_channels(values[0]))
    raise NoGroupedForm(f"layer '{path}' is of type {type(layer).__name__}, which has no form for groups")


# --- values: images (clients, B, C, H, W); between convolutions (B, clients · C, H, W); vectors (clients, B, F) -----


def _channels(value: Tensor) -> Tensor:
    """This returns images as (B, clients · C, H, W), with the channels last in memory on a CPU."""
    if value.dim() != 5:
        return value
    clients, batch, depth, height, width = value.shape
    if value.device.type != "cpu":
        return value.transpose(0, 1).reshape(batch, clients * depth, height, width)
    last = value.new_empty(batch, height * width, clients * depth)
    for transposed, image in zip(last, value.unbind(1), strict=True):  # a matrix at a time: torch is fast at that
        transposed.copy_(image.reshape(clients * depth, -1).t())
    return last.view(batch, height, width, -1).permute(0, 3, 1, 2)


def _flatten(_weights: Weights, clients: int, values: Sequence[Tensor]) -> Tensor:
    value = values[0]
    if value.dim() == 5:
        return _aligned(value.flatten(2))
    if value.dim() == 3:
        return value
    batch, channels, *area = value.shape
    return _aligned(value.reshape(batch, clients, channels // clients, *area).transpose(0, 1).flatten(2))


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


def _convolved(
    convolve: Callable[..., Tensor], value: Tensor, weight: Tensor, bias: Tensor | None, clients: int
) -> Tensor:
    if clients > 1:
        return convolve(value, weight, bias, groups=clients)
    both = None if bias is None else torch.cat([bias, bias])
    twice = convolve(_twice(value, 1), _twice(weight, 0), both, groups=2)
    return twice[:, : len(weight)]


def _twice(tensor: Tensor, dimension: int) -> Tensor:
    """This returns a tensor beside itself, in the memory layout that several clients' tensors have."""
    if tensor.device.type != "cpu":
        return torch.cat([tensor, tensor], dimension)
    last = tensor.permute(0, 2, 3, 1)
    return torch.cat([last, last], 3 if dimension == 1 else 0).permute(0, 3, 1, 2)
