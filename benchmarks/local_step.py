"""Time of a local training step: our loop against a bare PyTorch loop and a DataLoader loop.

The three loops run in turn, ``--repeats`` times, and every ratio is the median over the turns, so a machine
that slows down meanwhile slows all of them. Masks keep half of every weight tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from _turns import Steps, clock_of, in_turns, measure_each, print_ratios, step_arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedprune_app.core.rng import generator
from fedprune_app.learning.device import computing
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train


def bare_loop(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    sgd: SGD,
    masks: dict[str, Tensor] | None = None,
    precision: str = "float32",
) -> None:
    """What a careful user writes without a framework: tensors, slices, autograd, torch.optim.SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=sgd.learning_rate, momentum=sgd.momentum)
    named = dict(model.named_parameters())
    model.train()
    for start in range(0, len(labels), sgd.batch_size):
        batch = slice(start, start + sgd.batch_size)
        optimizer.zero_grad(set_to_none=True)
        with computing(images.device, precision):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
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
    parser = step_arguments(__doc__, models=["lenet5", "cnn-small"], batch_size=10, steps=60, repeats=15)
    measure_each(parser.parse_args(), measure)


def measure(steps: Steps, repeats: int) -> None:
    data = (steps.images, steps.labels)
    masks = steps.halving_masks()

    def bare(masks: dict[str, Tensor] | None) -> Callable[[], object]:
        return partial(bare_loop, steps.new_model(), *data, steps.sgd, masks)

    def ours(masks: dict[str, Tensor] | None, grouped: bool) -> Callable[[], object]:
        how = {"rng": generator(0, "order"), "masks": masks, "grouped": grouped}
        return partial(train, steps.new_model(), *data, steps.sgd, **how)

    work = {
        "bare loop": partial(bare, None),
        "bare loop, gradients masked": partial(bare, masks),
        "DataLoader loop": lambda: partial(loader_loop, steps.new_model(), *data, steps.sgd),
        "fedprune, the network in its own form": partial(ours, None, False),
        "fedprune, its own form, masks on": partial(ours, masks, False),
        "fedprune, a client alone": partial(ours, None, True),
    }
    seconds = in_turns(work, repeats, clock_of(steps.device))
    print_ratios(steps.title(repeats), seconds, steps.steps, "bare loop", "")


if __name__ == "__main__":
    main()
