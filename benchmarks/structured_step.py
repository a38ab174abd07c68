"""Time of a local training step when half the channels are gone: masked to zero, or physically removed.

The dense, the masked and the small network train in turn, ``--repeats`` times, through the one training loop; every
ratio is the median over the turns, of CPU seconds, which a busy machine hardly lengthens, or of seconds on a GPU.
Evaluation likewise. A convolution whose inputs and outputs are both halved has a quarter of the multiplications; small
layers do not get that much faster.

Example: ``python benchmarks/structured_step.py --models lenet5-bn vgg11-bn``.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial

import torch
from _turns import Steps, clock_of, compute_in, in_turns, ratio, step_arguments
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from fedprune_app.core.flops import forward_flops
from fedprune_app.core.rng import generator
from fedprune_app.core.structured import Kept, coordinate_masks, shrink
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.learning.train import train
from fedprune_app.models.initial import channel_groups


def main() -> None:
    parser = step_arguments(__doc__, models=["lenet5-bn", "cnn5-bn", "vgg11-bn"], batch_size=10, steps=20, repeats=9)
    parser.add_argument("--density", type=float, default=0.5, help="share of the channels that are kept")
    arguments = parser.parse_args()
    compute_in("float32", arguments.device, arguments.threads)
    table = Table(title=f"{arguments.density:.0%} of the channels, batch {arguments.batch_size}", box=box.MARKDOWN)
    for heading in ("model", "network", "parameters", "FLOPs", "training step", "evaluation"):
        table.add_column(heading, justify="right")
    for name in arguments.models:
        measure(table, name, arguments)
    Console(width=120).print(table)


def measure(table: Table, name: str, arguments: argparse.Namespace) -> None:
    """Rows of one model: parameters and FLOPs as shares of the dense network's, times as ratios to it."""
    steps = Steps(name, arguments.batch_size, arguments.steps, arguments.device)
    dense = steps.new_model()
    groups = channel_groups(dense, steps.shape)
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
        rng = generator(0, "order")
        return partial(train, copy.deepcopy(network), steps.images, steps.labels, steps.sgd, rng=rng, masks=mask)

    work: dict[tuple[str, str], Callable[[], Callable[[], object]]] = {}
    for label, (network, mask) in networks.items():
        work[label, "training"] = partial(training, network, mask)
        work[label, "evaluation"] = partial(partial, evaluate, network, steps.images, steps.labels)
    seconds = in_turns(work, arguments.repeats, clock_of(steps.device, time.process_time))

    def against_dense(label: str, what: str) -> str:
        return f"{ratio(seconds[label, what], seconds['dense', what]):.3f}"

    parameters = sum(p.numel() for p in dense.parameters())
    flops = sum(forward_flops(dense, steps.shape).values())
    for label, (network, mask) in networks.items():
        remaining = sum(int(mask[n].sum()) if n in mask else p.numel() for n, p in network.named_parameters())
        share = sum(forward_flops(network, steps.shape).values()) / flops
        table.add_row(
            name,
            label,
            f"{remaining / parameters:.3f}",
            f"{share:.3f}",
            against_dense(label, "training"),
            against_dense(label, "evaluation"),
        )


if __name__ == "__main__":
    main()
