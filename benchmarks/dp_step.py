"""Time of a DP-SGD step, by how gradients per example are made, against a step without privacy.

All kinds run in turn, ``--repeats`` times, and every ratio is the median over the turns. Times are CPU seconds of
this process, which a busy machine hardly lengthens. Private steps draw Poisson samples of the expected size
``--batch-size``, clip and add noise; masks keep half of every weight tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from clients.training import SGD, train
from fedprune_app.core.rng import generator
from fedprune_app.models import ImageShape, build_model, prunable_names
from fedprune_app.privacy.dpsgd import DPSGD
from fedprune_app.privacy.noise import Noise, Secure, Seeded

SHAPES: dict[str, ImageShape] = {
    "cnn-small": (1, 8, 8),
    "cnn5": (1, 28, 28),
    "lenet5": (3, 32, 32),
    "cnn-gn": (3, 32, 32),
}
METHODS = ("one-pass", "ghost", "hooks", "functorch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet5", "cnn-gn", "cnn5"], choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30, help="steps per turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        measure(name, arguments.batch_size, arguments.steps, arguments.repeats)


def measure(name: str, batch_size: int, num_steps: int, repeats: int) -> None:
    rng = generator(0, "benchmark")
    num_examples = num_steps * batch_size
    images = torch.randn(num_examples, *SHAPES[name], generator=rng)
    labels = torch.randint(0, 10, (num_examples,), generator=rng)
    sgd = SGD(learning_rate=0.01, momentum=0.5, batch_size=batch_size)

    def new_model() -> nn.Module:
        return build_model(name, SHAPES[name], 10, rng=generator(0, "init"))

    shapes = {key: value.shape for key, value in new_model().named_parameters()}
    masks = {key: torch.rand(shapes[key], generator=rng) < 0.5 for key in prunable_names(new_model())}

    def private(method: str, model: nn.Module, masked: bool = False, secure: bool = False) -> None:
        noise: Noise = Secure() if secure else Seeded(generator(0, "noise"))
        how = DPSGD(1.0, 1.0, batch_size / num_examples, num_steps, noise, method)
        train(model, images, labels, sgd, rng=generator(0, "x"), masks=masks if masked else None, private=how)

    kinds: dict[str, Callable[[nn.Module], object]] = {
        "not private": lambda model: train(model, images, labels, sgd, rng=generator(0, "order")),
        **{method: partial(private, method) for method in METHODS},
        "one-pass, masks": partial(private, "one-pass", masked=True),
        "ghost, masks": partial(private, "ghost", masked=True),
        "one-pass, secure noise": partial(private, "one-pass", secure=True),
    }
    for kind in kinds.values():  # warm up
        kind(new_model())
    seconds: dict[str, list[float]] = {key: [] for key in kinds}
    for _ in range(repeats):
        for key, kind in kinds.items():
            model = new_model()
            start = time.process_time()
            kind(model)
            seconds[key].append(time.process_time() - start)
    print(f"{name}, batch {batch_size}, {num_steps} steps x {repeats}, {torch.get_num_threads()} thread(s)")
    for key, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["not private"], strict=True))
        microseconds = 1e6 * statistics.median(values) / num_steps
        print(f"  {key:24} {microseconds:8.0f} us CPU/step   {ratio:6.2f} of a step without privacy")


if __name__ == "__main__":
    main()
