"""D-PSGD-FT, the client half: D-PSGD's, and fine-tuning before it is evaluated."""

from clients.dpsgd import DPSGDClient
from clients.fedavg_ft import FineTuned


class DPSGDFTClient(FineTuned, DPSGDClient):
    """A D-PSGD-FT client answers for the consensus model, fine-tuned on its own data."""
