"""The registry names all that can be chosen: the systems, and by reference the datasets, partitions and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from clients.dispfl import DisPFLClient
from clients.ditto import DittoClient
from clients.dpsgd import DPSGDClient
from clients.dpsgd_ft import DPSGDFTClient
from clients.fedavg import FedAvgClient
from clients.fedavg_ft import FedAvgFTClient
from clients.fedcr import FedCRClient
from clients.fedfomo import FedFomoClient
from clients.fedltp import FedLTPClient
from clients.fedp3 import FedP3Client
from clients.fedprox import FedProxClient
from clients.fedspa import FedSPAClient
from clients.fedspallm import FedSpaLLMClient
from clients.fjord import FjORDClient
from clients.ldp_fedp3 import LDPFedP3Client
from clients.lg_fedavg import LGFedAvgClient
from clients.mtl import MTLClient
from clients.node import Node
from clients.standalone import StandaloneClient
from clients.subfedavg import SubFedAvgClient
from clients.subfedavg_hy import SubFedAvgHyClient
from fedprune_app.config import Config, ConfigError
from fedprune_app.data.datasets import DATASETS
from fedprune_app.data.partitions import PARTITIONS
from fedprune_app.data.text import TEXTS
from fedprune_app.models.initial import chosen_name
from fedprune_app.models.vision import MODELS, architecture
from strategies.base import FederatedStrategy
from strategies.dispfl import DisPFL
from strategies.ditto import Ditto
from strategies.dpfed import DPFed
from strategies.dpsgd import DPSGD
from strategies.dpsgd_ft import DPSGDFT
from strategies.fedavg import FedAvg
from strategies.fedavg_ft import FedAvgFT
from strategies.fedcr import FedCR
from strategies.fedfomo import FedFomo
from strategies.fedltp import FedLTP
from strategies.fedp3 import FedP3
from strategies.fedprox import FedProx
from strategies.fedspa import FedSPA
from strategies.fedspallm import FedSpaLLM
from strategies.fjord import FjORD
from strategies.ldp_fedp3 import LDPFedP3
from strategies.lg_fedavg import LGFedAvg
from strategies.mtl import MTL
from strategies.standalone import Standalone
from strategies.subfedavg import SubFedAvg
from strategies.subfedavg_hy import SubFedAvgHy


@dataclass(frozen=True)
class System:
    """A system has a server half, a client half, and one line for ``fedprune list``."""

    strategy: type[FederatedStrategy]
    client: type[Node[Any]]
    summary: str
    data: str = "images"  # or "text"


SYSTEMS: dict[str, System] = {
    "subfedavg": System(SubFedAvg, SubFedAvgClient, "Sub-FedAvg (Un): each client prunes its own sub-network"),
    "subfedavg-hy": System(
        SubFedAvgHy, SubFedAvgHyClient, "Sub-FedAvg (Hy): channels are removed, linear layers pruned"
    ),
    "dispfl": System(DisPFL, DisPFLClient, "Dis-PFL: sparse personal models gossip with neighbours, masks evolve"),
    "fedp3": System(FedP3, FedP3Client, "FedP3: clients train some layers, get the others pruned, send only theirs"),
    "ldp-fedp3": System(
        LDPFedP3, LDPFedP3Client, "LDP-FedP3: private local steps, each client sends its share of a random permutation"
    ),
    "fedltp": System(
        FedLTP, FedLTPClient, "Fed-LTP: a ticket from public data, sparse DP-SGD, noised validation of every round"
    ),
    "fedspallm": System(
        FedSpaLLM, FedSpaLLMClient, "FedSpaLLM: clients prune a language model's layers with private text", "text"
    ),
    "fedavg": System(FedAvg, FedAvgClient, "FedAvg: one dense global model, averaged by sample counts"),
    "dpfed": System(DPFed, FedAvgClient, "DP-Fed: FedAvg with DP-SGD, and a plain mean of the updates"),
    "fedspa": System(FedSPA, FedSPAClient, "Fed-SPA: DP-SGD on random coordinates, an accelerated server"),
    "fedavg-ft": System(FedAvgFT, FedAvgFTClient, "FedAvg-FT: FedAvg's model, fine-tuned by every client"),
    "dpsgd": System(DPSGD, DPSGDClient, "D-PSGD: decentralised FedAvg, judged by the consensus model"),
    "dpsgd-ft": System(DPSGDFT, DPSGDFTClient, "D-PSGD-FT: D-PSGD's consensus model, fine-tuned by every client"),
    "ditto": System(Ditto, DittoClient, "Ditto: FedAvg, and a personal model each that is pulled towards it"),
    "fedfomo": System(FedFomo, FedFomoClient, "FedFomo: each client moves towards those models that help it"),
    "fedprox": System(FedProx, FedProxClient, "FedProx: FedAvg with a proximal term in the local loss"),
    "fedcr": System(
        FedCR, FedCRClient, "FedCR: a variational encoder for all, drawn to a Gaussian per class; own heads"
    ),
    "fjord": System(FjORD, FjORDClient, "FjORD: ordered dropout, nested sub-networks of leading units"),
    "lg-fedavg": System(LGFedAvg, LGFedAvgClient, "LG-FedAvg: lower layers stay local, upper ones are averaged"),
    "mtl": System(MTL, MTLClient, "MTL: own models, and a learnt covariance of clients between them (a surrogate)"),
    "standalone": System(Standalone, StandaloneClient, "Standalone (Local): every client trains alone"),
}


@lru_cache(maxsize=16)  # a client checks its run's configuration with every message
def check_names(config: Config) -> Config:
    """Return ``config`` if everything that it names is registered.

    Otherwise :class:`ConfigError` is raised.
    """
    allowed: dict[str, Mapping[str, object]] = {
        "system": SYSTEMS,
        "dataset": DATASETS,
        "partition": PARTITIONS,
        "fedltp.public-dataset": {"": "", **DATASETS},
        "model": {"auto": "", **MODELS},
    }
    system = SYSTEMS.get(config.system)
    if system and config.dp.enabled and (reason := system.client.why_not_private(config)):
        raise ConfigError(reason)
    if system and config.robust != "none" and not system.strategy.averages:
        raise ConfigError(
            f"robust is {config.robust!r}, allowed with system {config.system!r}: none; its server averages no models"
        )
    if system and system.data == "text":
        if config.dataset not in TEXTS:
            texts = ", ".join(TEXTS)
            raise ConfigError(f"dataset is {config.dataset!r}, allowed with system {config.system!r}: {texts}")
        return config  # its model is a folder or a hub name, looked up when it is opened
    values = config.to_dict()
    for key, names in allowed.items():
        value = values[key]
        if value not in names:
            raise ConfigError(f"{key} is {value!r}, allowed: {', '.join(names)}")
    if config.dp.enabled:
        _check_private(config)
    return config


def _check_private(config: Config) -> None:
    """Raise :class:`ConfigError` for settings that no system can be private with."""
    if config.augmentation != "none":
        raise ConfigError(
            f"augmentation is {config.augmentation!r}, allowed with dp.enabled: 'none'; a batch draws its crops in "
            "turn, so one example more changes those of others, which clipping does not bound"
        )
    if config.dp.accuracies != "none" and config.test_split != "holdout":
        raise ConfigError(
            f"test-split is {config.test_split!r}, allowed with dp.enabled: 'holdout' (with dp.accuracies 'none' "
            "every split); the labels that a client trains on decide what it is tested on, so an accuracy tells them"
        )
    name = chosen_name(config.model, config.dataset)
    layers = architecture(name, (3, 64, 64), 2).modules()  # the size of the images does not matter here
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers):
        raise ConfigError(
            f"model is {name!r}, allowed with dp.enabled: one without BatchNorm, which mixes the examples of a batch"
        )
