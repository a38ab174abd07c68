"""FedAvg-FT: FedAvg in which every client fine-tunes the global model on its own data before an evaluation.

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021, as Dis-PFL compares with it.
"""

from strategies.fedavg import FedAvg


class FedAvgFT(FedAvg):
    """FedAvg, judged by each client's fine-tuned model, which never leaves the client."""

    headline = "accuracy_personal_mean"
    fine_tunes = True
