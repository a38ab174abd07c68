"""Grouped forms: the networks of several clients computed as one, derived from the network itself.

A step of a small network is a long list of small operations, each of which takes longer to start than to compute. One
operation for all clients is started once. Convolutions become grouped ones, with each client's channels as a group.
Linear layers become batched matrix products. Group norms have each client's groups.

oneDNN computes a convolution of one group differently from one of several, which changes the last bits. So each
client's batch is two groups: the two halves of its examples. A client's numbers are then the same alone and with
others, and a step of a client alone takes no longer than that of the network itself.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedprune_app.core.flops import forward_flops
from fedprune_app.core.modules import computation_key, generic_copy, traced
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.learning.device import fast_layout
from fedprune_app.learning.flat import FlatLayout, trained_names

_Operation = Callable[[Tensors, int, Sequence[Tensor]], Tensor]
_ALIGNED_ROWS = 16  # so many rows of any length are a multiple of 64 bytes
# A number's bits are the same wherever in a tensor it is. Those of GELU, SiLU, sigmoid and ELU differ in the last few.
_ELEMENTWISE = (nn.ReLU, nn.Identity, nn.Tanh, nn.LeakyReLU)
_BY_CHANNEL = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d)
_VECTORS = 64  # of so many channels of a client torch computes each in the same way, wherever it is


class NoGroupedForm(ValueError):
    """Raised for a network without a grouped form; the message names the part that has none."""


@dataclass(frozen=True)
class _Step:
    operation: _Operation
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class GroupedForm:
    """A network's computation for several clients at once, each with its own weights and images.

    ``flops`` are those of one example's forward pass through one client's network.
    """

    steps: tuple[_Step, ...]
    flops: int

    def __call__(self, weights: Tensors, images: Tensor) -> Tensor:
        """Map images (clients, B, ...) to logits (clients, B, classes).

        ``weights`` are all clients' parameters by name: matrices stacked (clients, out, in), others joined in the first
        dimension (clients · out, ...).
        """
        clients = len(images)
        values = [images]
        for step in self.steps:
            values.append(step.operation(weights, clients, [values[i] for i in step.inputs]))
        return values[-1][:, : images.shape[1]]


_forms: dict[Hashable, GroupedForm | str] = {}  # texts, since an exception's traceback would keep the network alive


def grouped_form(model: nn.Module, example_shape: Sequence[int]) -> GroupedForm:
    """Return the grouped form of a network that maps a batch of such examples to logits.

    The form is derived from the network's operations by rules, and compared with the network once: losses and gradients
    of three clients must agree, and on a CPU each client's have the same bits beside others as alone. Networks that
    compute the same share a form. Raises :class:`NoGroupedForm` for a network with other parts than convolutions,
    linear layers, group norms, pooling, activations, flattening and sums, for one with hooks, and if a comparison
    fails.
    """
    if any(_has_hooks(module) for module in model.modules()):
        raise NoGroupedForm("a part of it has hooks, which see no grouped form")
    if (computation := computation_key(model)) is None:
        raise NoGroupedForm("torch.fx cannot follow it")
    key = computation, tuple(example_shape), next(model.parameters()).device, torch.get_num_threads()
    if key not in _forms:
        _forms[key] = _derive_form(model, example_shape)
    form = _forms[key]
    if isinstance(form, str):
        raise NoGroupedForm(form)
    return form


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _derive_form(model: nn.Module, example_shape: Sequence[int]) -> GroupedForm | str:
    """Return the form, or why there is none; torch may raise anything if a rule does not fit a network."""
    steps, positions = list[_Step](), dict[fx.Node, int]()
    try:
        for node in traced(model).nodes:
            inputs = tuple(positions[node_input] for node_input in node.all_input_nodes)
            if node.op == "output":
                continue
            if node.op != "placeholder":
                steps.append(_Step(_operation(model, node), inputs))
            positions[node] = len(steps)
        form = GroupedForm(tuple(steps), sum(forward_flops(model, example_shape).values()))
        _compare(form, model, example_shape)
    except NoGroupedForm as error:
        return str(error)
    except Exception:
        return "the rules for groups do not fit it"
    return form


def _compare(form: GroupedForm, model: nn.Module, example_shape: Sequence[int]) -> None:
    """Raise :class:`NoGroupedForm` if a form has other losses or gradients than the network on random batches.

    In float64 they differ by rounding alone, which no threshold in a network amplifies. In float32 a client's have to
    be the same to the bit beside others and alone, but on a GPU.
    """
    draw = torch.Generator().manual_seed(0)
    twins = [generic_copy(model, draw).double() for _ in range(3)]
    images = torch.randn(len(twins), _COMPARED, *example_shape, generator=draw, dtype=torch.float64)
    with ExitStack() as stack:
        for twin in twins:
            stack.enter_context(fast_layout(twin, example_shape))
        names = trained_names(twins[0])
        images = images.to(twins[0].get_parameter(names[0]).device)
        expected = []
        for twin, own_images in zip(twins, images, strict=True):
            logits = twin(own_images.clone())
            labels = torch.arange(_COMPARED, device=logits.device) % logits.shape[1]
            losses = F.cross_entropy(logits, labels, reduction="none")
            weights = [twin.get_parameter(name) for name in names]
            expected.append([losses, *torch.autograd.grad(losses.sum(), weights, materialize_grads=True)])
        largest = max(float(gradient.abs().max()) for _, *each in expected for gradient in each if gradient.numel())
        found = _computed(form, twins, images, labels)
        for (name, rows), *own in zip(found.items(), *expected, strict=True):
            if not torch.allclose(rows, torch.stack(own).flatten(1), rtol=1e-6, atol=1e-9 * largest):
                raise NoGroupedForm(f"the rules for groups give another {name} than the network")
        if images.device.type == "cpu":
            twins, images = [twin.float() for twin in twins], images.float()
            together = _computed(form, twins, images, labels)
            for number, twin in enumerate(twins):
                for name, rows in _computed(form, [twin], images[number : number + 1].clone(), labels).items():
                    if not torch.equal(rows[0], together[name][number]):
                        raise NoGroupedForm(f"a client's {name} has other bits beside others than alone")


def _computed(form: GroupedForm, twins: Sequence[nn.Module], images: Tensor, labels: Tensor) -> TensorDict:
    """Return the losses and gradients of some networks in their grouped form, by name: a row for each network."""
    layout = FlatLayout(twins[0], trained_names(twins[0]), len(twins))
    values = layout.zeros()
    for number, twin in enumerate(twins):
        for name, view in layout.views(values, number).items():
            view.copy_(twin.get_parameter(name).detach())
    weights = {name: layout.stacked(values, name, len(twins)).requires_grad_() for name in layout.names}
    ones, all_labels = torch.ones(images.shape[:2], device=images.device), labels.expand(len(images), -1)
    losses, gradients = grouped_gradients(form, weights, list(weights.values()), images, all_labels, ones)
    rows = (each.reshape(len(twins), -1) for each in (losses, *gradients))
    return dict(zip(["loss", *weights], rows, strict=True))


_COMPARED = 3  # examples of each client, an odd number, to test that the form pads batches to even ones


def grouped_gradients(
    form: GroupedForm,
    weights: Tensors,
    leaves: Sequence[Tensor],
    images: Tensor,
    labels: Tensor,
    weights_of_examples: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted losses of all clients' examples, and the gradients of their sum by the ``leaves``.

    The network is ``form`` with ``weights``; the leaves are the trained ones. Losses, ``weights_of_examples`` and
    ``labels`` are (clients, examples).
    """
    logits = form(weights, images)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(len(labels), -1)
    losses = losses * weights_of_examples
    gradients = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
    return losses.detach(), list(gradients)


def _operation(model: nn.Module, node: fx.Node) -> _Operation:
    """Return an operation's version for groups: a proposal, which :func:`_compare` checks."""
    if node.op == "call_module":
        return _layer_operation(str(node.target), model.get_submodule(str(node.target)))
    if node.target in (operator.add, torch.add) and len(node.all_input_nodes) == 2:
        return lambda _weights, _clients, values: values[0] + values[1]
    if node.target in (torch.relu, F.relu):
        return lambda _weights, _clients, values: F.relu(values[0])
    if node.target is torch.flatten:
        return _flatten
    raise NoGroupedForm(f"'{node.name}' ({node.op} {node.target}) is none of the operations that it has for groups")


def _layer_operation(path: str, layer: nn.Module) -> _Operation:
    def for_halves(weights: Tensors, clients: int) -> tuple[Tensor, Tensor | None]:
        bias = weights.get(f"{path}.bias")
        return _repeat_for_halves(weights[f"{path}.weight"], clients), None if bias is None else _repeat_for_halves(
            bias, clients
        )

    match layer:
        case nn.Conv2d():
            convolve = partial(F.conv2d, stride=layer.stride, padding=layer.padding, dilation=layer.dilation)
            return lambda weights, clients, values: convolve(
                _channels(values[0]), *for_halves(weights, clients), groups=2 * clients
            )
        case nn.Linear():
            return lambda weights, _clients, values: _linear(
                values[0], weights[f"{path}.weight"], weights.get(f"{path}.bias")
            )
        case nn.GroupNorm():
            groups, eps = layer.num_groups, layer.eps
            return lambda weights, clients, values: F.group_norm(
                _group_norm_input(_channels(values[0])), 2 * clients * groups, *for_halves(weights, clients), eps
            )
        case nn.Flatten():
            return _flatten
        case nn.AdaptiveAvgPool2d() if layer.output_size in (1, (1, 1)):
            return lambda _weights, clients, values: _global_mean(_channels(values[0]), clients)
        case _ if type(layer) in _ELEMENTWISE:
            return lambda _weights, _clients, values: layer(values[0])
        case _ if type(layer) in _BY_CHANNEL:
            return lambda _weights, _clients, values: layer(_channels(values[0]))
    raise NoGroupedForm(f"layer '{path}' is of type {type(layer).__name__}, which has no form for groups")


# --- values: images (clients, B, C, H, W); between convolutions (B / 2, clients · 2 · C, H, W); vectors (clients, B, F)


def _channels(value: Tensor) -> Tensor:
    """Return images as (B / 2, clients · 2 · C, H, W), with the channels last in memory on a CPU.

    Each client's batch is two groups of channels: the first half of its examples, then the second.
    """
    if value.dim() != 5:
        return value
    value = F.pad(value, (0, 0, 0, 0, 0, 0, 0, value.shape[1] % 2))
    clients, batch, depth, height, width = value.shape
    halves = value.view(clients, 2, batch // 2, depth, height, width)
    if value.device.type != "cpu":
        return halves.permute(2, 0, 1, 3, 4, 5).reshape(batch // 2, -1, height, width)
    output = value.new_empty(batch // 2, height * width, clients * 2 * depth)
    for transposed, images in zip(output, halves.unbind(2), strict=True):  # a matrix at a time, which is fast in torch
        transposed.copy_(images.reshape(clients * 2 * depth, -1).t())
    return output.view(batch // 2, height, width, -1).permute(0, 3, 1, 2)


def _global_mean(value: Tensor, clients: int) -> Tensor:
    """Return the mean of each channel, whose bits do not depend on the number of clients."""
    is_whole = value.shape[1] // clients % _VECTORS == 0
    return F.adaptive_avg_pool2d(value, 1) if is_whole else F.avg_pool2d(value, value.shape[2:])


def _group_norm_input(value: Tensor) -> Tensor:
    """Return a contiguous value if it needs no gradient: torch's group norm crashes on such channels-last input."""
    return value if value.requires_grad else value.contiguous()


def _flatten(_weights: Tensors, clients: int, values: Sequence[Tensor]) -> Tensor:
    value = values[0]
    if value.dim() == 5:
        return _align(value.flatten(2))
    if value.dim() == 3:
        return value
    half, _, *area = value.shape
    halves = value.reshape(half, clients, 2, -1, *area).permute(1, 2, 0, *range(3, 4 + len(area)))
    return _align(halves.reshape(clients, 2 * half, -1))


def _align(vectors: Tensor) -> Tensor:
    """Pad each client's batch with zeros, so that its vectors begin at an aligned address.

    The last bits of a matrix product can depend on the addresses of its operands.
    """
    return F.pad(vectors, (0, 0, 0, -vectors.shape[1] % _ALIGNED_ROWS))


def _linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    clients, outputs, inputs = weight.shape
    if outputs * inputs % 4:  # each client's gradient of the weights begins at an aligned address, too
        value, weight = (F.pad(each, (0, -inputs % 4)) for each in (value, weight))
    if bias is None:
        return torch.bmm(value, weight.transpose(1, 2))
    return torch.baddbmm(bias.reshape(clients, 1, outputs), value, weight.transpose(1, 2))


def _repeat_for_halves(parameter: Tensor, clients: int) -> Tensor:
    """Return clients' parameters (clients · n, ...) with each client's repeated, once for each half."""
    channels_last = parameter.dim() == 4 and parameter.device.type == "cpu"
    memory = parameter.permute(0, 2, 3, 1) if channels_last else parameter  # in memory order
    per_client = memory.reshape(clients, 1, -1, *memory.shape[1:])
    halves = per_client.expand(-1, 2, *per_client.shape[2:]).reshape(2 * len(memory), *memory.shape[1:])
    return halves.permute(0, 3, 1, 2) if channels_last else halves
