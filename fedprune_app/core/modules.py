"""Helpers for any network: its key, its traced operations, its mode, a copy for checks."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import fx, nn

from fedprune_app.core.named import TensorDict
from fedprune_app.core.rng import global_draws_of, global_states

_KNOWN = ("torch.nn.", "torchvision.", "fedprune_app.")
_ELSEWHERE = {"training", "_parameters", "_buffers", "_modules"}


def computation_key(model: nn.Module) -> Hashable | None:
    """Return a key that two networks share only if their training computes the same, apart from their values.

    The key has the types of all modules, their attributes, hooks included, and the shapes of their tensors. A user's
    class may depend on more than that, so the key then includes the traced operations. Return None for a network with
    such modules that torch.fx cannot trace.
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
    """Return a network's operations in training, which may differ from those in evaluation; it is not changed.

    A trace would hold one draw or count for ever, so a network that draws in Python, as stochastic depth does, or that
    changes itself, has none.
    """
    copy = deepcopy(model).train()

    def state() -> list[object]:
        buffers = [(id(buffer), buffer._version) for buffer in copy.buffers()]
        return [*global_states(), *buffers, *map(_attributes, copy.modules())]

    with global_draws_of(0):
        before, _held = state(), [*copy.buffers()]  # a new buffer gets no id of a buffer that is held
        graph = fx.Tracer().trace(copy)
        if before != state():
            raise ValueError("it draws random numbers in Python, or changes its attributes or buffers")
    return graph


def tensors_of(model: nn.Module) -> TensorDict:
    """Return all parameters and buffers by name, not copied."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextmanager
def module_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set all modules to train or eval mode within the context; afterwards restore each one's own mode."""
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

    Initial values may be such: a last layer of zeros hides all others from the loss.
    """
    copy = deepcopy(model).train().requires_grad_(True)
    for parameter in copy.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else 4
        noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype) / max(fan_in, 1) ** 0.5
        parameter.add_(noise.to(parameter.device))
    return copy
