"""Ditto: FedAvg for a global model, and beside it a personal model per client that is pulled towards the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
The personal half is in ``clients/ditto.py``; the server cannot tell it from FedAvg.
"""

from strategies.fedavg import FedAvg


class Ditto(FedAvg):
    """Ditto is judged by each client's personal model."""

    headline = "accuracy_personal_mean"
