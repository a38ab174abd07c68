"""The server's account of the clients' privacy budgets, from their latest reports."""

from collections.abc import Callable, Mapping
from typing import Any

from fedprune_app.engine import wire
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.metrics import ReplyKind
from fedprune_app.results.recorder import number_in, round_columns, row_of

# epsilons by the ledger, by each accountant, by the paper's formula and at dp.second-delta: columns, names on disk
_KEPT_AS = {
    "epsilon": "epsilons",
    "epsilon_pld": "pld-epsilons",
    "epsilon_rdp": "rdp-epsilons",
    "epsilon_paper": "paper-epsilons",
    "epsilon_second": "second-epsilons",
}
_LOST = 1e-3  # relative fall of ε that shows a lost ledger; the grid of privacy losses causes less
_SIMULATED = "epsilon_simulated"


class Budgets:
    """Reported epsilons by client, and the last round that each budget allows. Empty without ``dp.enabled``.

    ``simulated`` has by client whether any of its noise derived from the seed.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.epsilons: dict[str, dict[int, float]] = {column: {} for column in _KEPT_AS}
        self.simulated: dict[int, bool] = {}
        self.spent: dict[int, int] = {}

    def bears(self, client: int, round: int) -> bool:
        return self.spent.get(client, round) >= round

    def epsilon_of(self, client: int) -> float | None:
        """Return the ε that the client reported last, by Rényi divergences; None if it reported none."""
        return self.epsilons["epsilon_rdp"].get(client)

    @staticmethod
    def check(fields: wire.Fields) -> dict[str, float]:
        """Return the epsilons of a reply by column, and the source of its noise.

        Raises ``ValueError`` for a number out of range, and for epsilons without the source of the noise.
        """
        row = row_of(ReplyKind.PRIVACY, fields)
        epsilons = {column: value for column, value in row.items() if value is not None}
        return epsilons | {_SIMULATED: number_in(_SIMULATED, fields)} if epsilons else {}

    def record(self, client: int, fields: wire.Fields, round: int, note: Callable[[int, str], None]) -> dict[str, Any]:
        """Record the privacy fields of a reply of this round; return the client's columns.

        A client that reports a spent budget is not sampled again. ``note`` is called if a client reports a smaller ε
        than before.
        """
        if not self.enabled:
            return {}
        report = self.check(fields)
        if report:
            is_simulated = bool(report.pop(_SIMULATED))
            self.simulated[client] = is_simulated or self.simulated.get(client, False)
        for column, epsilon in report.items():
            epsilons = self.epsilons[column]
            if column != "epsilon_paper" and epsilon < epsilons.get(client, 0.0) * (1 - _LOST):  # it is of no ledger
                name = DECLARATIONS.of_clients[column].wire_name
                note(client, f"its {name} was {epsilons[client]:.4g} and is {epsilon:.4g}: a ledger is lost")
            epsilons[client] = epsilon
        if fields.get("budget-spent") is True:
            self.spent.setdefault(client, round)
        noise = {_SIMULATED: int(self.simulated[client])} if client in self.simulated else {}
        return {column: epsilons.get(client) for column, epsilons in self.epsilons.items()} | noise

    def columns(self) -> dict[str, Any]:
        """Return the columns of a round: the largest epsilons of all clients, and the number of spent budgets."""
        if not self.enabled:
            return {}
        rows = [{column: value} for column, epsilons in self.epsilons.items() for value in epsilons.values()]
        rows += [{_SIMULATED: float(is_simulated)} for is_simulated in self.simulated.values()]
        return {**round_columns(rows, ReplyKind.PRIVACY), "budgets_spent": len(self.spent)}

    def noise(self) -> dict[str, list[int]]:
        """Return for run.json the clients by source of their noise; empty before the first report."""
        if not self.simulated:
            return {}
        seeded_clients = sorted(client for client, is_simulated in self.simulated.items() if is_simulated)
        return {"seed": seeded_clients, "operating-system": sorted(self.simulated.keys() - seeded_clients)}

    def state(self) -> dict[str, Mapping[int, float]]:
        """Return the account for a checkpoint, by name and client; empty without ``dp.enabled``."""
        if not self.enabled:
            return {}
        epsilons = {name: self.epsilons[column] for column, name in _KEPT_AS.items()}
        return {**epsilons, "simulated": self.simulated, "spent": self.spent}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`, in which clients are texts now."""
        self.epsilons = {
            column: {int(k): float(epsilon) for k, epsilon in meta.get(name, {}).items()}
            for column, name in _KEPT_AS.items()
        }
        self.simulated = {int(k): bool(is_simulated) for k, is_simulated in meta.get("simulated", {}).items()}
        self.spent = {int(k): int(round) for k, round in meta.get("spent", {}).items()}
