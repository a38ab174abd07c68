"""D-PSGD-FT: D-PSGD, and before it is evaluated every client fine-tunes the consensus model on its own data.

Dis-PFL, section 4.1, after Cheng et al. 2021 (FedAvg-FT).
"""

from strategies.dpsgd import DPSGD


class DPSGDFT(DPSGD):
    """D-PSGD-FT is judged by each client's fine-tuned model, which nobody else ever sees."""

    headline = "accuracy_personal_mean"
    fine_tunes = True
