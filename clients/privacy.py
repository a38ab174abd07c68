"""A client's privacy with ``dp.enabled``: its noise, its ledger, and the remaining budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clients.context import NodeContext
from fedprune_app.config import NO_POLICY, OPTIONS, Config, Policy, Scalar, has_effect
from fedprune_app.files import kept_secret
from fedprune_app.learning.planned_noise import noise_multiplier, num_evaluations, planned_rounds
from fedprune_app.learning.sgd import SGD
from fedprune_app.privacy import noise as noises

if TYPE_CHECKING:  # Opacus and dp-accounting take seconds to import, and most runs do not need them
    from fedprune_app.privacy.accounting import Spent
    from fedprune_app.privacy.dpsgd import DPSGD
    from fedprune_app.privacy.ledger import Data


_ROUNDING = 1e-6  # versions of a library may round differently; a lost charge is larger


@dataclass(frozen=True)
class PlannedReleases:
    """A client's plan for a run, from which noise is found for ``dp.target-epsilon`` and budgets are checked.

    * ``round_epochs``: epochs of training in a round.
    * ``round_counts``: noised counts of correct predictions in a round, without its evaluation.
    * ``evaluation_counts``: the largest number of counts in an evaluation.
    * ``more_epochs``, ``more_counts``: those of the whole run outside its rounds and evaluations.
    """

    round_epochs: int
    round_counts: int = 0
    evaluation_counts: int = 0
    more_epochs: int = 0
    more_counts: int = 0


@dataclass(frozen=True)
class Dependencies:
    """Values in the key of a training's seeded noise, besides seed, role, client, round and the initial tensors.

    If one of them differs, the noise differs: two results with equal noise would reveal their difference. Their text is
    a part of the key, so a change of the text changes all seeded private results.
    """

    sgd: SGD
    task_digest: str  # of all payloads that the server sent
    of_system: object  # further dependencies that the system declares
    own_settings: list[tuple[str, Scalar]]
    noise_multiplier: float
    clip_norm: float
    sample_rate: float
    units: str = ""  # the limit of examples per group, if any group has more than one

    def __str__(self) -> str:
        own_text = (f" {self.own_settings}" if self.own_settings else "") + (f" {self.units}" if self.units else "")
        noise_text = f"{self.noise_multiplier} {self.clip_norm} {self.sample_rate}"
        return f"{self.sgd} {self.task_digest} {self.of_system}{own_text} {noise_text}"


def own_settings(config: Config) -> list[tuple[str, Scalar]]:
    """Return the systems' settings that are not at their default; they are part of the seeded noise's key."""
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if "." in key
        and not key.startswith("dp.")
        and value != (option := OPTIONS[key]).default
        and option.changes_results
        and not option.resumable  # a resumed run may change it, and ends as if it had always had the new value
        and has_effect(key, config)
    }
    return sorted(settings.items())


class ClientPrivacy:
    """Noise, charges and remaining budget of one client in one run.

    Guarantee: zero-out adjacency with known size. Neighbours differ in one example, or with ``dp.unit`` "group" in all
    examples of one group, which is blank in one of them. A blank has no gradient and is never counted. Both have
    ``num_units`` examples or groups to train on.

    ``ledger`` is the file with the charges of the client's ``data``. Raises ``ValueError`` if it is damaged, or of
    other data. ``policy`` is the node's: its budget applies as well as the run's, each at its own δ. Raises
    :class:`~fedprune_app.config.PolicyError` if the noise found for ``dp.target-epsilon`` is below the node's minimum.
    """

    def __init__(
        self,
        config: Config,
        client_id: int,
        num_units: int,
        planned_releases: PlannedReleases,
        ledger: Path,
        data: Data,
        policy: Policy = NO_POLICY,
    ) -> None:
        from fedprune_app.privacy.accounting import Laplace
        from fedprune_app.privacy.ledger import Budget, Ledger

        self.options = options = config.dp
        self.seed, self.unit = config.seed, config.protected_unit
        self.client_id, self.num_units = client_id, num_units
        self.sample_rate, self.steps_per_epoch = self.sampling(config, num_units)
        # at most, in the whole run
        epochs = planned_rounds(config) * planned_releases.round_epochs + planned_releases.more_epochs
        counts = planned_rounds(config) * planned_releases.round_counts + planned_releases.more_counts
        if options.accuracies == "noised":
            counts += num_evaluations(config) * planned_releases.evaluation_counts
        extra_releases = ((Laplace(options.count_scale, 1.0), counts),) if counts else ()
        self.noise_multiplier = noise_multiplier(
            config, self.sample_rate, epochs * self.steps_per_epoch, extra_releases
        )
        if options.target_epsilon:
            policy.check_noise(options, self.noise_multiplier, "the noise multiplier found for dp.target-epsilon")
        self.round_scale = options.count_scale if planned_releases.round_counts else 0.0
        self.round_cost = dict(self.steps(planned_releases.round_epochs))
        if planned_releases.round_counts:
            self.round_cost[Laplace(options.count_scale, 1.0)] = planned_releases.round_counts
        budgets = [] if options.epsilon_limit is None else [Budget(options.epsilon_limit, options.delta)]
        if policy.epsilon_budget:
            budgets.append(Budget(policy.epsilon_budget, policy.budget_delta))
        self.ledger = Ledger(ledger, accountant=options.accountant, budgets=budgets, data=data)

    has_paper_figure = True  # Fed-LTP's printed formula is for rounds of DP-SGD

    @staticmethod
    def sampling(config: Config, num_units: int) -> tuple[float, int]:
        """Return the share of the examples or groups that a step draws, and the number of steps in an epoch."""
        steps = config.steps_per_epoch or math.ceil(num_units / config.batch_size)
        return min(1.0, config.batch_size / num_units), steps

    def noise(self, role: str, round: int, public: Mapping[str, Tensor], settings: str) -> noises.Noise:
        """Return the randomness of one release, see :func:`~fedprune_app.privacy.noise.noise_source`."""
        return noises.noise_source(self.options.secure_rng, self.seed, role, self.client_id, round, public, settings)

    @property
    def affords_a_round(self) -> bool:
        """Whether the budget can pay for the training of one more round, with its counts."""
        return self.ledger.affords(self.round_cost)

    def round_epsilon(self) -> float:
        """Return the ε of one round's training alone, with its counts, at the run's δ."""
        from fedprune_app.privacy.accounting import epsilon

        return epsilon(self.round_cost, self.options.delta, self.options.accountant)

    # --- training -------------------------------------------------------------------------------------------------

    def steps(self, epochs: int) -> Spent:
        """Return the charge of ``epochs`` of training."""
        from fedprune_app.privacy.accounting import Steps

        return {Steps(self.noise_multiplier, self.sample_rate): epochs * self.steps_per_epoch}

    def dpsgd(
        self,
        epochs: int,
        role: str,
        round: int,
        public: Mapping[str, Tensor],
        dependencies: Dependencies,
        groups: Tensor | None = None,
    ) -> DPSGD:
        """Return the private gradients of the next training.

        ``public`` and ``dependencies`` are everything but the data that the training depends on. ``groups`` are those
        of the data, if groups are protected. Raises :class:`~fedprune_app.privacy.ledger.Overspent`, before any work is
        done, if the budget cannot pay for it.
        """
        from fedprune_app.privacy.dpsgd import DPSGD

        self.ledger.require(self.steps(epochs))
        if groups is not None and len(groups.bincount()) < len(groups):
            dependencies = replace(dependencies, units=f"{self.options.group_limit} of each {self.unit}")
        return DPSGD(
            self.noise_multiplier,
            self.options.clip_norm,
            self.sample_rate,
            self.steps_per_epoch,
            self.noise(role, round, public, str(dependencies)),
            self.options.grad_sample,
            num_units=self.num_units,
            groups=groups,
            group_limit=self.options.most_per_unit,
        )

    def charge_steps(self, steps: int, note: str) -> None:
        """Charge the steps of a training: after it, and before any of its results is stored or sent."""
        self.ledger.charge_steps(self.noise_multiplier, self.sample_rate, steps, note)

    # --- counts ---------------------------------------------------------------------------------------------------

    def noised_count(self, correct: float, total: int, split: str, round: int, public: Mapping[str, Tensor]) -> float:
        """Return the share of correct predictions in [0, 1], from a count that is noised and charged."""
        score = self.noised_score(correct, split, round, public)
        return min(max(score, 0), total) / total

    def affordable_count(
        self, correct: float, total: int, split: str, round: int, public: Mapping[str, Tensor]
    ) -> float | None:
        """Return the share of correct predictions for reports, or None, uncharged, if the budget allows no count.

        The share is :meth:`noised_score` over ``total``. It may be up to 1 below 0 or above 1, so that a mean over
        clients has hardly any bias: with shares clipped to [0, 1], a mean of high accuracies would be too low.
        """
        from fedprune_app.privacy.ledger import Overspent

        try:
            return min(max(self.noised_score(correct, split, round, public) / total, -1.0), 2.0)
        except Overspent:
            return None

    def noised_score(self, correct: float, split: str, round: int, public: Mapping[str, Tensor]) -> int:
        """Return a count of correct predictions, noised, rounded and charged. An example, or a group, counts once.

        Simulated noise depends on the tested model, not on the round: a client that has lost its stored scores tests
        the same model again, with another charge and the same result.
        """
        options = self.options
        if options.count_scale == 0:
            raise ValueError("dp.count-scale is 0.0, allowed where a released count is asked for: above 0")
        noise = self.noise(f"count {split}", 0, public, "")
        self.ledger.charge_laplace(options.count_scale, 1.0, f"correct on {split}, round {round}")
        return noises.noisy_count(correct, options.count_scale, noise)

    def spares_count(self) -> bool:
        """Return whether the budget can pay for a count and the training of a round after it."""
        from fedprune_app.privacy.accounting import Laplace, total

        scale = self.options.count_scale
        return self.options.accuracies != "noised" or self.ledger.affords(
            total(self.round_cost, {Laplace(scale, 1.0): 1})
        )

    # --- reports --------------------------------------------------------------------------------------------------

    def require_memory(self, charges: int, known_epsilon: float) -> None:
        """Raise ``ValueError`` if the ledger has lost charges.

        ``charges`` is their number in the client's state, ``known_epsilon`` the last one that the client reported to
        the server: ledger and state may be lost together. It is by Rényi divergences, whose sums have no grid error.
        """
        epsilon = self.ledger.epsilon(self.options.delta, "rdp")
        if len(self.ledger) < charges or epsilon < known_epsilon * (1 - _ROUNDING):
            raise ValueError(
                f"ledger '{self.ledger.path}' holds {len(self.ledger)} charges and epsilon {epsilon:.4g} by RDP, the "
                f"client's state knows of {charges} and the client has told {known_epsilon:.4g}: what was spent is not "
                "known"
            )

    def declined(self, round: int, error: Exception) -> dict[str, Any]:
        """Return the fields of a reply that declines for lack of budget: the report so far, and the reason."""
        return {**self.report(round), "budget-spent": True, "declined": str(error)}

    def report(self, round: int) -> dict[str, Any]:
        """Report ε so far, by the run's accountant, by each one and by Fed-LTP's printed formula.

        ``budget-spent`` is true if the budget cannot pay for another round. ``epsilon-simulated`` is 1 if the noise
        derives from the seed, and 0 if nobody else can know it.
        """
        from fedprune_app.privacy.accounting import ACCOUNTANTS, paper_epsilon

        options = self.options
        figures = {"epsilon": self.ledger.epsilon(options.delta)}
        if self.has_paper_figure:
            noise, rate = self.noise_multiplier, self.sample_rate
            figures["epsilon-paper"] = paper_epsilon(round, noise, rate, options.delta, self.round_scale)
        figures |= {f"epsilon-{name}": self.ledger.epsilon(options.delta, name) for name in ACCOUNTANTS}
        if options.second_delta:
            figures["epsilon-second"] = self.ledger.epsilon(options.second_delta)
        fields: dict[str, Any] = {name: value for name, value in figures.items() if math.isfinite(value)}
        fields["epsilon-simulated"] = int(not options.secure_rng)
        return fields | {"budget-spent": not self.affords_a_round}


# --- which ledger, and where ------------------------------------------------------------------------------------------


def split_secret(config: Config, context: NodeContext) -> str:
    """Return the node's secret that draws the parts of its own data; empty if the run's seed draws them.

    The secret is for private runs with secret noise. It is made once, and kept beside the ledger.
    """
    dp = config.dp
    if not (context.has_own_data and dp.enabled and dp.secure_rng):
        return ""
    return kept_secret(Path(dp.ledger_dir or context.state_dir) / "split.secret")


def data_of(config: Config, context: NodeContext, records: list[bytes], dealing: str) -> Data:
    """Return the identity of the client's data, by their content; it selects the ledger.

    If the node's operator sets the ledger's folder or a budget, one ledger serves all data. Otherwise a client's own
    data may change, and keep their ledger while they share a record with the data before. Data dealt in another way
    have another ledger.
    """
    from fedprune_app.privacy.ledger import Data

    if context.has_own_data:
        about = "a folder of the client's own"
        return Data.of(records, about, may_change=True, joins=_is_one_for_all(context), unit=config.protected_unit)
    number, clients = context.share
    about = f"client {number} of {clients}, {config.dataset} dealt by {dealing} with seed {config.seed}"
    return Data.of(records, about, joins=_is_one_for_all(context), unit=config.protected_unit)


def _is_one_for_all(context: NodeContext) -> bool:
    """Return whether the node's operator wants one ledger for all runs, however they deal the node's data."""
    return bool(context.policy.ledger_dir or context.policy.epsilon_budget)


def ledger_path(config: Config, context: NodeContext, data: Data, folder: Path) -> Path:
    """Return the path of the client's ledger: in its ``folder``, or in ``dp.ledger-dir`` for all runs on the data.

    The ledger of a client's own data is named by the data, not by the client's number, which the server chooses.
    """
    from fedprune_app.privacy.ledger import ledger_of

    shared_folder = config.dp.ledger_dir
    if context.has_own_data:
        return ledger_of(data, Path(shared_folder) if shared_folder else context.state_dir)
    if not shared_folder:
        return folder / "ledger.jsonl"
    dealing = "" if _is_one_for_all(context) else f"-{data.identity[:16]}"
    return Path(shared_folder) / f"{context.client_id:05d}{dealing}.jsonl"
