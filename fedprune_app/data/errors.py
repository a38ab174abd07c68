"""What is wrong with a file, for those who may know its name and for others."""

from __future__ import annotations

from pathlib import Path


class FileError(ValueError):
    """A data file that cannot be used: its text names the file, ``unnamed`` says only ``where`` it is.

    What files are called may tell whom they are about, so a node's errors that go to a server do not say it.
    """

    def __init__(self, path: Path | str, where: str, why: str) -> None:
        super().__init__(f"'{path}' {why}")
        self.unnamed = f"{where} {why}; the node's log names it"
