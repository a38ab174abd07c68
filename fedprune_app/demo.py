"""What ``fedprune demo`` runs: small enough for two cores and three minutes, real in every part."""

from __future__ import annotations

from fedprune_app.config import Scalar

DEMO_CLIENTS = 20
DEMO_SYSTEMS = ("standalone", "fedavg", "subfedavg", "dispfl")


def demo_settings(system: str) -> dict[str, Scalar]:
    """Settings of one system's demo run: the embedded digits, two label shards per client."""
    return {"system": system, "num-server-rounds": 20, "fraction-train": 0.5, "evaluate-every": 2}
