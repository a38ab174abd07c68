"""A disk that counts the changes of files, lets the process stop at one of them, and knows what would be lost then."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from devtools.faults.schedule import Cause
from devtools.faults.story import Kind, Story
from fedprune_app import files
from fedprune_app.engine import background
from fedprune_app.federation import update_store
from strategies import gossip

_unlink = os.unlink  # the watched one lets the dead remove nothing


def is_temporary(name: str) -> bool:
    """Return whether a file of this name is one that a writer has not put in its place yet."""
    return files._TEMPORARY.fullmatch(name) is not None


def without_temporary(path: Path) -> str:
    """Return a path in words, which are the same in every run: a temporary name is drawn."""
    return files._TEMPORARY.sub("(temporary)", str(path))


class Died(BaseException):
    """The simulated process is dead: no code of it may go on, nor write anything."""


@dataclass(frozen=True)
class _Undo:
    """A change of a folder is not on disk before the folder is synced."""

    path: Path
    before: bytes | None


@dataclass(frozen=True)
class Snapshot:
    """A snapshot is a folder at one moment, with what was not synced; all paths are absolute.

    ``synced`` has by file how many bytes are on disk for certain, if any are. Files in ``unsynced`` took their place
    before they were synced. ``events`` is how many events the story had by then.
    """

    files: Mapping[Path, bytes]
    folders: frozenset[Path]
    undo: tuple[_Undo, ...]
    synced: Mapping[Path, int]
    unsynced: frozenset[Path]
    events: int = 0

    def after(self, cause: Cause) -> dict[Path, bytes]:
        """Return the files as the next process finds them."""
        found = dict(self.files)
        if cause == Cause.NAMES_LOST:
            for each in reversed(self.undo):
                if each.before is None:
                    found.pop(each.path, None)
                elif each.path.parent in self.folders:
                    found[each.path] = each.before
        if cause == Cause.CONTENTS_LOST:
            for path, content in found.items():
                size = self.synced.get(path, 0)
                if path in self.unsynced:
                    found[path] = b""
                elif len(content) > size:  # of lines that were added, half is there
                    found[path] = content[: size + (len(content) - size) // 2]
        return found

    def restore(self, root: Path, cause: Cause) -> None:
        """Make the folder ``root`` what the next process finds."""
        shutil.rmtree(root, ignore_errors=True)
        for folder in sorted(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
        for path, content in self.after(cause).items():
            path.write_bytes(content)


@dataclass
class Disk:
    """The disk below ``root`` counts changes of files, and lets the process stop at change number ``stops_at``.

    A disk that ``records`` takes a snapshot before and after each change instead.
    """

    root: Path
    stops_at: int | None = None
    after: bool = False
    cause: Cause = Cause.KILLED
    records: bool = False
    story: Story = field(default_factory=Story)
    count: int = 0
    is_dead: bool = False
    is_full: bool = False
    folders: set[Path] = field(default_factory=set)  # in which a file was changed
    snapshots: list[tuple[Snapshot, Snapshot]] = field(default_factory=list)
    _undo: list[_Undo] = field(default_factory=list)
    _synced: dict[Path, int] = field(default_factory=dict)
    _unsynced: set[Path] = field(default_factory=set)
    _read: dict[Path, tuple[tuple[int, ...], bytes]] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let all changes below the root go through this disk until the block ends.

        What is below the root before has survived, and is on disk.
        """
        self._synced = {path: path.stat().st_size for path in self.root.rglob("*") if path.is_file()}
        with ExitStack() as stack:
            for name in ("replace", "rename", "unlink", "fsync"):
                real = getattr(os, name)
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, real)))
            stack.enter_context(mock.patch.object(os, "open", self._opening(os.open)))
            # one thread at a time, so that the same change has the same number every time
            for module in (files, background, update_store, gossip):
                stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", _OneByOne))
            yield

    def snapshot(self) -> Snapshot:
        """Return the folder as it is, with what was not synced."""
        found: dict[Path, bytes] = {}
        folders = set()
        for place, _, names in os.walk(self.root):
            folders.add(Path(place))
            for name in names:
                path = Path(place, name)
                about = path.stat()
                key = about.st_ino, about.st_mtime_ns, about.st_size
                known = self._read.get(path)
                if known is None or known[0] != key:
                    self._read[path] = known = key, path.read_bytes()
                found[path] = known[1]
        undo, unsynced = tuple(self._undo), frozenset(self._unsynced)
        return Snapshot(found, frozenset(folders), undo, dict(self._synced), unsynced, len(self.story.events))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **more: Any) -> Any:
            path = _path_of(name, arguments, more)
            if path is None or not path.is_relative_to(self.root):
                return real(*arguments, **more)
            if self.is_dead:
                raise Died
            number, self.count = self.count, self.count + 1
            self.folders.add(path.parent)
            self.story.tell(Kind.DISK, f"{name} {without_temporary(path.relative_to(self.root))}")
            before = self.snapshot() if self.records else None
            if number == self.stops_at and not self.after:
                self._stop()
            if self.is_full and name == "fsync":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self._note(name, path, arguments, more)
            found = real(*arguments, **more)
            self._noted(name, path)
            if before is not None:
                self.snapshots.append((before, self.snapshot()))
            if number == self.stops_at and self.after:
                self._stop()
            return found

        return change

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
            makes = flags & os.O_CREAT and isinstance(path, str | os.PathLike)
            if makes and (self.is_dead or self.is_full):
                place = _named(path, more.get("dir_fd"))
                if place.is_relative_to(self.root):
                    if self.is_dead:  # the code that handles Died may not make files that a killed process does not
                        raise Died
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real(path, flags, *arguments, **more)

        return opened

    def _note(self, name: str, path: Path, arguments: Sequence[Any], more: Mapping[str, Any]) -> None:
        if name == "fsync" or is_temporary(path.name):
            return
        self._undo.append(_Undo(path, path.read_bytes() if path.is_file() else None))
        if name in ("replace", "rename"):
            source = _named(arguments[0], more.get("src_dir_fd"))
            if self._synced.pop(source, -1) < 0:
                self._unsynced.add(path)
            else:
                self._synced[path] = source.stat().st_size
                self._unsynced.discard(path)

    def _noted(self, name: str, path: Path) -> None:
        if name != "fsync":
            return
        if path.is_dir():
            self._undo = [each for each in self._undo if each.path.parent != path]
        elif path.is_file():
            self._synced[path] = path.stat().st_size
            self._unsynced.discard(path)

    def _stop(self) -> None:
        tell_stop(self.story, self.after, self.cause)
        if self.cause == Cause.DISK_FULL:
            self.is_full = True
            return
        self.is_dead = True
        now = self.snapshot()
        for path, content in (found := now.after(self.cause)).items():
            if content != now.files.get(path):
                path.write_bytes(content)
        for path in now.files.keys() - found.keys():
            _unlink(path)
        raise Died


def tell_stop(story: Story, after: bool, cause: Cause) -> None:
    """Tell how a process stops at the change of a file that was told last."""
    kind = Kind.FULL if cause == Cause.DISK_FULL else Kind.STOP
    story.tell(kind, f"{'after' if after else 'before'} this change {cause}")


class _OneByOne:
    """A pool that does its work at once, in this thread."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> _OneByOne:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @staticmethod
    def map(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [work(item) for item in items]

    @staticmethod
    def submit(work: Callable[..., Any], *arguments: object, **more: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **more))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass


def _path_of(name: str, arguments: Sequence[Any], more: Mapping[str, Any]) -> Path | None:
    if name == "fsync":
        found = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        return None if str(found).endswith("(deleted)") else found
    if name == "unlink":
        return _named(arguments[0], more.get("dir_fd"))
    return _named(arguments[1], more.get("dst_dir_fd"))


def _named(path: Any, folder: int | None) -> Path:
    here = Path.cwd() if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"))
    return here / str(os.fspath(path))
