"""Time of a DP-SGD step, by how gradients per example are made, against a step without privacy.

All kinds run in turn, ``--repeats`` times, and every ratio is the median over the turns. Times are CPU seconds of
this process, which a busy machine hardly lengthens. Private steps draw Poisson samples of the expected size
``--batch-size``, clip and add noise; masks keep half of every weight tensor. Noise costs the same whether its key comes
from the run's seed or from the operating system, since both key the same stream cipher.

A last part adds noise alone, to a sum of as many coordinates as ResNet-18 has (``--noise-size``), beside what must not
be done: float32 noise of torch's generator, added in float32.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
from _turns import Steps, in_turns, measure_each, print_ratios, step_arguments

from fedprune_app.core.rng import generator
from fedprune_app.learning.train import train
from fedprune_app.privacy.dpsgd import DPSGD
from fedprune_app.privacy.noise import KeyedNoise, noised

METHODS = ("one-pass", "hooks")


def main() -> None:
    parser = step_arguments(__doc__, models=["lenet5", "cnn-gn", "cnn5"], batch_size=15, steps=30, repeats=9)
    parser.add_argument(
        "--noise-size", type=int, default=11_173_962, help="coordinates of the sum that noise is added to"
    )
    arguments = parser.parse_args()
    measure_each(arguments, measure)
    measure_noise(arguments.noise_size, arguments.repeats)


def measure(name: str, batch_size: int, num_steps: int, repeats: int) -> None:
    steps = Steps(name, batch_size, num_steps)
    masks = steps.halving_masks()

    def step(method: str | None, masked: bool = False) -> Callable[[], object]:
        noise = KeyedNoise(os.urandom(32))
        how = DPSGD(1.0, 1.0, batch_size / steps.count, num_steps, noise, method) if method else None
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

    kinds: dict[str, Callable[[], Callable[[], object]]] = {
        "no privacy": partial(step, None),
        **{method: partial(step, method) for method in METHODS},
        "one-pass, masks": partial(step, "one-pass", masked=True),
    }
    seconds = in_turns(kinds, repeats, time.process_time)
    print_ratios(f"{name}, batch {batch_size}, {num_steps} steps x {repeats}", seconds, num_steps, "no privacy", " CPU")


def measure_noise(size: int, repeats: int) -> None:
    total, std, keyed = torch.zeros(size), 14.0, KeyedNoise(os.urandom(32))
    plain = "float32, unsafe"
    kinds: dict[str, Callable[[], Callable[[], object]]] = {
        plain: lambda: lambda: total.add_(torch.randn(size), alpha=std),
        "ChaCha20, float64": lambda: lambda: total.copy_(noised(total, keyed.gaussian(size), std)),
    }
    seconds = in_turns(kinds, repeats, time.process_time)
    print_ratios(f"noise on {size} coordinates x {repeats}", seconds, 1, plain, " CPU")


if __name__ == "__main__":
    main()
