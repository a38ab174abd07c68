"""Flower's strategy interface, as far as streamed rounds have use for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy


class StreamedStrategy(Strategy):
    """A strategy whose ``start`` streams replies.

    Flower's own ``start`` holds all replies of a round at once and hands them to these four methods as lists. They
    refuse, so that nobody runs a round without the checks, records and checkpoints of a streamed one.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Raise ``NotImplementedError``: ``start`` runs all rounds."""
        _refuse()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Raise ``NotImplementedError``: ``start`` runs all rounds."""
        _refuse()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Raise ``NotImplementedError``: ``start`` runs all rounds."""
        _refuse()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Raise ``NotImplementedError``: ``start`` runs all rounds."""
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError("replies are streamed: call start, which runs all rounds")
