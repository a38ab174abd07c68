"""FedAvg-FT: FedAvg, and before it is evaluated every client fine-tunes the global model on its own data.

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021, as Dis-PFL compares with it.
"""

from strategies.fedavg import FedAvg


class FedAvgFT(FedAvg):
    """FedAvg-FT is judged by each client's fine-tuned model, which nobody else ever sees."""

    headline = "accuracy_personal_mean"
    fine_tunes = True
