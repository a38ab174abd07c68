"""Writing files so that a crash or a full disk leaves them readable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """A reader, or a crash, finds the old file or the new one, never a part; missing folders are made.

    ``mode``: who may read and write the new file, less what the umask forbids, from its first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _naming(path), open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_lines(path: Path, lines: bytes) -> None:
    """On disk when it returns; a crash, or a disk that fills up, leaves at most a last line without its end."""
    with _naming(path), path.open("ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A full disk says which file it was that did not fit: of a write that fails, the kernel's error does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
