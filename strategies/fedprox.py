"""FedProx: FedAvg with a proximal term in the clients' loss.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2. The term is in ``clients/fedprox.py``; the server's half is FedAvg's.
"""

from strategies.fedavg import FedAvg


class FedProx(FedAvg):
    """A baseline of Sub-FedAvg's Tables 1 and 2."""
