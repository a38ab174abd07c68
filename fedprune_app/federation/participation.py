"""Who takes part in a round: what privacy budgets bear it, and whom the run's seed and the round's number draw."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedprune_app.config import Config, ConfigError, has_effect
from fedprune_app.core import rng
from fedprune_app.engine import wire
from fedprune_app.federation.clients import Roster
from fedprune_app.federation.round import Round, RoundLog
from fedprune_app.results.declarations import MEASURES
from fedprune_app.results.measures import Reply
from fedprune_app.results.recorder import number_in, round_columns, row_of

# epsilons by the ledger, by each accountant, by the paper's formula and at dp.second-delta: columns, names on disk
_KEPT_AS = {
    "epsilon": "epsilons",
    "epsilon_pld": "pld-epsilons",
    "epsilon_rdp": "rdp-epsilons",
    "epsilon_paper": "paper-epsilons",
    "epsilon_second": "second-epsilons",
}
_LOST = 1e-3  # a figure that fell by this share; the grid of privacy losses moves one by less
_SIMULATED = "epsilon_simulated"


class Budgets:
    """Epsilons by client, and the round after which a client's budget bears no other. Empty without ``dp.enabled``.

    ``simulated`` says by client whether any of its noise derived from the seed.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.epsilons: dict[str, dict[int, float]] = {column: {} for column in _KEPT_AS}
        self.simulated: dict[int, bool] = {}
        self.spent: dict[int, int] = {}

    def bears(self, client: int, round: int) -> bool:
        return self.spent.get(client, round) >= round

    def epsilon_of(self, client: int) -> float | None:
        """Return what the client last said it had spent, by Rényi divergences; None if it said nothing."""
        return self.epsilons["epsilon_rdp"].get(client)

    @staticmethod
    def check(fields: wire.Fields) -> dict[str, float]:
        """Return the epsilons of a reply by column, and how its noise was drawn.

        Raises ``ValueError`` for a number that cannot be, and for epsilons without a word on the noise.
        """
        row = row_of(Reply.PRIVACY, fields)
        epsilons = {column: value for column, value in row.items() if value is not None}
        return epsilons | {_SIMULATED: number_in(_SIMULATED, fields)} if epsilons else {}

    def take(self, client: int, fields: wire.Fields, round: int, note: Callable[[int, str], None]) -> dict[str, Any]:
        """Enter what a reply of this round says; return the client's columns.

        A client that says that its budget is spent is not asked again. ``note`` is told where a client says less than
        before.
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
                name = MEASURES.of_clients[column].wire_name
                note(client, f"its {name} was {epsilons[client]:.4g} and is {epsilon:.4g}: a ledger is lost")
            epsilons[client] = epsilon
        if fields.get("budget-spent") is True:
            self.spent.setdefault(client, round)
        noise = {_SIMULATED: int(self.simulated[client])} if client in self.simulated else {}
        return {column: epsilons.get(client) for column, epsilons in self.epsilons.items()} | noise

    def columns(self) -> dict[str, Any]:
        """Return the columns of a round: the largest epsilons of all clients, and how many have spent their budget."""
        if not self.enabled:
            return {}
        rows = [{column: value} for column, epsilons in self.epsilons.items() for value in epsilons.values()]
        rows += [{_SIMULATED: float(is_simulated)} for is_simulated in self.simulated.values()]
        return {**round_columns(rows, Reply.PRIVACY), "budgets_spent": len(self.spent)}

    def noise(self) -> dict[str, list[int]]:
        """Return for run.json whose noise came from where, by client; nothing before anybody said so."""
        if not self.simulated:
            return {}
        seeded_clients = sorted(client for client, is_simulated in self.simulated.items() if is_simulated)
        return {"seed": seeded_clients, "operating-system": sorted(self.simulated.keys() - seeded_clients)}

    def state(self) -> dict[str, Mapping[int, float]]:
        """Return the book for a checkpoint, by name and client; nothing without ``dp.enabled``."""
        if not self.enabled:
            return {}
        epsilons = {name: self.epsilons[column] for column, name in _KEPT_AS.items()}
        return {**epsilons, "simulated": self.simulated, "spent": self.spent}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Read back what :meth:`state` gave, with the clients as texts."""
        self.epsilons = {
            column: {int(k): float(epsilon) for k, epsilon in meta.get(name, {}).items()}
            for column, name in _KEPT_AS.items()
        }
        self.simulated = {int(k): bool(is_simulated) for k, is_simulated in meta.get("simulated", {}).items()}
        self.spent = {int(k): int(round) for k, round in meta.get("spent", {}).items()}


# --- who takes part ---------------------------------------------------------------------------------------------------


def check_min_replies(config: Config, max_asked: int, num_clients: int) -> None:
    """Raise :class:`ConfigError` if a round, which asks ``max_asked`` of the clients, cannot have ``min-replies``."""
    if num_clients < 1 and config.holdout_clients:
        raise ConfigError("holdout-clients", config.holdout_clients, "fewer than there are clients")
    if config.min_replies > max_asked:
        share = f" and fraction-train {config.fraction_train:g}" if max_asked < num_clients else ""
        raise ConfigError(
            "min-replies", config.min_replies, f"at most {max_asked}", condition=f"with {num_clients} clients{share}"
        )


class Participation:
    """The clients of a run, and which of them are eligible, sampled, and dropped in each round."""

    def __init__(self, config: Config, clients: Roster, budgets: Budgets) -> None:
        self.config = config
        self.clients = clients
        self.budgets = budgets
        self.trains_dropped = False  # whether a sampled client that drops out trains by itself
        count = config.holdout_clients if has_effect("holdout-clients", config) else 0
        order = rng.numpy_generator(config.seed, "holdout").permutation(len(clients))
        self.holdouts = sorted(list(clients)[place] for place in order[:count])
        self.members = [client for client in clients if client not in self.holdouts]

    def eligible(self, round: int) -> list[int]:
        return [client for client in self.members if self.budgets.bears(client, round)]

    @property
    def most(self) -> int:
        return self.sample_size(len(self.members))

    def sample_size(self, eligible: int) -> int:
        """Return how many of so many eligible clients are sampled: ``max(⌊fraction · K⌋, 1)``."""
        return max(int(self.config.fraction_train * eligible + 1e-9), 1)

    def sampled(self, round: int) -> list[int]:
        clients = self.eligible(round)
        permutation = rng.numpy_generator(self.config.seed, "sample", round=round).permutation(len(clients))
        return sorted(clients[i] for i in permutation[: self.sample_size(len(clients))])

    def dropped(self, round: int, sampled: list[int]) -> list[int]:
        """Draw those of the sampled who drop out, each with ``drop-probability``, but never the last one."""
        draws = rng.numpy_generator(self.config.seed, "drop", round=round).random(len(self.clients))
        luck = dict(zip(self.clients, draws, strict=True))
        last_client = max(sampled, key=lambda client: luck[client])
        return [k for k in sampled if luck[k] < self.config.drop_probability and k != last_client]

    def evaluates(self, round: int) -> bool:
        """Whether clients are evaluated after this round, as far as this is known before it."""
        interval = self.config.evaluate_every
        return round == self.config.num_server_rounds or bool(interval and round % interval == 0)

    def is_last(self, round: int) -> bool:
        """Whether no round follows this one: the run has all its rounds, or no privacy budget bears another."""
        return round == self.config.num_server_rounds or not self.eligible(round + 1)

    def evaluators(self, round: int) -> frozenset[int]:
        """Return the clients that an evaluation after this round asks: all after the last one, else drawn ones."""
        clients, count = self.members, self.config.evaluate_clients
        if count == 0 or self.is_last(round):
            return frozenset(clients)
        permutation = rng.numpy_generator(self.config.seed, "evaluate", round=round).permutation(len(clients))
        return frozenset(clients[i] for i in permutation[:count])

    def round(self, number: int) -> Round:
        """Return the round of this number: those of the sampled take part in it who did not drop out, or all."""
        sampled = self.sampled(number)
        dropped = self.dropped(number, sampled)
        participants = tuple(client for client in sampled if self.trains_dropped or client not in dropped)
        return Round(number, tuple(sampled), tuple(dropped), participants, self.evaluates(number))

    def following(self, last: Round, clients: Iterable[int], log: RoundLog) -> Round:
        """Return what follows the ``last`` round: a local phase of these clients, counted in ``log``."""
        return Round(last.number + 1, tuple(self.clients), (), tuple(clients), evaluates=True, log=log)
