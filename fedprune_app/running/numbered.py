"""A run without a folder of its own gets the next number, and a link leads to the last one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LATEST = Path("runs/latest")  # the link to the run that was started last without a folder of its own


@contextmanager
def next_folder(parent: Path) -> Iterator[Path]:
    """Make the folder ``parent/<number>``, numbered one above the largest number there is, for this process alone.

    If it is empty when the block ends, it is removed again, and so is an empty ``parent``.
    """
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
        folder = parent / str(max(numbers, default=0) + 1)
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir()
            break
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()
            parent.rmdir()


def point_to(link: Path, folder: Path) -> None:
    """Let ``link`` lead to ``folder``, where links can be made; whatever else has that name stays."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    if not os.path.lexists(link):
        with suppress(OSError):
            link.symlink_to(os.path.relpath(folder, link.parent.resolve()), target_is_directory=True)
