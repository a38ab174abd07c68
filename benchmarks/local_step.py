"""Time of a local training step: our loop against a bare PyTorch loop and a DataLoader loop.

The three loops run in turn, ``--repeats`` times, and every ratio is the median over the turns, so a machine
that slows down meanwhile slows all of them. Masks keep half of every weight tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from clients.training import SGD, train
from fedprune_app.core.rng import generator
from fedprune_app.models import ImageShape, build_model, prunable_names

SHAPES: dict[str, ImageShape] = {
    "lenet5": (3, 32, 32),
    "lenet5-bn": (3, 32, 32),
    "cnn5": (1, 28, 28),
    "cnn-small": (1, 8, 8),
}


def bare_loop(model: nn.Module, images: Tensor, labels: Tensor, sgd: SGD, masks: dict[str, Tensor] | None) -> None:
    """What a careful user writes without a framework: tensors, slices, autograd, torch.optim.SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=sgd.learning_rate, momentum=sgd.momentum)
    named = dict(model.named_parameters())
    model.train()
    for start in range(0, len(labels), sgd.batch_size):
        batch = slice(start, start + sgd.batch_size)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        for name, mask in (masks or {}).items():
            gradient = named[name].grad
            assert gradient is not None
            gradient.mul_(mask)
        optimizer.step()


def loader_loop(model: nn.Module, images: Tensor, labels: Tensor, sgd: SGD) -> None:
    """The usual loop of published code: a DataLoader over a TensorDataset."""
    optimizer = torch.optim.SGD(model.parameters(), lr=sgd.learning_rate, momentum=sgd.momentum)
    model.train()
    loader = DataLoader(TensorDataset(images, labels), sgd.batch_size, shuffle=True, generator=generator(0, "loader"))
    for image_batch, label_batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(image_batch), label_batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet5", "cnn-small"], choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60, help="steps per turn")
    parser.add_argument("--repeats", type=int, default=15)
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
    loops: dict[str, Callable[[nn.Module], object]] = {
        "bare loop": lambda model: bare_loop(model, images, labels, sgd, None),
        "bare loop, masks": lambda model: bare_loop(model, images, labels, sgd, masks),
        "DataLoader loop": lambda model: loader_loop(model, images, labels, sgd),
        "train": lambda model: train(model, images, labels, sgd, rng=generator(0, "order")),
        "train, masks": lambda model: train(model, images, labels, sgd, rng=generator(0, "order"), masks=masks),
    }
    for loop in loops.values():  # warm up
        loop(new_model())
    seconds: dict[str, list[float]] = {key: [] for key in loops}
    for _ in range(repeats):
        for key, loop in loops.items():
            model = new_model()
            start = time.perf_counter()
            loop(model)
            seconds[key].append(time.perf_counter() - start)
    print(f"{name}, batch {batch_size}, {num_steps} steps x {repeats}, {torch.get_num_threads()} thread(s)")
    for key, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["bare loop"], strict=True))
        microseconds = 1e6 * statistics.median(values) / num_steps
        print(f"  {key:18} {microseconds:8.0f} us/step   {ratio:.3f} of the bare loop")


if __name__ == "__main__":
    main()
