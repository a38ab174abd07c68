"""Registration of a plug-in's systems, models, datasets and partitions under names of their own."""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fedprune_app.config import ConfigError, Table, check_uses, register_table
from fedprune_app.core.named import ImageShape
from fedprune_app.data.names import DATASETS, DEALERS, LOADERS, PARTITIONS
from fedprune_app.models.names import AUTO, BUILDERS, MODELS
from fedprune_app.registry import SYSTEMS, System
from fedprune_app.results import system_metrics
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.system_metrics import SystemMetric

NAMES: Mapping[str, Mapping[str, object]] = {
    "system": SYSTEMS,
    "model": MODELS,
    "dataset": DATASETS,
    "partition": PARTITIONS,
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
origins: dict[tuple[str, str], str] = {}  # by key and name: the module that registered it


def register_system(
    name: str,
    *,
    strategy: type[Any],
    client: type[Any],
    summary: str,
    options: type[Table] | None = None,
    uses: Collection[str] = (),
    metrics: Iterable[SystemMetric] = (),
) -> None:
    """Add a system: its server half ``strategy`` and its client half ``client``.

    * ``summary``: one line for ``fedprune list``.
    * ``options``: a frozen dataclass that extends Table, with a field for each option. The option ``mu`` is the key
      ``name.mu``; the halves read it as ``self.config.table(Options).mu``.
    * ``uses``: keys and tables of other systems that this one also reads: ``("density", "dispfl")``.
    * ``metrics``: metrics that the system reports besides fedprune's own.

    Raises :class:`ConfigError` for a name in use.
    """
    from clients.node import Node, declared
    from strategies.base import FederatedStrategy

    for role, half, base in (("strategy", strategy, FederatedStrategy), ("client", client, Node)):
        if not (isinstance(half, type) and issubclass(half, base)):
            raise ConfigError(role, half, f"a class that extends {base.__name__}", where=f"system {name!r}")
    checked_measures = system_metrics.checked(name, metrics)
    declared_fields = declared(client)
    for metric in checked_measures:
        if metric.name in declared_fields.registration | declared_fields.training | declared_fields.evaluation:
            raise ConfigError(
                "measure",
                metric.name,
                "another name, or the measure alone",
                which=f"is a field that {client.__name__} declares",
                where=f"system {name!r}",
            )
    for key, said, allowed in (
        ("headline", strategy.headline, DECLARATIONS.headlines),
        ("validates", getattr(client, "validates", "personal"), ("personal", "received", "global")),
    ):
        if said not in allowed:
            raise ConfigError(key, said, ", ".join(allowed), where=f"system {name!r}")
    _claim("system", name)
    if options is not None:
        register_table(name, options)
    checked_uses, table = check_uses(name, uses), options or Table
    SYSTEMS[name] = System(strategy, client, summary, options=table, uses=checked_uses, metrics=checked_measures)


def register_model(name: str, build: Callable[[ImageShape, int], Any], summary: str) -> None:
    """Add a network: ``build(image_shape, num_classes)`` returns a ``torch.nn.Module`` that maps images to logits.

    ``image_shape`` is (channels, height, width). Weights of convolutions and linear layers can be pruned. The function
    draws initial weights from PyTorch's global generator, which the run seeds.
    """
    _claim("model", name)
    BUILDERS[name], MODELS[name] = build, summary


def register_dataset(name: str, load: Callable[[str], Any], summary: str, *, model: str = "lenet5") -> None:
    """Add a dataset: ``load(data_dir)`` returns its training and test part (:mod:`fedprune_app.data.plugin_datasets`).

    ``model`` is its network for ``model=auto``.
    """
    _claim("dataset", name)
    LOADERS[name], DATASETS[name], AUTO[name] = load, summary, model


def register_partition(name: str, deal: Callable[..., Any], summary: str) -> None:
    """Add a partition: ``deal(labels, num_clients, rng)`` returns by client the indices of its examples.

    ``labels`` is int64 of shape (N,), and ``rng`` a NumPy generator that depends only on the run's seed.
    """
    _claim("partition", name)
    DEALERS[name], PARTITIONS[name] = deal, summary


def _claim(key: str, name: str) -> None:
    """Reserve a name for the calling module; it may register the same name again."""
    origin = sys._getframe(2).f_globals["__name__"]
    where = f"plug-in {origin}"
    earlier_origin = origins.get((key, name))
    if name in NAMES[key] and earlier_origin != origin:
        owner = f"plug-in {earlier_origin}" if earlier_origin else "fedprune itself"
        raise ConfigError(key, name, "another name", which=f"is one of {owner}", where=where)
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigError(key, name, "a name of letters, digits, '-', '_' and '.'", where=where)
    origins[key, name] = origin
    if earlier_origin is not None:
        clear_caches()


def clear_caches() -> None:
    from fedprune_app.data import splits
    from fedprune_app.models import initial

    splits.clear_cache()
    initial.clear_cache()
