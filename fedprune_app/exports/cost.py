"""What an exported network costs: its size, and the time it takes on this machine."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprune_app.core.rng import generator

Runner = Callable[[Tensor], Any]  # images (N, C, H, W) to logits (N, classes)


@dataclass(frozen=True)
class Size:
    """A size says what a model costs: bytes of its file, parameters, FLOPs and milliseconds.

    ``parameters`` counts those that are not pruned. ``flops`` are those of one example if only these parameters are
    multiplied. ``milliseconds`` maps a batch size to the time of one forward pass, in the runtime of the exported
    format.
    """

    file_bytes: int
    parameters: int
    flops: float
    milliseconds: Mapping[int, float]


def example_images(image_shape: tuple[int, int, int], batch: int) -> Tensor:
    """Return random images of about the scale of normalised ones; the images are always the same."""
    return torch.randn(batch, *image_shape, generator=generator(0, "export", batch))


@torch.inference_mode()
def latencies(
    runners: Sequence[Runner],
    image_shape: tuple[int, int, int],
    batches: Sequence[int] = (128, 1),
    seconds: float = 1.0,
) -> dict[int, list[float]]:
    """Return for each batch size each runner's median milliseconds per batch, on one thread.

    The times are processor time of that thread. On an idle machine that is the time on the clock. On a busy machine the
    clock would measure which runner has to wait, even in the median. The runners take turns, after one turn each to
    warm up. The median is of 3 to 100 turns, as many as fit into ``seconds``.
    """
    with one_thread():
        return {batch: medians(runners, example_images(image_shape, batch), seconds) for batch in batches}


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def medians(runners: Sequence[Runner], images: Tensor, seconds: float = 1.0) -> list[float]:
    """Return each runner's median milliseconds of this thread's time, as :func:`latencies` has them."""
    for runner in runners:
        runner(images)
    turns: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(turns) < 3 or (len(turns) < 100 and time.perf_counter() < end):
        turns.append([_milliseconds(runner, images) for runner in runners])
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _milliseconds(runner: Runner, images: Tensor) -> float:
    start = time.thread_time()
    runner(images)
    return 1000 * (time.thread_time() - start)


def machine() -> str:
    """Return the machine that the times were taken on: its processor, and the PyTorch version."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass  # this system is not Linux
    return f"{processor}, PyTorch {torch.__version__}"
