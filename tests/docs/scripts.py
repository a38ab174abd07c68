"""The scripts that write tables of pages, and the benchmarks, as modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tests.docs.blocks import ROOT

FOLDERS = [str(ROOT / "docs" / "scripts"), str(ROOT / "benchmarks")]


def script(name: str) -> ModuleType:
    """A script, which finds its neighbours as it does when it is run."""
    sys.path.extend(FOLDERS)
    try:
        return importlib.import_module(name)
    finally:
        for folder in FOLDERS:
            sys.path.remove(folder)
