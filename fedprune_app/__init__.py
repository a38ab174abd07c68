"""fedprune is personalised federated pruning on Flower."""

from __future__ import annotations

from fedprune_app.core.torchvision_shim import prepare_when_imported

__version__ = "0.1.0"
prepare_when_imported()
