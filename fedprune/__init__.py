"""fedprune is personalised federated pruning on Flower, for scripts and notebooks.

Its functions are those of :mod:`fedprune_app.api`. Torch and Flower are imported when one of them is first called.
Type checkers and editors read ``__init__.pyi`` instead, which completes the settings of ``run``.
"""

from __future__ import annotations

import fedprune_app
from fedprune_app import __version__ as __version__


def __getattr__(name: str) -> object:
    return getattr(fedprune_app, name)


def __dir__() -> list[str]:
    return dir(fedprune_app)
