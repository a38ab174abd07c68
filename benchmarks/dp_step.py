"""Time of a DP-SGD step, by how gradients per example are made, against a step without privacy.

All kinds run in turn, ``--repeats`` times, and every ratio is the median over the turns. Times are CPU seconds of
this process, which a busy machine hardly lengthens. Private steps draw Poisson samples of the expected size
``--batch-size``, clip and add noise; masks keep half of every weight tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from _turns import Steps, in_turns, measure_each, print_ratios, step_arguments

from fedprune_app.core.rng import generator
from fedprune_app.learning.train import train
from fedprune_app.privacy.dpsgd import DPSGD
from fedprune_app.privacy.noise import Noise, Secure, Seeded

METHODS = ("one-pass", "ghost", "hooks", "functorch")


def main() -> None:
    parser = step_arguments(__doc__, models=["lenet5", "cnn-gn", "cnn5"], batch_size=15, steps=30, repeats=9)
    measure_each(parser.parse_args(), measure)


def measure(name: str, batch_size: int, num_steps: int, repeats: int) -> None:
    steps = Steps(name, batch_size, num_steps)
    masks = steps.halving_masks()

    def step(method: str | None, masked: bool = False, secure: bool = False) -> Callable[[], object]:
        noise: Noise = Secure() if secure else Seeded(generator(0, "noise"))
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
        "ghost, masks": partial(step, "ghost", masked=True),
        "one-pass, secure noise": partial(step, "one-pass", secure=True),
    }
    seconds = in_turns(kinds, repeats, time.process_time)
    print_ratios(f"{name}, batch {batch_size}, {num_steps} steps x {repeats}", seconds, num_steps, "no privacy", " CPU")


if __name__ == "__main__":
    main()
