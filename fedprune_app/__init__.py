"""fedprune: personalised federated pruning on Flower.

The functions for scripts and notebooks are those of :mod:`fedprune_app.api`: ``fedprune_app.run(...)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedprune_app.api import (
        ConfigError,
        LaunchError,
        Run,
        RunsFailed,
        export,
        load_model,
        load_packed,
        load_run,
        masks,
        model,
        predict,
        report,
        run,
        sweep,
    )

__version__ = "0.2.0"
__all__ = [
    "ConfigError",
    "LaunchError",
    "Run",
    "RunsFailed",
    "export",
    "load_model",
    "load_packed",
    "load_run",
    "masks",
    "model",
    "predict",
    "report",
    "run",
    "sweep",
]


def __getattr__(name: str) -> object:
    """Return a function of the API, importing torch and Flower, which takes seconds, only now."""
    if name not in __all__:
        raise AttributeError(f"module 'fedprune_app' has no attribute {name!r}")
    from fedprune_app import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
