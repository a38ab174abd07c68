"""FedAvg-FT, the client half: FedAvg's, and fine-tuning before it is evaluated."""

from clients.fedavg import FedAvgClient
from clients.finetune import FineTuned


class FedAvgFTClient(FineTuned, FedAvgClient):
    """A FedAvg-FT client answers for the global model, fine-tuned on its own data."""
