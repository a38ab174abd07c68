"""A file error has two texts: one for those who may know the file's name, and one for others. Long lists are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def shortened(names: Sequence[str], limit: int = 12) -> str:
    """Return the first ``limit`` names as text, and how many there are beside these.

    >>> shortened(["a", "b", "c"], limit=2)
    'a, b, ... (1 more)'
    """
    suffix = f", ... ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix


class FileError(ValueError):
    """A data file cannot be used: the text names the file, and ``unnamed`` says only its ``place``.

    A file's name may tell whom the file is about. So a node's errors that go to a server do not name files. Nor do they
    name what is in a file: where ``reason`` does, ``public_reason`` replaces it.
    """

    def __init__(self, path: Path | str, place: str, reason: str, public_reason: str = "") -> None:
        super().__init__(f"'{path}' {reason}")
        self.unnamed = f"{place} {public_reason or reason}; the node's log names it"


SPECIAL = "is a pipe, a socket or a device, allowed: a file"


def check_kind(path: Path) -> None:
    """Raise ``ValueError`` for what is there and neither a file nor a folder: reading a pipe would wait for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"'{path}' {SPECIAL}")
