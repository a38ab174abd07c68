"""Linear layers of a pruned model that keep only their kept weights in memory, where that is also faster."""

import copy
import statistics
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core import sparse_linear
from fedprune_app.core.sparse_linear import DTYPES, PackedMatrix, pack

_MOST_KEPT = 0.9  # denser matrices are never small enough to be faster
_TURNS = 5
_CACHES = 1 << 29  # bytes, more than processors' caches hold
_GAIN = 0.95  # a packed layer may take this share of the dense layer's time, since times vary between turns


class SparseLinear(nn.Module):
    """An inference-only ``nn.Linear`` that computes from a packed matrix, on the CPU.

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
        """Return the layer's description in ``print(model)``."""
        density = f"density={self.matrix.density:.3f}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {density}"


@dataclass(frozen=True)
class Speed:
    """Milliseconds of a linear layer for one input, with its dense and with its packed weight."""

    dense: float
    packed: float

    @property
    def is_packed_faster(self) -> bool:
        """Return whether the packed weight is faster by more than the variation between turns."""
        return self.packed <= _GAIN * self.dense


class Chooser:
    """Choose which linear layers of a model become sparse: those that are faster then, on this machine.

    The model's matrices have ``num_bytes``: between two tokens, a small model stays in the processor's caches, and a
    large one does not. Layers of one shape, dtype, density to 5 % and number of threads are measured once.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._speeds: dict[tuple[object, ...], Speed] = {}

    def layer(self, weight: Tensor, bias: Tensor | None) -> SparseLinear | None:
        """Return a sparse layer, or None if the dense one is at least as fast."""
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


def sparsify(model: nn.Module) -> list[str]:
    """Replace the linear layers of ``model`` that are faster when sparse; return the layers' names.

    Each type of layer is measured here, for one input. A layer stays dense if that is as fast: with few zeros, small,
    on a GPU, or without the library. ``model`` is changed in place, and is then for inference only.
    """
    layers = {name: module for name, module in model.named_modules() if name and type(module) is nn.Linear}
    chooser = Chooser(sum(module.weight.numel() * module.weight.element_size() for module in layers.values()))
    names = []
    for name, module in layers.items():
        if sparse_layer := chooser.layer(module.weight.detach(), module.bias):
            model.set_submodule(name, sparse_layer)
            names.append(name)
    return names


def speed_of(weight: Tensor, matrix: PackedMatrix, num_bytes: int = 0) -> Speed:
    """Return the median times of one input through the dense ``weight`` and through ``matrix``, in turns.

    Copies of them, together as large as the model's ``num_bytes``, are used in turn. So the weights come from the same
    cache or memory as when the model computes.
    """
    from torch.utils.benchmark import Timer  # its import takes half a second

    count = max(1, min(num_bytes, _CACHES) // (weight.numel() * weight.element_size()))
    inputs = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    dense = cycle([weight.clone() for _ in range(count)])
    packed = cycle([copy.deepcopy(matrix) for _ in range(count)])

    def dense_product() -> Tensor:
        return F.linear(inputs, next(dense))

    def packed_product() -> Tensor:
        return sparse_linear.linear(inputs, next(packed))

    timers = [
        Timer("product()", globals={"product": product}, num_threads=torch.get_num_threads())
        for product in (dense_product, packed_product)
    ]
    seconds = [[timer.timeit(count).mean for timer in timers] for _ in range(_TURNS)]
    return Speed(*(1000 * statistics.median(times) for times in zip(*seconds, strict=True)))
