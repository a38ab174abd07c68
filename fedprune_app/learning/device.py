"""Device, mode and memory layout of a network's computation."""

import ctypes
import os
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.config import Config
from fedprune_app.core.graphs import CudaGraphs
from fedprune_app.core.modules import computation_key, generic_copy
from fedprune_app.core.rng import global_draws_of

_TRIM, _MAP = (-1, 2**28), (-3, 2**25)  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, and bytes


def device_of(config: Config) -> torch.device:
    """Return the device for the key ``device`` on this machine."""
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def prepare_torch(config: Config) -> None:
    """Set torch's options of this process: threads, TF32, deterministic algorithms on a CUDA device."""
    torch.set_num_threads(config.num_threads)
    _keep_memory()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    if device_of(config).type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with such a workspace
        torch.backends.cudnn.deterministic = config.deterministic
        torch.use_deterministic_algorithms(config.deterministic)


@cache
def _keep_memory() -> None:
    """Make the C library keep free memory, up to 256 MiB.

    A process that has not freed a large block yet returns the memory of each step's tensors to the system, and
    allocates it again page by page: a quarter of a step of LeNet-5 with eight clients.
    """
    with suppress(OSError, AttributeError):  # another C library than glibc
        for option, num_bytes in (_TRIM, _MAP):
            ctypes.CDLL(None).mallopt(option, num_bytes)


def recorder_of(config: Config, device: torch.device) -> CudaGraphs | None:
    """Return the recorder of CUDA graphs if the key ``cuda-graphs`` and the device enable it, else None."""
    return _recorder(device) if config.cuda_graphs and device.type == "cuda" else None


@cache
def _recorder(device: torch.device) -> CudaGraphs:
    """Return one recorder per process: each stream has its own workspace for products."""
    return CudaGraphs(device)


def computing(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Compute a network in ``precision`` within the context; see the key of that name."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def move_to_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Move ``model`` to ``device``, if given, and return the model's device."""
    if device is not None:
        model.to(device)
        return torch.device(device)
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def fast_layout(model: nn.Module, example_shape: Sequence[int], frozen: Collection[str] = ()) -> Iterator[None]:
    """Put the channels of convolution weights last in memory within the context, where that is faster.

    Activations follow the weights. A network that fails so, or computes something else, keeps its layout: see
    :func:`_same_so`, which compares once.

    It is faster on CPUs: training steps of the small networks take a tenth less time, evaluations a third to a half. On
    an H200 a step of ResNet-18 with group norm is slower, 1.4 times as long in float32 and 1.04 in TF32. Weights in
    ``frozen`` keep their layout: torch's group norm crashes on channels-last input that needs no gradient.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.dim() == 4 and name not in frozen]
    weights = [p for _, p in parameters if p.device.type == "cpu"]
    if weights and not _same_so(model, example_shape):
        weights = []
    own_memory = [weight.data for weight in weights]
    for weight in weights:
        # Not .contiguous(): with a single input channel it keeps the strides, from which torch reads the layout.
        weight.data = torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight.data)
    try:
        yield
    finally:
        for weight, memory in zip(weights, own_memory, strict=True):
            weight.data = memory.copy_(weight.data)


_compared: dict[Hashable, bool] = {}  # by computation, mode and shape of an example


def _same_so(model: nn.Module, example_shape: Sequence[int]) -> bool:
    """Return whether a network has the same losses, gradients and buffers with its weights' channels last.

    Views and overwritten values can depend on the layout, and so can dropout's draws. In float64 all other differences
    are rounding. A network that torch.fx cannot trace is not compared, and keeps its layout.
    """
    if (computation := computation_key(model)) is None:
        return False
    key = computation, model.training, tuple(example_shape)
    if key not in _compared:
        try:
            _compared[key] = _agree(*[_outcome(model, example_shape, f) for f in (None, torch.channels_last)])
        except Exception:  # a user's network may raise anything; in its own layout the error is shown
            _compared[key] = False
    return _compared[key]


def _outcome(model: nn.Module, example_shape: Sequence[int], format: torch.memory_format | None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    network = generic_copy(model, draw).double().train(model.training)
    for weight in network.parameters():
        if weight.dim() == 4 and format is not None:
            weight.data = torch.empty_like(weight, memory_format=format).copy_(weight.data)
    images = torch.randn(3, *example_shape, generator=draw, dtype=torch.float64)
    with global_draws_of(0):
        logits = network(images)
    losses = F.cross_entropy(logits, torch.arange(3) % logits.shape[1], reduction="none")
    gradients = torch.autograd.grad(losses.sum(), list(network.parameters()), materialize_grads=True)
    return [losses.detach(), logits.detach(), *gradients, *(b.double() for b in network.buffers())]


def _agree(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> bool:
    largest = max(float(tensor.abs().max()) for tensor in expected if tensor.numel())
    return all(
        torch.allclose(a, b, rtol=1e-6, atol=1e-9 * largest, equal_nan=True)
        for a, b in zip(actual, expected, strict=True)
    )
