"""What a network computes: a key that is equal for equal networks, and floating-point operations by layer."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedprune_app.core.rng import global_draws_of

_KNOWN = ("torch.nn.", "torchvision.", "fedprune_app.")
_ELSEWHERE = {"training", "_parameters", "_buffers", "_modules"}


def computation_key(model: nn.Module) -> Hashable | None:
    """Return a key that two networks share only if they compute the same in training, but for their values.

    The key has the types of all modules, their attributes, hooks included, and the shapes of their tensors. A module of
    a user's class may compute by more than that, so the key then has the traced operations as well. Return None where
    there are such modules and torch.fx cannot follow the network.
    """
    modules = tuple((name, type(module), _attributes(module)) for name, module in model.named_modules())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    if all(kind.__module__.startswith(_KNOWN) for _, kind, _ in modules):
        return modules, shapes
    try:
        return modules, shapes, str(traced(model))
    except Exception:  # torch.fx may raise anything
        return None


def _attributes(module: nn.Module) -> str:
    return repr({name: value for name, value in vars(module).items() if name not in _ELSEWHERE})


def traced(model: nn.Module) -> fx.Graph:
    """Return the operations of a network in training, which may be others than in a test. It stays as it is."""
    return fx.Tracer().trace(deepcopy(model).train())


@contextmanager
def module_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put all modules in train or eval mode meanwhile; afterwards each one is back in its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def generic_copy(model: nn.Module, draw: torch.Generator) -> nn.Module:
    """Return a copy in train mode that trains all parameters, with values at which no gradient is 0 by chance.

    First values may be: a last layer of zeros hides all others from the loss.
    """
    copy = deepcopy(model).train().requires_grad_(True)
    for parameter in copy.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else 4
        noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype) / max(fan_in, 1) ** 0.5
        parameter.add_(noise.to(parameter.device))
    return copy


# --- floating-point operations ----------------------------------------------------------------------------------------


# A backward pass costs two forward passes: one product for the gradient by inputs, one for the gradient by weights.
BACKWARD_PER_FORWARD = 2


def forward_flops(model: nn.Module, input_shape: Sequence[int]) -> dict[str, int]:
    """Return the FLOPs of one example's forward pass by layer name: 2 per multiply-add of the layer's matrix products.

    ``input_shape`` is that of one example, without the batch. Convolutions and linear layers count, as in the
    papers. Their biases, norms, activations and pooling do not count. A module that multiplies matrices outside its
    submodules (attention) has an entry of its own. The pass is on an example of zeros, or on shapes alone where the
    model is on the meta device. The model stays as it is.
    """
    model = deepcopy(model).eval()
    first = next(model.parameters())
    example = torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device)
    # the other kernels of attention are not counted on every device
    counter_mode = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter_mode as counter, global_draws_of(0):
        model(example)

    root = type(model).__name__
    counts = {name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
    layers: dict[str, int] = {}
    totals: dict[str, int] = {}  # those of a module that nobody calls (a list) are those of its submodules
    for name, module in reversed(list(model.named_modules())):
        below = sum(totals.get(f"{name}.{child}" if name else child, 0) for child, _ in module.named_children())
        totals[name] = counts.get(f"{root}.{name}" if name else root, below)
        layers[name] = totals[name] - below
    return {name: layers[name] for name, _ in model.named_modules() if layers[name]}


def sparse_flops(layer_flops: Mapping[str, int], masks: Mapping[str, Tensor]) -> float:
    """Return the FLOPs when only kept weights are multiplied: each layer's count times the kept share of its weight.

    ``masks`` are by parameter name (``conv1.weight``), True = kept. A layer without a mask is dense. Masks of other
    parameters do not matter.
    """
    densities = {name: int(mask.count_nonzero()) / max(1, mask.numel()) for name, mask in masks.items()}
    return sum(count * densities.get(f"{name}.weight", 1.0) for name, count in layer_flops.items())


def training_flops(
    layer_flops: Mapping[str, int], num_examples: int, masks: Mapping[str, Tensor] | None = None
) -> float:
    """Return the FLOPs of training on ``num_examples`` (those of all epochs together): forward and backward passes.

    ``layer_flops`` are :func:`forward_flops` of the model. Dis-PFL's table adds the dense gradient of one batch for its
    mask search; a second call without masks gives that number.
    """
    return (1 + BACKWARD_PER_FORWARD) * sparse_flops(layer_flops, masks or {}) * num_examples
