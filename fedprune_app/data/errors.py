"""A file error has two texts: one for those who may know the file's name, and one for others."""

from __future__ import annotations

from pathlib import Path


class FileError(ValueError):
    """A data file cannot be used: the text names the file, and ``unnamed`` says only ``where`` the file is.

    A file's name may tell whom the file is about. So a node's errors that go to a server do not name files. Nor do they
    name what is in a file: where ``why`` does, ``told`` takes its place.
    """

    def __init__(self, path: Path | str, where: str, why: str, told: str = "") -> None:
        super().__init__(f"'{path}' {why}")
        self.unnamed = f"{where} {told or why}; the node's log names it"
