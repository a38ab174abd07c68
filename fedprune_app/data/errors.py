"""A file error has two texts: one for those who may know the file's name, and one for others. Long lists are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def shortened(names: Sequence[str], most: int = 12) -> str:
    """Return the first ``most`` names as text, and how many there are beside these.

    >>> shortened(["a", "b", "c"], most=2)
    'a, b, ... (1 more)'
    """
    more = f", ... ({len(names) - most} more)" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class FileError(ValueError):
    """A data file cannot be used: the text names the file, and ``unnamed`` says only ``where`` the file is.

    A file's name may tell whom the file is about. So a node's errors that go to a server do not name files. Nor do they
    name what is in a file: where ``why`` does, ``told`` takes its place.
    """

    def __init__(self, path: Path | str, where: str, why: str, told: str = "") -> None:
        super().__init__(f"'{path}' {why}")
        self.unnamed = f"{where} {told or why}; the node's log names it"


SPECIAL = "is a pipe, a socket or a device, allowed: a file"


def check_kind(path: Path) -> None:
    """Raise ``ValueError`` for what is there and neither a file nor a folder: reading a pipe would wait for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"'{path}' {SPECIAL}")
