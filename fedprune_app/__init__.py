"""fedprune: personalised federated pruning on Flower."""

from __future__ import annotations

__version__ = "0.1.0"
