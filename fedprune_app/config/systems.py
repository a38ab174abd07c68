"""What systems declare beside their code; the registry and plug-ins write it, and rooms below them read it."""

from dataclasses import dataclass
from typing import Any

from fedprune_app.config.common import Table


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A plug-in's system has options in a table of its own, uses others', and reports numbers of its own."""

    options: type[Table] = Table
    uses: tuple[str, ...] = ()  # keys and tables of other systems that it reads as well
    metrics: tuple[Any, ...] = ()  # see results/system_metrics.py


SYSTEMS: dict[str, Any] = {}  # by name; the registry has the same dict, of its own type


def declared(system: object) -> Declared:
    """Return what a system declares, which is nothing where there is none of that name."""
    found: Declared = SYSTEMS.get(str(system), Declared())
    return found
