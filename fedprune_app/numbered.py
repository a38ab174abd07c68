"""A run without a folder of its own gets the next number, and a link leads to the last one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LATEST = Path("runs/latest")
"""The link to the run that was started last without a folder of its own."""


def next_folder(parent: Path) -> Path:
    """Return the folder ``parent/<number>``, numbered one above the largest number there is."""
    taken = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    return parent / str(max(taken, default=0) + 1)


def point_to(link: Path, folder: Path) -> None:
    """Let ``link`` lead to ``folder``, where links can be made; whatever else has that name stays."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    if not os.path.lexists(link):
        with suppress(OSError):
            link.symlink_to(os.path.relpath(folder, link.parent.resolve()), target_is_directory=True)
