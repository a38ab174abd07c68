"""The whole configuration of a run: the common options, and one field per table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Self, TypeVar

from fedprune_app.config.baselines import (
    DittoOptions,
    FedFomoOptions,
    FedProxOptions,
    FedSPAOptions,
    FjORDOptions,
    LGFedAvgOptions,
    MTLOptions,
)
from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.fedltp import FedLTPOptions, public_share
from fedprune_app.config.fedp3 import FedCROptions, FedP3Options
from fedprune_app.config.fedspallm import FedSpaLLMOptions
from fedprune_app.config.gossip import DisPFLOptions, DPSGDOptions
from fedprune_app.config.options import Option, Scalar, Settings, option_of
from fedprune_app.config.privacy import DPOptions
from fedprune_app.config.subfedavg import SubFedAvgOptions

T = TypeVar("T", bound=Table)


@dataclass(frozen=True)
class Config(CommonOptions):
    """All settings of one run; the key ``dispfl.prune-rate`` is ``config.dispfl.prune_rate``."""

    subfedavg: SubFedAvgOptions = field(default_factory=SubFedAvgOptions)
    dispfl: DisPFLOptions = field(default_factory=DisPFLOptions)
    dpsgd: DPSGDOptions = field(default_factory=DPSGDOptions)
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
    own: Table = field(default_factory=Table)  # the options of a plug-in's system

    @property
    def tables(self) -> list[Table]:
        return [value for item in fields(self) if isinstance(value := getattr(self, item.name), Table)]

    @property
    def public_share(self) -> float:
        return self.public_fraction or public_share(self.system, self.fedltp.tickets, self.fedltp.public_dataset)

    @property
    def protected_unit(self) -> str:
        """The unit that dp.enabled protects: "example", "group", or the name of the column of groups."""
        return (self.dp.unit == "group" and self.group_column) or self.dp.unit

    def settled(self) -> Self:
        """Return the configuration with the test split, and for Sub-FedAvg (Hy) the network, that 'auto' stands for."""
        model = "auto-bn" if self.model == "auto" and self.system == "subfedavg-hy" else self.model
        # of a Dirichlet draw's labels many are rare: tested on all their images, a client's own training looks harmful
        auto = "proportional" if self.partition.startswith("dirichlet") else "labels"
        if self.dp.enabled or self.partition == "owners":
            auto = "holdout"
        return replace(self, model=model, test_split=auto if self.test_split == "auto" else self.test_split)

    def check(self) -> None:
        super().check()
        for table in self.tables:
            table.check(self)

    def fixed_on_resume(self) -> dict[str, str]:
        """Return the resumable keys that this run's options fix, each with the reason, which may be empty."""
        fixed: dict[str, str] = {}
        for table in self.tables:
            fixed = {**table.fixed_on_resume(self), **fixed}
        return fixed

    def table(self, kind: type[T]) -> T:
        """Return the options of this run's system, declared by a plug-in as the class ``kind``.

        Raises ``TypeError`` in a run of another system.
        """
        if not isinstance(self.own, kind):
            raise TypeError(f"system {self.system!r} has no options of the class {kind.__name__}")
        return self.own

    def to_dict(self) -> dict[str, Scalar]:
        """Return the flat form with kebab-case keys, every key present."""
        return {key: value for key, value, _ in flat(self)}


def flat(options: CommonOptions | Table, prefix: str = "") -> Iterator[tuple[str, Scalar, Option]]:
    """Yield (key, value, declaration) of every option; a table's keys are ``table.key``."""
    for item in fields(options):
        key, value = f"{prefix}{item.name.replace('_', '-')}", getattr(options, item.name)
        if isinstance(value, Table):
            yield from flat(value, f"{value.name or key}.")
        else:
            yield key, value, option_of(item)


def _with_needs(key: str, option: Option, config: Config) -> Option:
    """Return an option with its own and its table's needs, all by full keys."""
    table, _, _ = key.rpartition(".")
    of_table = getattr(config, table.replace("-", "_")).needs if table else {}
    own_needs = {f"{table}{name}" if name.startswith(".") else name: values for name, values in option.needs.items()}
    return replace(option, needs={name: values for name, values in {**of_table, **own_needs}.items() if name != key})


_OPTIONS = {key: _with_needs(key, option, Config()) for key, _, option in flat(Config())}
# Every option by its key, including those of loaded plug-ins.
OPTIONS: Mapping[str, Option] = MappingProxyType(_OPTIONS)
# The default of every option of the product; Flower's pyproject.toml declares these keys.
DEFAULTS: Settings = {key: option.default for key, option in OPTIONS.items()}


def register_keys(prefix: str, options: Mapping[str, Option]) -> None:
    """Replace all options that begin with ``prefix`` by a plug-in's ``options``."""
    for key in [key for key in _OPTIONS if key.startswith(prefix)]:
        del _OPTIONS[key]
    _OPTIONS.update(options)
