"""The metrics that a system's replies must have, and their columns in a round's record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.round import Reply, Round, RunContext
from fedprune_app.results import metrics
from fedprune_app.results.recorder import from_training, round_columns, row_of

EVALUATION, TRAINING = metrics.ReplyKind.EVALUATION, metrics.ReplyKind.TRAINING
# columns by client, ascending
Rows = Mapping[int, dict[str, Any]]


class Metrics(Protocol):
    """Interface that checks clients' metrics and summarises them; one class per kind of data."""

    def training_columns(self, round: Round) -> dict[str, Any]:
        """Return the columns of a round's record over the clients that trained in it."""

    def evaluation_row(self, reply: Reply) -> dict[str, Any]:
        """Check the metrics of a reply; return the columns of its client's row. ``ValueError`` rejects the reply."""

    def evaluation_columns(self, round: Round, rows: Rows) -> dict[str, Any]:
        """Return the columns of a round's record from the rows of clients that evaluated; may extend the rows."""


@dataclass(frozen=True)
class ImageMetrics:
    """Losses and accuracies of networks; ``layers`` names the tensors that may be pruned."""

    context: RunContext
    layers: frozenset[str]
    declared: metrics.Declarations

    def training_columns(self, round: Round) -> dict[str, Any]:
        rows = [row for _, row in sorted(round.log.clients.items())]
        return round_columns(rows, TRAINING, declared=self.declared)

    def evaluation_row(self, reply: Reply) -> dict[str, Any]:
        info, private = self.context.clients[reply.client], self.context.config.dp.enabled
        num_classes = info.num_classes if isinstance(info, ImageClientInfo) else 0
        options: dict[str, Any] = {"layers": self.layers, "num_classes": num_classes, "declared": self.declared}
        return row_of(EVALUATION, reply.fields, private=private, **options)

    def evaluation_columns(self, round: Round, rows: Rows) -> dict[str, Any]:
        for client, row in rows.items():
            row |= from_training(row, round.log.clients.get(client, {}))
        other_rows = [row for client, row in round.log.clients.items() if client not in rows]
        densities_by_row = (row.get("density_by_layer") or {} for row in rows.values())
        empty_layers = sorted(
            {name for densities in densities_by_row for name, density in densities.items() if not density}
        )
        self.context.recorder.note(
            f"a client keeps no weight of {name!r}: if nothing bypasses this layer, every image has the same answer"
            for name in empty_layers
        )
        return round_columns(rows.values(), EVALUATION, other_rows, self.declared)
