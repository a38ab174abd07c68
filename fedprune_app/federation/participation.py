"""Which clients take part in a round, by their privacy budgets and by draws from the run's seed."""

from collections.abc import Iterable

from fedprune_app.config import Config, ConfigError, has_effect
from fedprune_app.core import rng
from fedprune_app.core.bounds import threshold_of
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.clients import Roster
from fedprune_app.federation.round import Round, RoundLog


def check_min_replies(config: Config, max_participants: int, num_clients: int) -> None:
    """Raise :class:`ConfigError` if a round of ``max_participants`` clients cannot have ``min-replies``, or sums."""
    if num_clients < 1 and config.holdout_clients:
        raise ConfigError("holdout-clients", config.holdout_clients, "fewer than there are clients")
    share = f" and fraction-train {config.fraction_train:g}" if max_participants < num_clients else ""
    condition = f"with {num_clients} clients{share}"
    if config.min_replies > max_participants:
        raise ConfigError("min-replies", config.min_replies, f"at most {max_participants}", condition=condition)
    if not config.secure_sums:
        return
    least = threshold_of(config.secure_sums_threshold, max_participants)
    if max_participants < least:
        hint = f"a round has {max_participants}, and a sum needs {least} or more"
        raise ConfigError("secure-sums", True, "false", condition=condition, hint=hint)


def least_members(config: Config) -> int:
    """Return how many clients a round needs: one, or as many as a secure sum."""
    return threshold_of(config.secure_sums_threshold, 0) if config.secure_sums else 1


class Participation:
    """Selects the eligible, sampled and dropped clients of each round, and the clients to evaluate."""

    def __init__(self, config: Config, clients: Roster, budgets: Budgets) -> None:
        self.config = config
        self.clients = clients
        self.budgets = budgets
        self.trains_dropped = False  # whether a sampled client that drops out trains by itself
        self.absent: frozenset[int] = frozenset()  # whose nodes sent no heartbeat of late
        count = config.holdout_clients if has_effect("holdout-clients", config) else 0
        order = rng.numpy_generator(config.seed, "holdout").permutation(len(clients))
        self.holdouts = sorted(list(clients)[place] for place in order[:count])
        self.members = [client for client in clients if client not in self.holdouts]

    def warnings(self) -> list[str]:
        """Return a warning where a secure sum does without no client."""
        if not self.config.secure_sums or self.most > threshold_of(self.config.secure_sums_threshold, self.most):
            return []
        return [
            f"a secure sum needs each of a round's {self.most} clients: where one is lost the run stops, and --resume "
            "continues it"
        ]

    def eligible(self, round: int) -> list[int]:
        """Return the members whose budgets allow the round; none if they are too few for it."""
        found = [client for client in self.members if self.budgets.bears(client, round)]
        return found if self.sample_size(len(found)) >= least_members(self.config) else []

    def look_for(self, nodes: Iterable[int]) -> list[str]:
        """Take those whose nodes are not among the connected ``nodes`` for absent; return who is gone, or back."""
        connected = {*nodes}
        absent = frozenset(k for k, info in self.clients.items() if info.node_id not in connected)
        gone = [f"client {k} is gone: its node sends no heartbeat" for k in sorted(absent - self.absent)]
        back = [f"client {k} is back" for k in sorted(self.absent - absent)]
        self.absent = absent
        return gone + back

    @property
    def most(self) -> int:
        return self.sample_size(len(self.members))

    def sample_size(self, eligible: int) -> int:
        """Return the number of sampled clients among K eligible ones: ``max(⌊fraction · K⌋, 1)``."""
        return max(int(self.config.fraction_train * eligible + 1e-9), 1)

    def sampled(self, round: int) -> list[int]:
        eligible = self.eligible(round)
        present = [client for client in eligible if client not in self.absent]
        clients = present if len(present) >= self.config.min_replies else eligible
        permutation = rng.numpy_generator(self.config.seed, "sample", round=round).permutation(len(clients))
        return sorted(clients[i] for i in permutation[: self.sample_size(len(clients))])

    def dropped(self, round: int, sampled: list[int]) -> list[int]:
        """Draw the sampled clients that drop out, each with ``drop-probability``; as many stay as a round needs."""
        draws = rng.numpy_generator(self.config.seed, "drop", round=round).random(len(self.clients))
        luck = dict(zip(self.clients, draws, strict=True))
        last_clients = sorted(sampled, key=luck.__getitem__)[-least_members(self.config) :]
        return [k for k in sampled if luck[k] < self.config.drop_probability and k not in last_clients]

    def evaluates(self, round: int) -> bool:
        """Whether an evaluation after this round is planned; one that ends the run early is not."""
        interval = self.config.evaluate_every
        return round == self.config.num_server_rounds or bool(interval and round % interval == 0)

    def is_last(self, round: int) -> bool:
        """Whether no round follows: all rounds are done, or no privacy budget allows another."""
        return round == self.config.num_server_rounds or not self.eligible(round + 1)

    def evaluators(self, round: int) -> frozenset[int]:
        """Return the clients of an evaluation after this round: all after the last one, else ``evaluate-clients``."""
        clients, count = self.members, self.config.evaluate_clients
        if count == 0 or self.is_last(round):
            return frozenset(clients)
        permutation = rng.numpy_generator(self.config.seed, "evaluate", round=round).permutation(len(clients))
        return frozenset(clients[i] for i in permutation[:count])

    def round(self, number: int) -> Round:
        """Return the round of this number. Dropped clients take part only if they train alone."""
        sampled = self.sampled(number)
        dropped = self.dropped(number, sampled)
        participants = tuple(client for client in sampled if self.trains_dropped or client not in dropped)
        return Round(number, tuple(sampled), tuple(dropped), participants, self.evaluates(number))

    def following(self, last: Round, clients: Iterable[int], log: RoundLog) -> Round:
        """Return a local phase of these clients after the ``last`` round, counted in ``log``."""
        sampled, participants = tuple(sorted({*self.members, *clients})), tuple(clients)
        return Round(last.number + 1, sampled, (), participants, evaluates=True, log=log, channel=last.channel)
