"""A lock tells a reader of a run folder whether a process is at work in it."""

import fcntl
from pathlib import Path

LOCK = ".lock"
"""The file of a run folder that the process at work holds (``engine.store.exclusive``)."""


def is_held(folder: Path) -> bool:
    """Return whether a process has the folder's lock; a folder of which that cannot be found out counts as held.

    Nothing is made or written, so a folder that may only be read will do. A copy of a folder is held by nobody. On a
    file system without locks, or where the lock may not be opened, nobody can tell: the run then counts as held.
    """
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # only for a moment; `exclusive` waits so long
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
