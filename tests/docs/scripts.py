"""The scripts that write tables of pages, as modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tests.docs.blocks import ROOT

FOLDER = str(ROOT / "benchmarks")


def script(name: str) -> ModuleType:
    """A script of the benchmarks, which finds its neighbours as it does when it is run."""
    sys.path.append(FOLDER)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(FOLDER)
