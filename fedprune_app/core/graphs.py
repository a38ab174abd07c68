"""CUDA graphs: a GPU repeats a recorded step as a whole, not operation by operation.

A step is some hundred small operations. A GPU does each of them faster than the CPU can start it. A CUDA graph is the
list of these operations with the memory that they read and write.
"""

from collections.abc import Callable
from functools import partial

import torch

from fedprune_app.core.rng import global_states

# Steps before the recorded one: they load kernels and choose between algorithms.
WARM_UP_STEPS = 3


class CudaGraphs:
    """Record a step as a CUDA graph of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # CUDA records on no default one

    def warm_up(self, step: Callable[[], object]) -> None:
        """Do a step on the stream on which a step is recorded afterwards."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def record(self, step: Callable[[], object]) -> Callable[[], None]:
        """Record a step without doing it, and return a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class RepeatedSteps:
    """Do the first steps, record the next one, and replay it for the others.

    A step must read everything that differs between steps from fixed memory. A step that draws random numbers, or
    cannot be recorded because its network reads a value from the GPU, is done each time.
    """

    def __init__(self, recorder: CudaGraphs) -> None:
        self._recorder = recorder
        self._done: dict[int, int] = {}
        self._recorded: dict[int, Callable[[], None]] = {}

    def __call__(self, size: int, step: Callable[[], object]) -> None:
        """Do a step of this size. Steps of one size have the same operations on the same memory."""
        if size not in self._recorded and self._done.get(size, 0) < WARM_UP_STEPS:
            self._done[size] = self._done.get(size, 0) + 1
            before = global_states()
            self._recorder.warm_up(step)
            if before != global_states():
                self._recorded[size] = partial(self._recorder.warm_up, step)
            return
        if size not in self._recorded:
            try:
                self._recorded[size] = self._recorder.record(step)
            except RuntimeError:
                self._recorded[size] = partial(self._recorder.warm_up, step)
        self._recorded[size]()
