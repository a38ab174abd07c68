"""FedAvg, the client half: the shared update as it is; what is validated is the received, global model."""

from clients.base import ImageClient


class FedAvgClient(ImageClient):
    """A FedAvg client does ClientUpdate of Algorithm 1: McMahan et al., AISTATS 2017."""

    validates = "received"

    not_private = ""  # all that leaves is the trained model
