"""What the benchmarks of training steps share: networks and noise to train on, and work that is timed in turns.

Turns, because a machine that slows down meanwhile then slows down whatever is compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedprune_app.config import parse_config
from fedprune_app.core.named import ImageShape
from fedprune_app.core.rng import generator
from fedprune_app.learning.device import prepare_torch
from fedprune_app.learning.sgd import SGD
from fedprune_app.models.vision import build_model, prunable_names

SHAPES: dict[str, ImageShape] = {
    "cnn-small": (1, 8, 8),
    "cnn5": (1, 28, 28),
    "cnn5-bn": (1, 28, 28),
    "cnn-gn": (3, 32, 32),
    "lenet5": (3, 32, 32),
    "lenet5-bn": (3, 32, 32),
    "vgg11-bn": (3, 32, 32),
    "resnet18-bn": (3, 32, 32),
    "resnet18-gn": (3, 32, 32),
}

Key = TypeVar("Key", bound=Hashable)


def step_arguments(
    about: str | None, *, models: Sequence[str], batch_size: int, steps: int, repeats: int
) -> argparse.ArgumentParser:
    """Return the options that every benchmark of training steps has, with these defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models), choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--steps", type=int, default=steps, help="steps per turn")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser


class Steps:
    """So many steps on noise: what each turn of a benchmark trains, on one device."""

    def __init__(self, model: str, batch_size: int, steps: int, device: str = "cpu") -> None:
        rng = generator(0, "benchmark")
        self.name, self.shape, self.steps, self.count = model, SHAPES[model], steps, steps * batch_size
        self.device = torch.device(device)
        self.images = torch.randn(self.count, *self.shape, generator=rng).to(device)
        self.labels = torch.randint(0, 10, (self.count,), generator=rng).to(device)
        self.sgd = SGD(learning_rate=0.01, momentum=0.5, batch_size=batch_size)
        self.rng = rng

    def new_model(self) -> nn.Module:
        return build_model(self.name, self.shape, 10, rng=generator(0, "init")).to(self.device)

    def halving_masks(self) -> dict[str, Tensor]:
        """Return masks that keep about half of every weight tensor."""
        model = self.new_model()
        named = dict(model.named_parameters())
        names = prunable_names(model)
        return {name: (torch.rand(named[name].shape, generator=self.rng) < 0.5).to(self.device) for name in names}

    def title(self, repeats: int) -> str:
        return f"{self.name}, batch {self.sgd.batch_size}, {self.steps} steps x {repeats}, {self.device}"


def measure_each(arguments: argparse.Namespace, measure: Callable[[Steps, int], None]) -> None:
    """Call ``measure(steps, repeats)`` for every model that was asked for."""
    compute_in("float32", arguments.device, arguments.threads)
    for name in arguments.models:
        measure(Steps(name, arguments.batch_size, arguments.steps, arguments.device), arguments.repeats)


def compute_in(precision: str, device: str, threads: int, *, deterministic: bool = False) -> None:
    """Let torch compute as a run of these settings does; by itself it takes TF32 for convolutions."""
    keys = {"precision": precision, "device": device, "num-threads": threads, "deterministic": deterministic}
    prepare_torch(parse_config(keys))


def clock_of(device: torch.device | str, on_cpu: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Return a clock for work on ``device``: on a GPU it waits until all that was started there is done."""
    if torch.device(device).type == "cpu":
        return on_cpu

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def in_turns(
    work: Mapping[Key, Callable[[], Callable[[], object]]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Key, list[float]]:
    """Return the seconds of every piece of work in every turn; one turn before them warms up.

    Each entry of ``work`` prepares (a fresh model, say) what is then timed.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in work}
    for turn in range(repeats + 1):
        for key, prepare in work.items():
            run = prepare()
            start = clock()
            run()
            if turn:
                seconds[key].append(clock() - start)
    return seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over the turns of what this work takes, in units of what ``base`` takes."""
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def print_ratios(title: str, seconds: Mapping[str, Sequence[float]], steps: int, base: str, unit: str) -> None:
    """Print a line per piece of work: microseconds of a step, and its ratio to ``base``."""
    print(f"{title}, {torch.get_num_threads()} thread(s)")
    for key, values in seconds.items():
        microseconds = 1e6 * statistics.median(values) / steps
        print(f"  {key:24} {microseconds:8.0f} us{unit}/step   {ratio(values, seconds[base]):6.3f} of {base}")
