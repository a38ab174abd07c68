"""A file error has two texts: one for those who may know what is in the file, and one for others."""

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

    A file's name may tell whom the file is about, and a reason what is in it. So a node's errors that go to a server
    have neither.
    """

    def __init__(self, path: Path | str, place: str, reason: str) -> None:
        super().__init__(f"'{path}' {reason}")
        self.unnamed = f"{place} cannot be used; the node's log says which one and why"
