"""Ditto: FedAvg for a global model, and for each client a personal model that is pulled towards the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
The personal half is in ``clients/ditto.py``; the server's half is FedAvg's.
"""

from strategies.fedavg import FedAvg


class Ditto(FedAvg):
    """FedAvg, judged by each client's personal model."""

    headline = "accuracy_personal_mean"
