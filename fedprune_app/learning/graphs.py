"""A GPU repeats a recorded training step: the CPU starts the step as a whole, and not one operation after another.

A step of a small network is some hundred operations. A GPU does each of them faster than the CPU can start it. A CUDA
graph is the list of these operations with the memory that they read and write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fedprune_app.config import Config

WARM_UP_STEPS = 3
"""So many steps are done before one is recorded: the first ones load kernels and choose between algorithms."""


class Recorder(Protocol):
    """A recorder does a step, or records a step so that it can be repeated."""

    def warm_up(self, step: Callable[[], object]) -> None:
        """This does a step, in the way in which a step is recorded afterwards."""

    def record(self, step: Callable[[], object]) -> Callable[[], None]:
        """This records a step without doing it, and returns a function that does it."""


class CudaGraphs:
    """A step is recorded as a CUDA graph of this device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # CUDA records on no default one

    def warm_up(self, step: Callable[[], object]) -> None:
        """This does a step on the stream where a step is recorded afterwards."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def record(self, step: Callable[[], object]) -> Callable[[], None]:
        """This records a step without doing it, and returns a function that does it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class RepeatedSteps:
    """These are the steps of one training: the first ones are done, the next one is recorded, the others repeat it.

    A step must read all that differs between steps from memory that stays in its place.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._done: dict[int, int] = {}
        self._recorded: dict[int, Callable[[], None]] = {}

    def __call__(self, clients: int, step: Callable[[], object]) -> None:
        """This does a step of so many clients. Steps of the same number of clients have the same operations."""
        if clients not in self._recorded and self._done.get(clients, 0) < WARM_UP_STEPS:
            self._done[clients] = self._done.get(clients, 0) + 1
            self._recorder.warm_up(step)
            return
        if clients not in self._recorded:
            self._recorded[clients] = self._recorder.record(step)
        self._recorded[clients]()


def recorder_of(config: Config, device: torch.device) -> Recorder | None:
    """This returns the recorder that the key ``cuda-graphs`` asks for on this device; None where it asks for none."""
    return CudaGraphs(device) if config.cuda_graphs and device.type == "cuda" else None
