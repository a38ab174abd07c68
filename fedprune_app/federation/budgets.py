"""The server's one book of what clients say they have spent of their privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedprune_app.engine import wire
from fedprune_app.results import measures
from fedprune_app.results.measures import Reply

_KEPT_AS = {
    "epsilon": "epsilons",
    "epsilon_pld": "pld-epsilons",
    "epsilon_rdp": "rdp-epsilons",
    "epsilon_paper": "paper-epsilons",
    "epsilon_second": "second-epsilons",
}
"""Epsilons by the ledger, by each accountant, by the paper's formula and at dp.second-delta: columns, names on disk."""
_LOST = 1e-3  # a figure that fell by this share; the grid of privacy losses moves one by less


class Budgets:
    """Epsilons by client, and the round after which a client's budget bears no other. Empty without ``dp.enabled``."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.epsilons: dict[str, dict[int, float]] = {column: {} for column in _KEPT_AS}
        self.spent: dict[int, int] = {}

    def bears(self, client: int, round: int) -> bool:
        """Whether the client can still take part in the round."""
        return self.spent.get(client, round) >= round

    def epsilon_of(self, client: int) -> float | None:
        """Return what the client last said it had spent, by Rényi divergences; None if it said nothing."""
        return self.epsilons["epsilon_rdp"].get(client)

    @staticmethod
    def check(fields: wire.Fields) -> dict[str, float]:
        """Return the epsilons of a reply by column. Raises ``ValueError`` for one that cannot be."""
        told = measures.row_of(Reply.PRIVACY, fields)
        return {column: value for column, value in told.items() if value is not None}

    def take(self, client: int, fields: wire.Fields, round: int, note: Callable[[int, str], None]) -> dict[str, Any]:
        """Enter what a reply of this round says; return the client's columns.

        A client that says that its budget is spent is not asked again. ``note`` is told where a client says less than
        before.
        """
        if not self.enabled:
            return {}
        for column, now in self.check(fields).items():
            known = self.epsilons[column]
            if now < known.get(client, 0.0) * (1 - _LOST):
                name = measures.MEASURES.of_clients[column].wire_name
                note(client, f"its {name} was {known[client]:.4g} and is {now:.4g}: a ledger is lost")
            known[client] = now
        if fields.get("budget-spent") is True:
            self.spent.setdefault(client, round)
        return {column: known.get(client) for column, known in self.epsilons.items()}

    def columns(self) -> dict[str, Any]:
        """Return the columns of a round: the largest epsilons of all clients, and how many have spent their budget."""
        if not self.enabled:
            return {}
        rows = [{column: value} for column, known in self.epsilons.items() for value in known.values()]
        return {**measures.over_clients(rows, Reply.PRIVACY), "budgets_spent": len(self.spent)}

    def state(self) -> dict[str, Mapping[int, float]]:
        """Return the book for a checkpoint, by name and client; nothing without ``dp.enabled``."""
        if not self.enabled:
            return {}
        return {**{name: self.epsilons[column] for column, name in _KEPT_AS.items()}, "spent": self.spent}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Read back what :meth:`state` gave, with the clients as texts."""
        self.epsilons = {
            column: {int(k): float(epsilon) for k, epsilon in meta.get(name, {}).items()}
            for column, name in _KEPT_AS.items()
        }
        self.spent = {int(k): int(round) for k, round in meta.get("spent", {}).items()}
