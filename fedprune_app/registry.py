"""What can be chosen: the systems, and by reference the datasets, partitions and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clients.base import FederatedClient
from clients.fedavg import FedAvgClient
from clients.standalone import StandaloneClient
from clients.subfedavg import SubFedAvgClient
from fedprune_app.config import Config, ConfigError
from fedprune_app.data.datasets import DATASETS
from fedprune_app.data.partitions import PARTITIONS
from fedprune_app.models.vision import MODELS
from strategies.base import FederatedStrategy
from strategies.fedavg import FedAvg
from strategies.standalone import Standalone
from strategies.subfedavg import SubFedAvg


@dataclass(frozen=True)
class System:
    """A system's two halves and its one line for ``fedprune list``."""

    strategy: type[FederatedStrategy]
    client: type[FederatedClient]
    summary: str


SYSTEMS: dict[str, System] = {
    "subfedavg": System(SubFedAvg, SubFedAvgClient, "Sub-FedAvg (Un): each client prunes its own sub-network"),
    "fedavg": System(FedAvg, FedAvgClient, "FedAvg: one dense global model, averaged by sample counts"),
    "standalone": System(Standalone, StandaloneClient, "Standalone (Local): every client trains alone"),
}


def check_names(config: Config) -> Config:
    """``config``, if everything it names is registered; else :class:`ConfigError`."""
    allowed: dict[str, Mapping[str, object]] = {
        "system": SYSTEMS,
        "dataset": DATASETS,
        "partition": PARTITIONS,
        "model": {"auto": "", **MODELS},
    }
    for key, names in allowed.items():
        value = getattr(config, key)
        if value not in names:
            raise ConfigError(f"{key} is {value!r}, allowed: {', '.join(names)}")
    return config
