"""Time of a client's training step in a cohort, where several clients train as one network, against a bare loop.

The loops run in turn, ``--repeats`` times, and every ratio is the median over the turns. The bare loop is that of
``local_step.py``. "training-form = plain" is our loop on the network as it is, which is how large networks are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from _turns import Steps, clock_of, in_turns, measure_each, print_ratios, step_arguments
from local_step import bare_loop
from torch import nn

from fedprune_app.core.cohort import run_cohort
from fedprune_app.core.rng import generator
from fedprune_app.learning import training
from fedprune_app.learning.train import train


def main() -> None:
    parser = step_arguments(__doc__, models=["lenet5", "cnn5", "cnn-gn"], batch_size=10, steps=40, repeats=9)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    options = parser.parse_args()
    measure_each(options, partial(measure, cohorts=options.cohorts))


def cohort(steps: Steps, size: int, **how: Any) -> Callable[[], object]:
    """Return a function that trains so many clients together; 0 stands for one client in the network's own form.

    ``how`` are more arguments of :func:`~fedprune_app.learning.train.train`.
    """

    def work(model: nn.Module) -> object:
        return train(model, steps.images, steps.labels, steps.sgd, rng=generator(0, "order"), **how)

    works = [partial(work, steps.new_model()) for _ in range(max(size, 1))]
    most = 1 << 62
    how["grouped"] = size > 0

    def run() -> None:
        with patch.object(training, "MOST_FLOPS", most), patch.object(training, "MOST_PARAMETERS", most):
            list(run_cohort(works))

    return run


def measure(steps: Steps, repeats: int, *, cohorts: list[int]) -> None:
    work = {
        "bare loop": lambda: partial(bare_loop, steps.new_model(), steps.images, steps.labels, steps.sgd),
        "training-form = plain": partial(cohort, steps, 0),
        **{f"cohort of {size}": partial(cohort, steps, size) for size in cohorts},
    }
    seconds = in_turns(work, repeats, clock_of(steps.device))
    for size in cohorts:
        seconds[f"cohort of {size}"] = [each / size for each in seconds[f"cohort of {size}"]]
    print_ratios(f"{steps.title(repeats)}, per client", seconds, steps.steps, "bare loop", "")


if __name__ == "__main__":
    main()
