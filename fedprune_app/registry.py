"""The registry of systems, and by reference of datasets, partitions and models."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from clients import __name__ as CLIENTS  # in a wheel these packages are below fedprune_app
from fedprune_app.config import systems
from fedprune_app.config.systems import Declared
from strategies import __name__ as STRATEGIES

if TYPE_CHECKING:
    from clients.node import Node
    from strategies.base import FederatedStrategy


@dataclass(frozen=True)
class System(Declared):
    """A federated system: its server half, its client half, and one line for ``fedprune list``.

    The halves are named as ``module:class`` below ``strategies`` and ``clients``. They are imported on first use,
    because that takes seconds and a process needs one system at most. A plug-in passes the classes themselves.
    """

    server_half: str | type[FederatedStrategy]
    client_half: str | type[Node]
    summary: str
    reads_text: bool = False  # and prunes a language model; others train networks on images
    is_private: bool = False  # in its paper, so that a run without dp.enabled has a warning

    @property
    def strategy(self) -> type[FederatedStrategy]:
        if not isinstance(self.server_half, str):
            return self.server_half
        cls: type[FederatedStrategy] = resolve_name(f"{STRATEGIES}.{self.server_half}")
        return cls

    @property
    def client(self) -> type[Node]:
        if not isinstance(self.client_half, str):
            return self.client_half
        cls: type[Node] = resolve_name(f"{CLIENTS}.{self.client_half}")
        return cls


SYSTEMS: dict[str, System] = systems.SYSTEMS
SYSTEMS |= {
    "subfedavg": System(
        "subfedavg:SubFedAvg", "subfedavg:SubFedAvgClient", "Sub-FedAvg (Un): each client prunes its own sub-network"
    ),
    "subfedavg-hy": System(
        "subfedavg_hy:SubFedAvgHy",
        "subfedavg_hy:SubFedAvgHyClient",
        "Sub-FedAvg (Hy): channels are removed, linear layers pruned",
    ),
    "dispfl": System(
        "dispfl:DisPFL", "dispfl:DisPFLClient", "Dis-PFL: sparse personal models gossip with neighbours, masks evolve"
    ),
    "fedp3": System(
        "fedp3:FedP3",
        "fedp3:FedP3Client",
        "FedP3: each client trains and sends its own layers, and receives the other layers pruned",
    ),
    "ldp-fedp3": System(
        "ldp_fedp3:LDPFedP3",
        "ldp_fedp3:LDPFedP3Client",
        "LDP-FedP3: private local steps, each client sends its share of a random permutation",
    ),
    "fedltp": System(
        "fedltp:FedLTP",
        "fedltp:FedLTPClient",
        "Fed-LTP: a ticket from public data, sparse DP-SGD, noised validation of every round",
        is_private=True,
    ),
    "fedspallm": System(
        "fedspallm:FedSpaLLM",
        "fedspallm:FedSpaLLMClient",
        "FedSpaLLM: clients prune a language model's layers with private text",
        reads_text=True,
    ),
    "fedavg": System(
        "fedavg:FedAvg", "fedavg:FedAvgClient", "FedAvg: one dense global model, averaged by sample counts"
    ),
    "dpfed": System(
        "dpfed:DPFed",
        "fedavg:FedAvgClient",
        "DP-Fed: FedAvg with DP-SGD, and a plain mean of the updates",
        is_private=True,
    ),
    "fedspa": System(
        "fedspa:FedSPA",
        "fedspa:FedSPAClient",
        "Fed-SPA: DP-SGD on random coordinates, an accelerated server",
        is_private=True,
    ),
    "fedavg-ft": System(
        "fedavg_ft:FedAvgFT", "fedavg_ft:FedAvgFTClient", "FedAvg-FT: FedAvg's model, fine-tuned by every client"
    ),
    "dpsgd": System("dpsgd:DPSGD", "dpsgd:DPSGDClient", "D-PSGD: decentralised FedAvg, judged by the consensus model"),
    "dpsgd-ft": System(
        "dpsgd_ft:DPSGDFT", "dpsgd_ft:DPSGDFTClient", "D-PSGD-FT: D-PSGD's consensus model, fine-tuned by every client"
    ),
    "ditto": System(
        "ditto:Ditto",
        "ditto:DittoClient",
        "Ditto: FedAvg, and for each client a personal model that is pulled towards the global model",
    ),
    "fedfomo": System(
        "fedfomo:FedFomo", "fedfomo:FedFomoClient", "FedFomo: each client moves towards those models that help it"
    ),
    "fedprox": System(
        "fedprox:FedProx", "fedprox:FedProxClient", "FedProx: FedAvg with a proximal term in the local loss"
    ),
    "fedcr": System(
        "fedcr:FedCR",
        "fedcr:FedCRClient",
        "FedCR: a variational encoder for all, drawn to a Gaussian per class; own heads",
    ),
    "fjord": System("fjord:FjORD", "fjord:FjORDClient", "FjORD: ordered dropout, nested sub-networks of leading units"),
    "lg-fedavg": System(
        "lg_fedavg:LGFedAvg", "lg_fedavg:LGFedAvgClient", "LG-FedAvg: lower layers stay local, upper ones are averaged"
    ),
    "mtl": System(
        "mtl:MTL", "mtl:MTLClient", "MTL: own models, and a learnt covariance of clients between them (a surrogate)"
    ),
    "standalone": System(
        "standalone:Standalone", "standalone:StandaloneClient", "Standalone (Local): every client trains alone"
    ),
}
