"""D-PSGD-FT, the client half: D-PSGD's, with fine-tuning before an evaluation."""

from clients.dpsgd import DPSGDClient
from clients.fedavg_ft import FineTuned


class DPSGDFTClient(FineTuned, DPSGDClient):
    """Evaluate the consensus model, fine-tuned on the client's own data."""
