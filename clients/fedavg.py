"""FedAvg, the client half: the shared update as it is; what is validated is the received, global model."""

from __future__ import annotations

from clients.base import FederatedClient


class FedAvgClient(FederatedClient):
    """McMahan et al., AISTATS 2017, Algorithm 1, ClientUpdate."""

    validates = "received"
