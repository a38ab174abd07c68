"""Flower's strategy interface, as far as streamed rounds have use for it."""

from abc import abstractmethod
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy


class StreamedStrategy(Strategy):
    """A strategy whose rounds are streamed: :meth:`start` runs them all.

    Flower's own ``start`` holds all replies of a round at once and hands them to four methods as lists. These methods
    refuse, so that nobody runs a round without the checks, records and checkpoints of a streamed one.
    """

    @abstractmethod
    def run(self, grid: Grid, rounds_completed: int = 0, num_rounds: int | None = None) -> None:
        """Run the rounds after ``rounds_completed``, to ``num_rounds`` or to the run's own number."""

    def start(  # the rest of Flower's arguments are the run's own settings, which the strategy has
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run all rounds. What they give is in the run folder and in the strategy, not in the result."""
        self.run(grid, num_rounds=num_rounds)
        return Result()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("replies are streamed: call start, which runs all rounds")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse
