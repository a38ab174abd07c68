"""A node's policy: its operator's rules for every run. The node declines a run that breaks them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fedprune_app.config.config import OPTIONS, Config
from fedprune_app.config.errors import ConfigError, naming_source
from fedprune_app.config.options import Option, PathKind, listed, option, option_of
from fedprune_app.config.privacy import DPOptions

log = logging.getLogger("flwr.fedprune")


class PolicyError(ConfigError):
    """Raised when a node declines a run that breaks its rules."""


@dataclass(frozen=True)
class Policy:
    """A node's own settings, which a run must satisfy; with the defaults the node takes part in every run.

    ``epsilon-budget``, ``min-noise-multiplier`` and ``max-clip-norm`` each require ``dp.enabled``, since a run without
    it has no finite ε, no noise and no clipping.
    """

    require_dp: bool = option(False, "If true, the node declines runs without dp.enabled.")
    epsilon_budget: float = option(
        0.0, "The largest ε, at budget-delta, of all runs together. 0 means no limit of the node's own.", least=0
    )
    budget_delta: float = option(1e-5, "The δ of epsilon-budget, whatever dp.delta of a run is.", above=0, below=1)
    min_noise_multiplier: float = option(
        0.0,
        "The least noise multiplier of what the node itself adds, also of a run whose dp.target-epsilon chooses it.",
        least=0,
    )
    max_noise_shared_by: int = option(
        1,
        "The largest dp.noise-shared-by, of nodes in trusted-keys: the node relies on the noise of others. 1 means on "
        "no other's.",
        least=1,
    )
    dp_unit: str = option(
        "example",
        "What a run has to protect as one, see dp.unit.",
        choices={"example": "an example, or a group", "group": "a group"},
    )
    group_column: str = option(
        "",
        "The group-column that a run with dp.unit 'group' has to name, where dp-unit is 'group'. Empty means none.",
    )
    max_clip_norm: float = option(0.0, "The largest dp.clip-norm. 0 means no limit.", least=0)
    ledger_dir: str = option(
        "", "The folder of the node's ledger; the run's dp.ledger-dir is ignored.", kind=PathKind.STATE_FOLDER
    )
    secure_rng: bool = option(
        True,
        "If false, private noise derives from the run's seed, which the server knows: for rehearsals alone. If true, a"
        " node of a deployment, or with data of its own, draws from the operating system whatever the run says.",
    )
    require_secure_sums: bool = option(False, "If true, the node declines runs without secure-sums.")
    node_key: str = option(
        "",
        "The file of the node's registered private key, an absolute path: it signs the node's keys of secure sums.",
    )
    trusted_keys: str = option(
        "",
        "The file of public keys, one on a line, of the nodes that may be in a secure sum with this one, itself among "
        "them: an absolute path. Empty means whichever nodes the server names.",
    )
    allowed_label_columns: str = option(
        "label",
        "The columns of the node's own data that a run with dp.enabled may take as labels, separated by commas. The "
        "different labels are told to the server.",
    )
    allowed_systems: str = option("", "The systems that the node runs, separated by spaces. Empty means all.")
    allowed_plugins: str = option(
        "",
        "The modules and files of code that the node imports where a run names them, separated by commas. Plug-ins "
        "that are installed on the node, and declare the name of a system, are imported whatever this key says.",
        kind=PathKind.CODE,
    )
    allowed_models: str = option(
        "",
        "The SHA-256 digests of the language models that the node opens, separated by spaces; docs/deploy.md says of "
        "what. Empty means all.",
    )
    downloads: bool = option(
        True, "If false, the node declines runs with download=true. Other runs fetch no data, model or tokenizer."
    )

    @classmethod
    def parse(cls, values: Mapping[str, object], where: str) -> Policy:
        """Return the policy with these ``values``, which come from ``where``.

        Raises :class:`ConfigError` for an unknown key or an invalid value.
        """
        for key, value in values.items():
            if key not in POLICY_KEYS:
                raise ConfigError(key, value, ", ".join(POLICY_KEYS), which="is no key", where=where)
        with naming_source(where):
            parsed: dict[str, Any] = {
                k.replace("-", "_"): POLICY_KEYS[k].parse(k, value) for k, value in values.items()
            }
        return cls(**parsed)

    @property
    def why_private(self) -> str:
        """The first key that requires ``dp.enabled``; empty if none does."""
        asking = ("require_dp", "epsilon_budget", "min_noise_multiplier", "max_clip_norm")
        for name in asking:
            if getattr(self, name):
                return name.replace("_", "-")
        return "dp-unit" if self.dp_unit == "group" else ""

    def check(self, config: Config) -> None:
        """Raise :class:`PolicyError` if a run's settings break the policy."""
        systems = self.allowed_systems.split()
        if systems and config.system not in systems:
            raise declined("system", config.system, "allowed-systems", ", ".join(systems))
        if config.download and not self.downloads:
            raise declined("download", True, "downloads", "false")
        if self.require_secure_sums and not config.secure_sums:
            raise declined("secure-sums", False, "require-secure-sums", "true")
        if self.why_private and not config.dp.enabled:
            raise declined("dp.enabled", False, self.why_private, "true")
        if not config.dp.enabled:
            return
        if self.dp_unit == "group" and config.dp.unit != "group":
            raise declined("dp.unit", config.dp.unit, "dp-unit", "group")
        if self.dp_unit == "group" and config.group_column != self.group_column:
            raise declined("group-column", config.group_column, "group-column", self.group_column or "none")
        if config.dp.noise_multiplier:  # dp.target-epsilon needs the number of examples: see check_noise
            self.check_noise(config.dp, config.dp.noise_multiplier, "dp.noise-multiplier")
        if self.max_clip_norm and config.dp.clip_norm > self.max_clip_norm:
            raise declined("dp.clip-norm", config.dp.clip_norm, "max-clip-norm", f"at most {self.max_clip_norm}")

    def check_own_labels(self, config: Config) -> None:
        """Raise :class:`PolicyError` if a private run has a label column that the policy does not allow."""
        has_columns = config.dataset == "table" or config.label_column != OPTIONS["label-column"].default
        if config.dp.enabled and has_columns and config.label_column not in listed(self.allowed_label_columns):
            allowed = self.allowed_label_columns or "none"
            raise declined("label-column", config.label_column, "allowed-label-columns", allowed)

    def check_model(self, name: str, digest: str) -> None:
        """Raise :class:`PolicyError` for a language model whose ``digest`` is not among ``allowed-models``.

        The digest is that of :func:`~fedprune_app.models.sources.model_digest`. It is written only to the node's log,
        since a run may name any folder of the node.
        """
        allowed = self.allowed_models.split()
        if digest not in allowed:
            log.warning("model %r has the SHA-256 %s", name, digest)
            raise declined("model", name, "allowed-models", f"SHA-256 {' '.join(allowed)}")

    def check_noise(self, options: DPOptions, noise_multiplier: float, key: str) -> None:
        if not self.min_noise_multiplier:
            return
        if (own_part := options.own_part(noise_multiplier)) < self.min_noise_multiplier:
            allowed = f"at least {self.min_noise_multiplier}"
            whose = "the own part of " if options.noise_shared_by > 1 else ""
            raise declined(whose + key, own_part, "min-noise-multiplier", allowed)

    def check_shared_noise(self, shared_by: int) -> None:
        """Raise :class:`PolicyError` for noise of more clients than the node relies on: a server could invent them."""
        most = self.max_noise_shared_by if self.trusted_keys else 1
        if shared_by > most:
            keys = "max-noise-shared-by and trusted-keys"
            raise declined("dp.noise-shared-by", shared_by, keys, f"at most {most}")

    def over(self, config: Config) -> Config:
        """Return the settings of a run, restricted by the policy.

        A node that requires privacy reports no open accuracies: they reveal something about test examples, and each run
        may draw these anew.
        """
        if self.why_private and config.dp.accuracies == "open":
            return replace(config, dp=replace(config.dp, accuracies="none"))
        return config


def declined(key: str, value: object, node_key: str, allowed: str) -> PolicyError:
    return PolicyError(key, value, allowed, condition=f"by its {node_key}", where="the node declines the run")


# Every key of a policy.
POLICY_KEYS: Mapping[str, Option] = {item.name.replace("_", "-"): option_of(item) for item in fields(Policy)}
# A node without a policy takes part in every run.
NO_POLICY = Policy()
# The key of a node-config for the file of the policy.
POLICY_FILE = "policy-file"
