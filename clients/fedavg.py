"""FedAvg, the client half: the shared local update; validation is of the received, global model."""

from clients.base import ImageClient


class FedAvgClient(ImageClient):
    """ClientUpdate of Algorithm 1: McMahan et al., AISTATS 2017."""

    validates = "received"

    not_summed = ""
    not_private = ""  # only the trained model is sent
