"""All writing of files, so that a crash, a full disk or another user does no harm.

Content is first written under a temporary name. The name is random and new, follows no link, and its file has the final
mode from the start. The temporary file is locked while its writer lives. So the next writer in the same folder can
detect and remove the leftovers of a killed writer.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

_TEMPORARY = re.compile(r"\.fedprune-(?:[0-9a-f]{8}){1,2}\.tmp")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SYNCED_AT_ONCE = 16
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # from file systems that cannot sync a folder
_user_log = logging.getLogger("fedprune")  # its warnings reach the terminal, unlike Flower's
_QUIETLY_SECONDS = 1.0


def as_path(name: str, value: object) -> Path:
    """Return ``value``, an argument called ``name`` in Python, as a path; ``~`` is the home folder.

    ``ValueError`` if it is not a path.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):  # an empty one would be the current folder
        raise ValueError(f"{name} is {value!r}, allowed: a path")
    return Path(value).expanduser()


@contextmanager
def locked(path: Path | str, activity: str, patience_seconds: float = -1) -> Iterator[None]:
    """Hold a lock file within the context; ``activity`` describes, for the log, the work under the lock.

    A process that has to wait logs this. If it still waits after ``patience_seconds`` (-1: never), ``filelock.Timeout``
    is raised.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_QUIETLY_SECONDS)
    except Timeout:
        log_waiting(activity)
        lock.acquire(timeout=patience_seconds)
    try:
        yield
    finally:
        lock.release()


def log_waiting(activity: str) -> None:
    """Log that this process waits for another one, which does ``activity``."""
    _user_log.warning("waiting for another process, which %s", activity)


class SharedFolderError(ValueError):
    """Raised for a secret in a folder where other users could read, replace or redirect it; the message is one line."""


def replace_file(path: Path, content: bytes, mode: int = 0o666, *, durable: bool = True, private: bool = False) -> None:
    """Write a file atomically: a reader, or a crash, finds the old file or the new one, never a part.

    Missing folders are created. ``mode`` is the new file's, less the umask; it holds from the first byte on. A file for
    its owner alone is a secret: :class:`SharedFolderError` is raised if its folder belongs to others or others may
    write to it. A ``private`` file, and each folder created for it, is for its owner alone, in any folder. A file that
    is not ``durable`` is written faster, and may be lost at a power cut.
    """
    with replacing(path, mode, durable=durable, private=private) as file:
        file.write(content)


def kept_secret(path: Path) -> str:
    """Return the secret of 64 hexadecimal digits in a file, which is created first, for its owner alone.

    Raises ``ValueError`` for other content.
    """
    if not path.exists():
        make_private_folder(path.parent)
        with locked(f"{path}.lock", "makes a secret"):
            if not path.exists():
                replace_file(path, secrets.token_hex(32).encode(), 0o600)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"'{path}' is damaged, allowed: a secret of 64 hexadecimal digits")
    return text


def make_private_folder(folder: Path) -> None:
    """Create a folder, and missing ones above it, for this user alone; existing folders are not changed."""
    for missing in [path for path in (folder, *folder.parents) if not path.exists()][::-1]:
        missing.mkdir(0o700, exist_ok=True)


def make_durable(paths: Iterable[Path]) -> None:
    """Sync files that were not written as ``durable``; missing ones are skipped.

    Many are synced at a time, because a file system writes its journal once for all that wait for it.
    """

    def sync(path: Path) -> None:
        with suppress(FileNotFoundError), _naming(path):
            for target, flags in ((path, os.O_NOFOLLOW), (path.parent, os.O_DIRECTORY)):
                with _open_descriptor(target, flags) as descriptor:
                    _sync(descriptor)

    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool:
        list(pool.map(sync, paths))


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, durable: bool = True, private: bool = False) -> Iterator[BinaryIO]:
    """Open a file to write piece by piece; it is in place when the context ends.

    The arguments and errors are those of :func:`replace_file`.
    """
    is_secret = not mode & _OTHERS
    if private:
        make_private_folder(path.parent)
    path.parent.mkdir(0o755 if is_secret else 0o777, parents=True, exist_ok=True)
    with _naming(path), _open_descriptor(path.parent) as folder:
        if is_secret:
            _require_own(path, os.fstat(folder))
        _sweep(folder)
        name, descriptor = _new_file(folder, 0o600 if private else mode)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(descriptor)
                os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            raise
        if durable:
            _sync(folder)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Create a new folder to fill, which replaces ``path`` and its content when the context ends.

    If the context raises an error, the new folder is removed and ``path`` is kept. A kill loses neither the old folder
    nor the new one: between two renames it leaves the old folder next to ``path``, under a name that ends in ``.old``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), _open_descriptor(path.parent) as folder, _new_folder(path.parent, folder, 0o777) as new:
        yield new
        for inner, _, names in os.walk(new):
            for name in (*names, "."):
                with _open_descriptor(Path(inner) / name, 0) as descriptor:
                    _sync(descriptor)
        old = f".{path.name}.{secrets.token_hex(8)}.old"  # no sweep removes this name
        with suppress(FileNotFoundError):
            os.rename(path.name, old, src_dir_fd=folder, dst_dir_fd=folder)
        os.rename(new.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(FileNotFoundError):
            os.rename(old, new.name, src_dir_fd=folder, dst_dir_fd=folder)  # what has this name is removed on exit
        _sync(folder)


@contextmanager
def scratch_folder(place: Path | None = None) -> Iterator[Path]:
    """Create a folder for this process alone, removed when the context ends.

    The folder of a killed process is removed when the next one is created. It is in ``place``, or in the system's
    folder for temporary files.
    """
    place = place or Path(tempfile.gettempdir())
    with _open_descriptor(place) as folder, _new_folder(place, folder, 0o700) as new:
        yield new


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits, reading it in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_lines(path: Path, lines: bytes, mode: int = 0o666) -> None:
    """Append lines to a file, created with ``mode``; they are on disk when this function returns.

    After a crash, or on a full disk, at most the last line is incomplete.
    """
    with _naming(path), appending(path, mode) as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def next_folder(parent: Path) -> Iterator[Path]:
    """Create the folder ``parent/<number>``, one above the largest existing number, for this process alone.

    If it is empty when the context ends, it is removed, and so is an empty ``parent``.
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


LATEST = Path("runs/latest")  # the link to the run that was started last without a folder of its own


def folder_for(out: Path | None, is_new: bool) -> AbstractContextManager[Path]:
    """Return what gives a run's folder: ``out``, or without it the next one in runs/, or the latest if it goes on."""
    return next_folder(LATEST.parent) if out is None and is_new else nullcontext(out or LATEST)


def point_to(link: Path, folder: Path) -> None:
    """Make ``link`` point to ``folder``, where links are supported; anything else of that name is kept."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    if not os.path.lexists(link):
        with suppress(OSError):
            link.symlink_to(os.path.relpath(folder, link.parent.resolve()), target_is_directory=True)


def may_write(folder: Path) -> bool:
    """Return whether this process may write to a folder, or create it with the folders above it."""
    ancestor = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    return ancestor.is_dir() and os.access(ancestor, os.W_OK | os.X_OK)


def appending(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a file for appending, and create it with ``mode`` if it is missing; links are not followed."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, mode))


# --- temporary names --------------------------------------------------------------------------------------------------


def _random_name(size: int = 8) -> str:
    return f".fedprune-{secrets.token_hex(size)}.tmp"


def _new_file(folder: int, mode: int) -> tuple[str, int]:
    while True:
        name = _random_name()
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
        if _lock(descriptor):
            return name, descriptor
        os.close(descriptor)


@contextmanager
def _new_folder(place: Path, folder: int, mode: int) -> Iterator[Path]:
    """Create a new locked folder in ``place``, which is open as ``folder``.

    When the context ends, whatever has its name is removed: the new folder, or the one that it replaced.
    """
    _sweep(folder)
    while True:
        name = _random_name(4)  # short, because paths of sockets below it have at most 107 characters
        with suppress(FileExistsError, FileNotFoundError):  # another process swept the folder before it was locked
            os.mkdir(name, mode, dir_fd=folder)
            descriptor = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            if _lock(descriptor):
                break
            os.close(descriptor)
    try:
        yield place / name
    finally:
        try:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file or folder that was just created.

    Return False if a sweep mistook it for a leftover before it was locked, and removed it.
    """
    with suppress(OSError):  # without locks on this file system nothing is swept either
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def _sweep(folder: int) -> None:
    """Remove the leftovers of this user's killed writers in an open folder: temporary names without a lock."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    for name in names:
        with suppress(OSError):  # locked by a living writer, or already removed
            _remove_leftover(folder, name)


def _remove_leftover(folder: int, name: str) -> None:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    is_folder = stat.S_ISDIR(status.st_mode)
    if status.st_uid != os.geteuid() or not (is_folder or stat.S_ISREG(status.st_mode)):
        return
    # some network file systems lock only files that are open for writing
    flags = os.O_DIRECTORY if is_folder else os.O_RDWR
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(descriptor)


# --- folders ----------------------------------------------------------------------------------------------------------


@contextmanager
def _open_descriptor(path: Path, flags: int = os.O_DIRECTORY) -> Iterator[int]:
    """Open a folder, so that it stays the same one if others rename it."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _require_own(path: Path, folder: os.stat_result) -> None:
    """Raise :class:`SharedFolderError` if another user could replace a secret by another file, or a link."""
    is_own = folder.st_uid in (os.geteuid(), 0)
    is_shared = folder.st_mode & _OTHERS_WRITE and not folder.st_mode & stat.S_ISVTX
    if is_shared or not is_own:
        raise SharedFolderError(
            f"{str(path)!r} is a secret that other users could replace there, "
            "allowed: a folder that is yours and that nobody else may write to"
        )


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make an error name the file that could not be written.

    The system's own error names a temporary file, or none for a failed write.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and (error.filename is None or _TEMPORARY.search(str(error.filename))):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
