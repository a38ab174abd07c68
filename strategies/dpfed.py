"""DP-Fed: FedAvg whose clients train with DP-SGD; the server takes the plain mean of their updates.

The baseline of Fed-LTP (Shi et al.): McMahan et al. 2017 with instance-level privacy, Abadi et al. 2016. Dense, no
acceleration, no validation. The client half is FedAvg's with ``dp.enabled``.
"""

from strategies.fedavg import FedAvg


class DPFed(FedAvg):
    """The server computes ``θ^{t+1} = θ^t + 1/K Σ_i Δ_i^t``; all clients have equal weight."""

    by_examples = False
