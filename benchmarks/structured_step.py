"""Time of a local training step when half the channels are gone: masked to zero, or physically removed.

The dense, the masked and the small network train in turn, ``--repeats`` times, through the one training loop; every
ratio is the median over the turns. Evaluation likewise. A convolution whose inputs and outputs are both halved has a
quarter of the multiplications; small layers do not get that much faster.

Example: ``python benchmarks/structured_step.py --models lenet5-bn vgg11-bn``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from clients.training import SGD, evaluate, train
from fedprune_app.core.flops import forward_flops
from fedprune_app.core.rng import generator
from fedprune_app.core.structured import Kept, coordinate_masks, shrink
from fedprune_app.models import ImageShape, build_model
from fedprune_app.models.channels import channel_groups

SHAPES: dict[str, ImageShape] = {
    "lenet5-bn": (3, 32, 32),
    "cnn5-bn": (1, 28, 28),
    "vgg11-bn": (3, 32, 32),
    "resnet18-bn": (3, 32, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet5-bn", "cnn5-bn", "vgg11-bn"], choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--density", type=float, default=0.5, help="share of the channels that are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"{arguments.density:.0%} of the channels, batch {arguments.batch_size}", box=box.MARKDOWN)
    for heading in ("model", "network", "parameters", "FLOPs", "training step", "evaluation"):
        table.add_column(heading, justify="right")
    for name in arguments.models:
        measure(table, name, arguments)
    Console(width=120).print(table)


def measure(table: Table, name: str, arguments: argparse.Namespace) -> None:
    """Rows of one model: parameters and FLOPs as shares of the dense network's, times as ratios to it."""
    count = arguments.steps * arguments.batch_size
    images = torch.randn(count, *SHAPES[name], generator=generator(0, "images"))
    labels = torch.randint(0, 10, (count,), generator=generator(0, "labels"))
    sgd = SGD(learning_rate=0.01, momentum=0.5, batch_size=arguments.batch_size)
    dense = build_model(name, SHAPES[name], 10, rng=generator(0, "init"))
    groups = channel_groups(dense, SHAPES[name])
    kept: Kept = {g.name: torch.arange(g.size) < max(1, int(g.size * arguments.density)) for g in groups}
    shapes = {key: parameter.shape for key, parameter in dense.named_parameters()}
    masks = coordinate_masks(groups, kept, shapes)
    small = shrink(copy.deepcopy(dense), groups, kept)

    networks: dict[str, tuple[nn.Module, dict[str, torch.Tensor]]] = {
        "dense": (dense, {}),
        "masked": (dense, masks),
        "channels removed": (small, {}),
    }

    def training(network: nn.Module, mask: dict[str, torch.Tensor]) -> Callable[[], object]:
        return lambda: train(copy.deepcopy(network), images, labels, sgd, rng=generator(0, "order"), masks=mask)

    work: dict[tuple[str, str], Callable[[], object]] = {}
    for label, (network, mask) in networks.items():
        work[label, "training"] = training(network, mask)
        work[label, "evaluation"] = lambda network=network: evaluate(network, images, labels)  # type: ignore[misc]
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for turn in range(arguments.repeats + 1):
        for key, run in work.items():
            start = time.perf_counter()
            run()
            if turn:  # the first one warms up
                seconds[key].append(time.perf_counter() - start)

    def ratio(label: str, what: str) -> str:
        pairs = zip(seconds[label, what], seconds["dense", what], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.3f}"

    parameters = sum(p.numel() for p in dense.parameters())
    flops = sum(forward_flops(dense, SHAPES[name]).values())
    for label, (network, mask) in networks.items():
        remaining = sum(int(mask[n].sum()) if n in mask else p.numel() for n, p in network.named_parameters())
        share = sum(forward_flops(network, SHAPES[name]).values()) / flops
        table.add_row(
            name,
            label,
            f"{remaining / parameters:.3f}",
            f"{share:.3f}",
            ratio(label, "training"),
            ratio(label, "evaluation"),
        )


if __name__ == "__main__":
    main()
