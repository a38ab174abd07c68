"""Time of a DP-SGD step, by how gradients per example are made, against a step without privacy and Opacus' own loop.

All kinds run in turn, ``--repeats`` times, and every ratio is the median over the turns. Times are CPU seconds of
this process, which a busy machine hardly lengthens; on a GPU they are the seconds until it is done. Private steps draw
Poisson samples of the expected size ``--batch-size``, clip and add noise; masks keep half of every weight tensor. Noise
costs the same whether its key comes from the run's seed or from the operating system, since both key the same stream
cipher. Opacus' loop has its hooks, and float32 noise of torch's generator.

A last part adds noise alone, to a sum of as many coordinates as ResNet-18 has (``--noise-size``), beside what must not
be done: float32 noise of torch's generator, added in float32.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from _turns import Steps, clock_of, in_turns, measure_each, print_ratios, step_arguments
from torch.nn import functional as F

from fedprune_app.core.rng import generator
from fedprune_app.learning.train import train
from fedprune_app.privacy.dpsgd import DPSGD
from fedprune_app.privacy.noise import KeyedNoise, noised

METHODS = ("one-pass", "hooks")
Kinds = dict[str, Callable[[], Callable[[], object]]]


def main() -> None:
    parser = step_arguments(__doc__, models=["lenet5", "cnn-gn", "cnn5"], batch_size=15, steps=30, repeats=9)
    parser.add_argument(
        "--noise-size", type=int, default=11_173_962, help="coordinates of the sum that noise is added to"
    )
    arguments = parser.parse_args()
    measure_each(arguments, measure)
    clock, kinds = clock_of(arguments.device, time.process_time), noise_kinds(arguments.noise_size, arguments.device)
    title = f"noise on {arguments.noise_size} coordinates x {arguments.repeats}, {arguments.device}"
    print_ratios(title, in_turns(kinds, arguments.repeats, clock), 1, next(iter(kinds)), " CPU")


def measure(steps: Steps, repeats: int) -> None:
    seconds = in_turns(step_kinds(steps), repeats, clock_of(steps.device, time.process_time))
    print_ratios(steps.title(repeats), seconds, steps.steps, "no privacy", " CPU")


def step_kinds(steps: Steps) -> Kinds:
    """Return what is compared, by name; each entry prepares so many steps on a fresh network."""
    masks = steps.halving_masks()
    rate = steps.sgd.batch_size / steps.count

    def step(method: str | None, masked: bool = False) -> Callable[[], object]:
        how = DPSGD(1.0, 1.0, rate, steps.steps, KeyedNoise(os.urandom(32)), method) if method else None
        return partial(
            train,
            steps.new_model(),
            steps.images,
            steps.labels,
            steps.sgd,
            rng=generator(0, "order"),
            masks=masks if masked else None,
            private=how,
        )

    return {
        "no privacy": partial(step, None),
        "Opacus' own loop": partial(opacus_loop, steps),
        **{method: partial(step, method) for method in METHODS},
        "one-pass, masks": partial(step, "one-pass", masked=True),
    }


def opacus_loop(steps: Steps) -> Callable[[], object]:
    """Return what a user of Opacus writes: its module, its optimiser, and Poisson samples."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    batch_size, labels = steps.sgd.batch_size, steps.labels
    network = GradSampleModule(steps.new_model().train())
    inner = torch.optim.SGD(network.parameters(), steps.sgd.learning_rate, momentum=steps.sgd.momentum)
    optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch_size)

    def run() -> None:
        for _ in range(steps.steps):
            some = (torch.rand(len(labels), device=labels.device) < batch_size / len(labels)).nonzero().squeeze(1)
            optimizer.zero_grad()
            with warnings.catch_warnings(action="ignore"):  # of torch, about hooks on the first layer
                F.cross_entropy(network(steps.images[some]), labels[some]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def noise_kinds(size: int, device: str) -> Kinds:
    """Return the ways to add noise to a sum of so many coordinates on ``device``, and the parts of ours."""
    total, std, keyed = torch.zeros(size, device=device), 14.0, KeyedNoise(os.urandom(32))
    draws = keyed.gaussian(size, device)
    exact = torch.empty(size, device=device, dtype=torch.float64)
    return {
        "float32, unsafe": lambda: lambda: total.add_(torch.randn(size, device=device), alpha=std),
        "ChaCha20, float64": lambda: lambda: total.copy_(noised(total, keyed.gaussian(size, device), std)),
        "  of it drawn": lambda: lambda: keyed.gaussian(size, device),
        "  of it added": lambda: lambda: total.copy_(noised(total, draws, std)),
        "float64 of torch, drawn": lambda: lambda: exact.normal_(),
    }


if __name__ == "__main__":
    main()
