"""Floating-point operations of a network, by layer."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from fedprune_app.core.named import Tensors
from fedprune_app.core.rng import global_draws_of

# A backward pass costs two forward passes: one product for the gradient by inputs, one for the gradient by weights.
BACKWARD_PER_FORWARD = 2


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch's ``FlopCounterMode`` without its import of torch's compiler, which takes longer than that of torch."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = ModuleTracker()
        self.counts: Counter[str] = Counter()  # by module, with those of its submodules

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, the first operation imports the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "overloadpacket", func))
        if count is not None:
            flops = count(*args, **kwargs, out_val=result)
            self.counts.update(dict.fromkeys(self.tracker.parents, flops))
        return result


@contextmanager
def _counted_kernels() -> Iterator[None]:
    """Compute by kernels that the counter knows: fused ones of attention and of recurrent layers have no entry."""
    fused = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # its context manager warns of what it restores
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused[0])
        torch.backends.mkldnn.enabled = fused[1]


def forward_flops(model: nn.Module, input_shape: Sequence[int]) -> dict[str, int]:
    """Return the FLOPs of one example's forward pass by layer name: 2 per multiply-add of the layer's matrix products.

    ``input_shape`` is that of one example, without the batch. Convolutions and linear layers count, as in the papers;
    biases, norms, activations and pooling do not. A module that multiplies matrices outside its submodules (attention)
    has an entry of its own. The pass is on an example of zeros. The model is not changed.
    """
    model = deepcopy(model).eval().cpu()
    example = torch.zeros(1, *input_shape, dtype=next(model.parameters()).dtype)
    counter = _FlopCounter()
    with torch.no_grad(), _counted_kernels(), counter.tracker, counter, global_draws_of(0):
        model(example)

    root = type(model).__name__
    layers: dict[str, int] = {}
    totals: dict[str, int] = {}  # a module that is never called (a list) has its submodules' sum
    for name, module in reversed(list(model.named_modules())):
        below = sum(totals.get(f"{name}.{child}" if name else child, 0) for child, _ in module.named_children())
        totals[name] = counter.counts.get(f"{root}.{name}" if name else root, below)
        layers[name] = totals[name] - below
    of_weights: dict[int, str] = {}  # of modules with one weight, the first has the FLOPs of all: the mask has its name
    found: Counter[str] = Counter()
    for name, module in model.named_modules():
        if layers[name]:
            found[of_weights.setdefault(id(getattr(module, "weight", module)), name)] += layers[name]
    return dict(found)


def sparse_flops(layer_flops: Mapping[str, int], masks: Tensors) -> float:
    """Return the FLOPs when only kept weights are multiplied: each layer's count times the kept share of its weight.

    ``masks`` are by parameter name (``conv1.weight``), True = kept. A layer without a mask is dense. Masks of other
    parameters are ignored.
    """
    densities = {name: int(mask.count_nonzero()) / max(1, mask.numel()) for name, mask in masks.items()}
    return sum(count * densities.get(f"{name}.weight", 1.0) for name, count in layer_flops.items())


def training_flops(layer_flops: Mapping[str, int], num_examples: int, masks: Tensors | None = None) -> float:
    """Return the FLOPs of training on ``num_examples`` (those of all epochs together): forward and backward passes.

    ``layer_flops`` are :func:`forward_flops` of the model. Dis-PFL's table adds the dense gradient of one batch for its
    mask search; a second call without masks gives that number.
    """
    return (1 + BACKWARD_PER_FORWARD) * sparse_flops(layer_flops, masks or {}) * num_examples
