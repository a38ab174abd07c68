"""Time of a client's training step in a cohort, where several clients train as one network, against a bare loop.

The loops run in turn, ``--repeats`` times, and every ratio is the median over the turns. The bare loop is that of
``local_step.py``. "its own form" is our loop on the network as it is, which is how large networks are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from _turns import Steps, in_turns, measure_each, print_ratios, step_arguments
from local_step import bare_loop
from torch import nn

from fedprune_app.core.cohort import work_in_cohort
from fedprune_app.core.rng import generator
from fedprune_app.learning import training
from fedprune_app.learning.train import train


def main() -> None:
    parser = step_arguments(__doc__, models=["lenet5", "cnn5", "cnn-gn"], batch_size=10, steps=40, repeats=9)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    options = parser.parse_args()
    measure_each(options, partial(measure, cohorts=options.cohorts))


def measure(name: str, batch_size: int, num_steps: int, repeats: int, *, cohorts: list[int]) -> None:
    steps = Steps(name, batch_size, num_steps)

    def ours(model: nn.Module) -> object:
        return train(model, steps.images, steps.labels, steps.sgd, rng=generator(0, "order"))

    def in_its_own_form() -> Callable[[], object]:
        model = steps.new_model()

        def run() -> None:
            with patch.object(training, "MOST_FLOPS", 0):
                ours(model)

        return run

    def cohort(size: int) -> Callable[[], object]:
        works = [partial(ours, steps.new_model()) for _ in range(size)]

        def run() -> None:
            with patch.object(training, "MOST_FLOPS", 1 << 62), patch.object(training, "MOST_PARAMETERS", 1 << 62):
                list(work_in_cohort(works))

        return run

    work = {
        "bare loop": lambda: partial(bare_loop, steps.new_model(), steps.images, steps.labels, steps.sgd, None),
        "its own form": in_its_own_form,
        **{f"cohort of {size}": partial(cohort, size) for size in cohorts},
    }
    seconds = in_turns(work, repeats)
    for size in cohorts:
        seconds[f"cohort of {size}"] = [each / size for each in seconds[f"cohort of {size}"]]
    title = f"{name}, batch {batch_size}, {num_steps} steps x {repeats}, per client"
    print_ratios(title, seconds, num_steps, "bare loop", "")


if __name__ == "__main__":
    main()
