"""D-PSGD-FT: D-PSGD in which every client fine-tunes the consensus model on its own data before an evaluation.

Dis-PFL, section 4.1, after Cheng et al. 2021 (FedAvg-FT).
"""

from strategies.dpsgd import DPSGD


class DPSGDFT(DPSGD):
    """D-PSGD, judged by each client's fine-tuned model, which never leaves the client."""

    headline = "accuracy_personal_mean"
    fine_tunes = True
