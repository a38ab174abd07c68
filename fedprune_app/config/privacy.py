"""Options of differential privacy: the noise, the ledger, and the reported accuracies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, NoneOf, PathKind, option


@dataclass(frozen=True)
class DPOptions(Table):
    """Protection of each client's examples against everyone else, the server included (docs/privacy.md)."""

    needs: ClassVar[Needs] = {"dp.enabled": (True,)}

    enabled: bool = option(
        False,
        "If true, clients train with DP-SGD and charge every release to their ledger. Settings that leak are refused.",
    )
    unit: str = option(
        "example",
        "The unit that is protected: ε compares the data with this unit and without.",
        choices={
            "example": "one example",
            "group": "all examples of one group together, such as a patient's; batch-size then counts groups",
        },
    )
    group_limit: int = option(
        16,
        "The largest number of examples of one group in a step. Of a larger group they are drawn anew for each step.",
        least=1,
        needs={".unit": ("group",)},
    )
    noise_multiplier: float = option(
        0.0,
        "The standard deviation of the noise, divided by clip-norm (σ). 0 means the noise that target-epsilon needs.",
        least=0,
    )
    target_epsilon: float = option(
        0.0,
        "The ε of the planned rounds, for which the noise is chosen; this ε is a budget too. 0 means that "
        "noise-multiplier gives the noise.",
        least=0,
    )
    planned_rounds: int = option(
        0,
        "The number of rounds that a client is planned to join, for target-epsilon. 0 means all of num-server-rounds.",
        least=0,
        needs={".target-epsilon": NoneOf((0.0,))},
    )
    noise_shared_by: int = option(
        1,
        "The number of honest clients whose noise in a secure sum is together that of noise-multiplier. ε then holds "
        "against the server and as many colluding clients as secure-sums-threshold is larger. 1 means that each client "
        "adds all noise, and relies on no other.",
        least=1,
        needs={"system": ("fedspallm",)},
    )
    clip_norm: float = option(
        1.0,
        "The norm (C) to which each example's gradient, each group's mean gradient, or in FedSpaLLM each segment's "
        "second moments are clipped.",
        above=0,
    )
    delta: float = option(
        1e-5,
        "The δ of every ε. A meaningful δ is below 1 divided by a client's number of examples.",
        above=0,
        below=1,
    )
    second_delta: float = option(0.0, "Another δ, for which ε is reported too. 0 means no other δ.", least=0, below=1)
    epsilon_budget: float = option(
        0.0, "The budget: a client stops before its ε exceeds this number. 0 means no limit.", least=0
    )
    accountant: str = option(
        "pld",
        "The accountant that adds up releases for ε and for budgets. Both figures are reported.",
        choices={
            "pld": "privacy loss distributions, the tighter figure",
            "rdp": "Rényi divergences, which say more",
        },
    )
    accuracies: str = option(
        "noised",
        "The form in which clients tell their accuracies, which are those on examples that were never trained on. "
        "'noised' and 'open' need test-split 'holdout'.",
        choices={
            "noised": "as noised counts that are charged, so that the promise holds for all examples",
            "open": "as they are: nothing is promised for validation and test examples, as in research on public data",
            "none": "not at all",
        },
    )
    count_scale: float = option(
        20.0,
        "The scale of the Laplace noise on a count of correct predictions. A count costs an ε of 1 divided by the "
        "scale, where the count stands alone. 0 means that no count is told or asked for.",
        least=0,
    )
    grad_sample: str = option(
        "auto",
        "The method that computes gradients per example. The results of all methods agree.",
        choices={
            "auto": "the fastest, which is one-pass",
            "one-pass": "one backward pass, no gradients of single examples in linear layers",
            "hooks": "Opacus' hooks, which also know layers that are used twice",
        },
    )
    secure_rng: bool = option(
        False,
        "If true, noise and samples come from the operating system and cannot be reproduced. If false, those of a"
        " simulation derive from the seed, which only simulates privacy. Nodes of a deployment, and nodes with data of"
        " their own, draw from the operating system in any case unless their operators say otherwise.",
    )
    ledger_dir: str = option(
        "",
        "The folder for one ledger over all runs on the same data of a client, as an absolute path. Empty means"
        " that the ledger is with the run's state.",
        kind=PathKind.STATE_FOLDER,
        changes_results=False,
    )

    @property
    def epsilon_limit(self) -> float | None:
        """The ε at which a client stops: the smaller of dp.epsilon-budget and dp.target-epsilon."""
        return min((epsilon for epsilon in (self.epsilon_budget, self.target_epsilon) if epsilon), default=None)

    @property
    def most_per_unit(self) -> int:
        """The largest number of examples of one protected unit in a step."""
        return self.group_limit if self.unit == "group" else 1

    def own_part(self, noise: float) -> float:
        """Return the standard deviation of what a client adds of noise with the standard deviation ``noise``."""
        return noise / math.sqrt(self.noise_shared_by)

    def noise_of_accuracy(self, num_tests: int) -> float:
        """Return the standard deviation of the noise in a share of ``num_tests`` test examples."""
        return math.sqrt(2) * self.count_scale / num_tests

    def check(self, common: CommonOptions) -> None:
        if common.system == "ldp-fedp3" and not self.enabled:
            raise ConfigError("dp.enabled", False, "true", condition="with system 'ldp-fedp3', which promises privacy")
        if not self.enabled:
            return
        if common.precision != "float32":  # with norms rounded to 10 bits a clipped gradient could exceed clip-norm
            raise ConfigError("precision", common.precision, "float32", condition="with dp.enabled")
        if self.unit == "group" and self.grad_sample == "hooks":
            raise ConfigError("dp.grad-sample", self.grad_sample, "auto, one-pass", condition="with dp.unit 'group'")
        if self.unit == "group" and common.dataset == "table" and not common.group_column:
            allowed = "the name of a column"
            raise ConfigError("group-column", "", allowed, condition="with dp.unit 'group' and dataset 'table'")
        if (self.noise_multiplier > 0) == (self.target_epsilon > 0):
            raise ConfigError(
                "dp.noise-multiplier",
                self.noise_multiplier,
                f"above 0 where dp.target-epsilon, {self.target_epsilon!r}, is 0, and else 0",
                condition="with dp.enabled",
            )
        if self.noise_shared_by > 1 and not (
            common.secure_sums and self.noise_shared_by < common.secure_sums_threshold
        ):
            allowed = "1, or with secure-sums less than secure-sums-threshold"
            raise ConfigError("dp.noise-shared-by", self.noise_shared_by, allowed)
        if self.accuracies == "noised" and self.count_scale == 0:
            raise ConfigError("dp.count-scale", 0.0, "above 0", condition="with dp.accuracies 'noised'")

    def fixed_on_resume(self, common: CommonOptions) -> Mapping[str, str]:
        """Fix the folder of the clients' ledgers, and with a target the rounds and evaluations it is spread over."""
        if not self.enabled:
            return {}
        fixed = {"state-dir": ""}
        if not self.target_epsilon:
            return fixed
        is_noised = self.accuracies == "noised" and common.system != "fedspallm"  # whose clients report no accuracies
        if is_noised or common.system in ("fedltp", "fedavg-ft", "dpsgd-ft"):  # they score or train in evaluations
            reason = "the noise was chosen for so many evaluations"
            fixed |= {"evaluate-every": reason, "num-server-rounds": reason}
        if not self.planned_rounds:
            reason = "dp.target-epsilon is spread over these rounds, unless a run begins with dp.planned-rounds"
            fixed["num-server-rounds"] = reason
        return fixed
