"""The server's one book of what clients say they have spent of their privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedprune_app.engine import wire
from fedprune_app.results import measures
from fedprune_app.results.measures import Reply

_EPSILON = "epsilon"  # by the client's own ledger


def _kinds() -> dict[str, str]:
    """Return the declared epsilons, each with its name in a checkpoint: ``paper-epsilons`` of ``epsilon_paper``."""
    names = sorted(each.name for each in measures.MEASURES.told_in(Reply.PRIVACY))
    return {name: "-".join(reversed(name.split("_"))) + "s" for name in names}


class Budgets:
    """Epsilons by client, and the round after which a client's budget bears no other. Empty without ``dp.enabled``."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.epsilons: dict[str, dict[int, float]] = {kind: {} for kind in _kinds()}
        self.spent: dict[int, int] = {}

    def bears(self, client: int, round: int) -> bool:
        """Whether the client can still take part in the round."""
        return self.spent.get(client, round) >= round

    def epsilon_of(self, client: int) -> float | None:
        """Return what the client last said it had spent; None if it said nothing."""
        return self.epsilons[_EPSILON].get(client)

    @staticmethod
    def check(fields: wire.Fields) -> dict[str, float]:
        """Return the epsilons of a reply by name. Raises ``ValueError`` for one that cannot be."""
        told = measures.row_of(Reply.PRIVACY, fields)
        return {name: told[name] for name in _kinds() if told[name] is not None}

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
                field = measures.MEASURES.of_clients[name].wire_name
                note(client, f"its {field} was {known[client]:.4g} and is {now:.4g}: a ledger is lost")
            known[client] = now
        if fields.get("budget-spent") is True:
            self.spent.setdefault(client, round)
        return {name: known.get(client) for name, known in self.epsilons.items()}

    def columns(self) -> dict[str, Any]:
        """Return the columns of a round: the largest epsilons of all clients, and how many have spent their budget."""
        if not self.enabled:
            return {}
        rows = [{name: epsilon} for name, known in self.epsilons.items() for epsilon in known.values()]
        return {**measures.over_clients(rows, Reply.PRIVACY), "budgets_spent": len(self.spent)}

    def state(self) -> dict[str, Mapping[int, float]]:
        """Return the book for a checkpoint, by name and client; nothing without ``dp.enabled``."""
        if not self.enabled:
            return {}
        return {**{name: self.epsilons[kind] for kind, name in _kinds().items()}, "spent": self.spent}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Read back what :meth:`state` gave, with the clients as texts."""
        self.epsilons = {
            kind: {int(k): float(epsilon) for k, epsilon in meta.get(name, {}).items()}
            for kind, name in _kinds().items()
        }
        self.spent = {int(k): int(round) for k, round in meta.get("spent", {}).items()}
