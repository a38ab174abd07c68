"""Declarations of systems besides their code; the registry and plug-ins write them, and packages below read them."""

from dataclasses import dataclass
from typing import Any

from fedprune_app.config.common import Table


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A system's own table of options, the options of other systems that it reads, and its own metrics."""

    options: type[Table] = Table
    uses: tuple[str, ...] = ()  # keys and tables of other systems
    metrics: tuple[Any, ...] = ()  # see results/system_metrics.py


SYSTEMS: dict[str, Any] = {}  # by name; the registry has the same dict with a narrower type


def declared(system: object) -> Declared:
    """Return a system's declaration; an empty one for an unknown name."""
    found: Declared = SYSTEMS.get(str(system), Declared())
    return found
