"""Linear layers of a pruned model keep their kept weights alone in memory, where that is also faster."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.sparse import to_sparse_semi_structured
from torch.utils.benchmark import Timer

from fedprune_app.core import sparse_linear
from fedprune_app.core.sparse_linear import DTYPES, PackedMatrix, pack

_MOST_KEPT = 0.9  # denser matrices are never smaller by enough to be faster
_TURNS = 5
_REPEATS = 20  # calls in one turn on a GPU
_PROMPT = 256  # inputs of a prompt
_TILE = 64  # what sizes of 2:4 matrices must be multiples of, in every library that PyTorch uses for them
_CACHES = 1 << 29  # bytes, more than the caches of processors hold
_GAIN = 0.95  # share of the dense layer's time that a packed layer may take, given that times differ from turn to turn


class SparseLinear(nn.Module):
    """A sparse linear layer computes what ``nn.Linear`` computes, from a packed matrix, on the CPU.

    ``matrix`` is the packed weight (out_features, in_features), and ``bias`` has shape (out_features,). There are no
    gradients.
    """

    words: Tensor
    starts: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = matrix.columns, matrix.rows
        self.register_buffer("words", matrix.words)
        self.register_buffer("starts", matrix.starts)
        self.register_buffer("values", matrix.values)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.in_features, self.words, self.starts, self.values)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., out_features) of ``inputs`` (..., in_features).

        Raises ``RuntimeError`` for inputs that need gradients or are not on the CPU.
        """
        return sparse_linear.linear(inputs, self.matrix, self.bias)

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of the layer."""
        density = f"density={self.matrix.density:.3f}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {density}"


@dataclass(frozen=True)
class Speed:
    """The speed of a linear layer for one input is in milliseconds, with its dense and with its packed weight."""

    dense: float
    packed: float

    @property
    def is_packed_faster(self) -> bool:
        """Return whether the packed weight is faster by more than the times differ from turn to turn."""
        return self.packed <= _GAIN * self.dense


class Chooser:
    """A chooser says which linear layers of a model become sparse: those that are faster then, on this machine.

    The model's matrices have ``num_bytes``: from one token to the next, a small model stays in the processor's caches,
    and a large one does not. Layers of one shape, dtype, density to 5 % and number of threads are measured once.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._speeds: dict[tuple[object, ...], Speed] = {}

    def layer(self, weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        """Return a sparse layer of these, or None where the dense one is at least as fast."""
        if is_for_tensor_cores(weight):
            return self._tensor_core_layer(weight, bias)
        if not sparse_linear.instructions() or weight.dtype not in DTYPES or weight.device.type != "cpu":
            return None
        density = float(torch.count_nonzero(weight)) / max(1, weight.numel())
        if density > _MOST_KEPT:
            return None
        matrix = pack(weight)
        key = (tuple(weight.shape), weight.dtype, round(20 * density), torch.get_num_threads())
        if key not in self._speeds:
            self._speeds[key] = speed_of(weight, matrix, self._num_bytes)
        return SparseLinear(matrix, bias) if self._speeds[key].is_packed_faster else None

    def _tensor_core_layer(self, weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        """Return a linear layer whose weight has the kept halves alone, which a GPU's tensor cores read as they are.

        The layer must be faster for one input and for many, else the result is None.
        """
        packed_weight = to_sparse_semi_structured(weight.contiguous())
        for tokens in (1, _PROMPT):
            key = (tuple(weight.shape), weight.dtype, tokens)
            if key not in self._speeds:
                self._speeds[key] = _speed_on_gpu(weight, packed_weight, tokens)
            if not self._speeds[key].is_packed_faster:
                return None
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(packed_weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return layer


def is_for_tensor_cores(weight: Tensor) -> bool:
    """Return whether a GPU's tensor cores skip the zeros of ``weight``: 2:4 in 16 bits, from compute capability 8."""
    on_gpu = weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    is_of_size = weight.dtype in (torch.float16, torch.bfloat16) and not any(size % _TILE for size in weight.shape)
    return on_gpu and is_of_size and is_two_of_four(weight)


def is_two_of_four(weight: Tensor) -> bool:
    """Return whether of every 4 neighbours in a row of ``weight`` (rows, columns) at most 2 are not zero.

    >>> is_two_of_four(torch.tensor([[0.0, 1.0, 2.0, 0.0]])), is_two_of_four(torch.ones(1, 4))
    (True, False)
    """
    rows, columns = weight.shape
    return columns % 4 == 0 and bool(((weight != 0).reshape(rows, -1, 4).sum(2) <= 2).all())


def sparsify(model: nn.Module) -> list[str]:
    """Replace the linear layers of ``model`` that are faster with their zeros left out; return the layers' names.

    Each kind of layer is measured here, for one input. A layer stays dense where the dense one is as fast: with few
    zeros, small, or without the library. The model is for inference from then on, on the device where it is, and is
    changed in place. On a GPU only matrices that keep two of every four neighbours, in 16 bits, may become sparse.
    """
    layers = list(_linear_layers(model))
    chooser = Chooser(sum(module.weight.numel() * module.weight.element_size() for _, module, _ in layers))
    names = []
    for name, module, parent in layers:
        if sparse_layer := chooser.layer(module.weight.detach(), module.bias):
            setattr(parent, name.rpartition(".")[2], sparse_layer)
            names.append(name)
    return names


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module]]:
    """Yield each linear layer with its name and the module that holds the layer, but for the model itself."""
    for name, module in model.named_modules():
        if name and type(module) is nn.Linear:
            yield name, module, model.get_submodule(name.rpartition(".")[0])


def _speed_on_gpu(weight: Tensor, packed: Tensor, tokens: int) -> Speed:
    """Return the median times of so many inputs through the two weights, in turns."""
    inputs = torch.ones(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return _in_turns(partial(F.linear, inputs, weight), partial(F.linear, inputs, packed), _REPEATS)


def speed_of(weight: Tensor, matrix: PackedMatrix, num_bytes: int = 0) -> Speed:
    """Return the median times of one input through the dense ``weight`` and through ``matrix``, in turns.

    Copies of them are used one after the other, together as large as the model's ``num_bytes``. So the weights come
    from the cache or the memory from which they come when the model computes.
    """
    count = max(1, min(num_bytes, _CACHES) // (weight.numel() * weight.element_size()))
    inputs = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    dense = cycle([weight.clone() for _ in range(count)])
    packed = cycle([copy.deepcopy(matrix) for _ in range(count)])

    def dense_product() -> Tensor:
        return F.linear(inputs, next(dense))

    def packed_product() -> Tensor:
        return sparse_linear.linear(inputs, next(packed))

    return _in_turns(dense_product, packed_product, count)


def _in_turns(dense: Callable[[], Tensor], packed: Callable[[], Tensor], repeats: int) -> Speed:
    timers = [
        Timer("product()", globals={"product": product}, num_threads=torch.get_num_threads())
        for product in (dense, packed)
    ]
    seconds = [[timer.timeit(repeats).mean for timer in timers] for _ in range(_TURNS)]
    return Speed(*(1000 * statistics.median(times) for times in zip(*seconds, strict=True)))
