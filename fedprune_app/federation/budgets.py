"""The server's one book of what clients say they have spent of their privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedprune_app.engine import wire

_EPSILON, _PAPER, _SECOND = "epsilon", "epsilon-paper", "epsilon-second"
_KINDS = {_EPSILON: "epsilons", _PAPER: "paper-epsilons", _SECOND: "second-epsilons"}
"""Fields of a reply, by the client's ledger, by the paper's formula, at dp.second-delta; and their names on disk."""


class Budgets:
    """Epsilons by client, and the round after which a client's budget bears no other. Empty without ``dp.enabled``."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.epsilons: dict[str, dict[int, float]] = {kind: {} for kind in _KINDS}
        self.spent: dict[int, int] = {}

    def bears(self, client: int, round: int) -> bool:
        """Whether the client can still take part in the round."""
        return self.spent.get(client, round) >= round

    def epsilon_of(self, client: int) -> float | None:
        """Return what the client last said it had spent; None if it said nothing."""
        return self.epsilons[_EPSILON].get(client)

    @staticmethod
    def check(fields: wire.Fields) -> dict[str, float]:
        """Return the epsilons of a reply by field. Raises ``ValueError`` for one that cannot be."""
        return {name: wire.number(fields, name, 0) for name in _KINDS if name in fields}

    def take(self, client: int, fields: wire.Fields, round: int, note: Callable[[int, str], None]) -> dict[str, Any]:
        """Enter what a reply of this round says; return the client's columns.

        A client that says that its budget is spent is not asked again. ``note`` is told where a client says less than
        before.
        """
        if not self.enabled:
            return {}
        for name, now in self.check(fields).items():
            known = self.epsilons[name]
            if now < known.get(client, 0.0) * (1 - 1e-6):
                note(client, f"its {name} was {known[client]:.4g} and is {now:.4g}: a ledger is lost")
            known[client] = now
        if fields.get("budget-spent") is True:
            self.spent.setdefault(client, round)
        return {
            "epsilon": self.epsilons[_EPSILON].get(client),
            "epsilon_second": self.epsilons[_SECOND].get(client),
            "epsilon_paper": self.epsilons[_PAPER].get(client),
        }

    def columns(self) -> dict[str, Any]:
        """Return the columns of a round: the largest epsilons of all clients, and how many have spent their budget."""
        if not self.enabled:
            return {}
        return {
            "epsilon_max": max(self.epsilons[_EPSILON].values(), default=None),
            "epsilon_second_max": max(self.epsilons[_SECOND].values(), default=None),
            "epsilon_paper_max": max(self.epsilons[_PAPER].values(), default=None),
            "budgets_spent": len(self.spent),
        }

    def state(self) -> dict[str, Mapping[int, float]]:
        """Return the book for a checkpoint, by name and client; nothing without ``dp.enabled``."""
        if not self.enabled:
            return {}
        return {**{name: self.epsilons[kind] for kind, name in _KINDS.items()}, "spent": self.spent}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Read back what :meth:`state` gave, with the clients as texts."""
        self.epsilons = {
            kind: {int(k): float(epsilon) for k, epsilon in meta.get(name, {}).items()} for kind, name in _KINDS.items()
        }
        self.spent = {int(k): int(round) for k, round in meta.get("spent", {}).items()}
