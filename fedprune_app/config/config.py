"""The whole configuration of a run: the common options, and one field per table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

from fedprune_app.config.baselines import (
    DittoOptions,
    FedFomoOptions,
    FedProxOptions,
    FineTuneOptions,
    LGFedAvgOptions,
    MTLOptions,
)
from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.fedltp import FedLTPOptions
from fedprune_app.config.fedp3 import FedCROptions, FedP3Options
from fedprune_app.config.fedspa import FedSPAOptions
from fedprune_app.config.fedspallm import FedSpaLLMOptions
from fedprune_app.config.fjord import FjORDOptions
from fedprune_app.config.gossip import DisPFLOptions, DPSGDOptions
from fedprune_app.config.options import Option, Scalar, option_of
from fedprune_app.config.privacy import DPOptions
from fedprune_app.config.subfedavg import SubFedAvgOptions


@dataclass(frozen=True)
class Config(CommonOptions):
    """A configuration describes one run; the key ``dispfl.prune-rate`` is ``config.dispfl.prune_rate``."""

    subfedavg: SubFedAvgOptions = field(default_factory=SubFedAvgOptions)
    dispfl: DisPFLOptions = field(default_factory=DisPFLOptions)
    dpsgd: DPSGDOptions = field(default_factory=DPSGDOptions)
    finetune: FineTuneOptions = field(default_factory=FineTuneOptions)
    ditto: DittoOptions = field(default_factory=DittoOptions)
    fedfomo: FedFomoOptions = field(default_factory=FedFomoOptions)
    fedprox: FedProxOptions = field(default_factory=FedProxOptions)
    lgfedavg: LGFedAvgOptions = field(default_factory=LGFedAvgOptions)
    mtl: MTLOptions = field(default_factory=MTLOptions)
    fedp3: FedP3Options = field(default_factory=FedP3Options)
    fedcr: FedCROptions = field(default_factory=FedCROptions)
    fjord: FjORDOptions = field(default_factory=FjORDOptions)
    fedltp: FedLTPOptions = field(default_factory=FedLTPOptions)
    fedspa: FedSPAOptions = field(default_factory=FedSPAOptions)
    dp: DPOptions = field(default_factory=DPOptions)
    fedspallm: FedSpaLLMOptions = field(default_factory=FedSpaLLMOptions)

    @property
    def tables(self) -> list[Table]:
        """The tables, in their order."""
        return [value for item in fields(self) if isinstance(value := getattr(self, item.name), Table)]

    @property
    def public_share(self) -> float:
        """The share of the training images that no client gets."""
        return self.public_fraction or self.fedltp.public_share(self)

    def settled(self) -> Self:
        """Return the configuration with the test split that 'auto' stands for."""
        if self.test_split != "auto":
            return self
        return replace(self, test_split="holdout" if self.dp.enabled else "labels")

    def check(self) -> None:
        """Raise :class:`ConfigError` where options do not go together, in any table."""
        super().check()
        for table in self.tables:
            table.check(self)

    def fixed_on_resume(self) -> dict[str, str]:
        """Return resumable keys that this run's options fix all the same, each with the reason, which may be empty."""
        fixed: dict[str, str] = {}
        for table in self.tables:
            fixed = {**table.fixed_on_resume(self), **fixed}
        return fixed

    def to_dict(self) -> dict[str, Scalar]:
        """Return the flat form with kebab-case keys, every key present."""
        return {key: value for key, value, _ in _flat(self)}


def _flat(options: CommonOptions | Table, prefix: str = "") -> Iterator[tuple[str, Scalar, Option]]:
    """Yield key, value and declaration of every option; those of a table as ``table.key``."""
    for item in fields(options):
        key, value = f"{prefix}{item.name.replace('_', '-')}", getattr(options, item.name)
        if isinstance(value, Table):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value, option_of(item)


def _with_needs(key: str, declared: Option, config: Config) -> Option:
    """Return an option with the needs of its table too, all of them named by whole keys."""
    table, _, _ = key.rpartition(".")
    of_table = getattr(config, table.replace("-", "_")).needs if table else {}
    own = {f"{table}{name}" if name.startswith(".") else name: values for name, values in declared.needs.items()}
    return replace(declared, needs={name: values for name, values in {**of_table, **own}.items() if name != key})


OPTIONS: Mapping[str, Option] = {key: _with_needs(key, declared, Config()) for key, _, declared in _flat(Config())}
"""Every option of the product by its key."""
DEFAULTS: dict[str, Scalar] = {key: declared.default for key, declared in OPTIONS.items()}
