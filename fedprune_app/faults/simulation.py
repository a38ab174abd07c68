"""Faults are simulated by the thousand: one seed is one schedule of deaths, lost data on disk, and bad messages.

The databases that people trust are tested so. A schedule runs a real federation of a few tiny clients in this process:

* The process dies before or after any change of a file in the run's folder: a rename, a removal, an fsync. What was not
  synced may be lost then, as when the power goes. The run is resumed, and may die again.
* A message is lost on its way, or the reply is; a reply comes twice, is corrupt, or answers another message. Such a
  fault belongs to a round and a client, so a run that is resumed meets the same ones.

The laws: the final models and records are those of the run with the same messages and no death; the run ends, with a
status; nothing is left over in its folder. A seed replays its schedule, and a failing schedule is made as small as
possible, with a time line of what happened.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from flwr.app import Message, MessageType

from fedprune_app import files, testing
from fedprune_app.config import Scalar
from fedprune_app.core import rng
from fedprune_app.engine.inprocess import InProcessGrid, quiet
from fedprune_app.testing import FinishedRun, lasting

CLIENTS = 3
SETTINGS: Mapping[str, Scalar] = {
    **testing.QUICK,
    "cohort": 1,  # clients work one after the other, so that a schedule is the same every time
    "deadline-seconds": 5.0,
    "dispfl.neighbours": 2,
    "dpsgd.neighbours": 2,
}
_MOST_DEATHS = 3
_BAD_SHARE = 0.08  # of the messages
_SAME_MESSAGES = 25  # so many schedules share the run without deaths
LOSSES = ("", "names", "contents")
"""With a death goes nothing, or changes of folders that were not synced, or contents of files that were not."""
MESSAGE_FAULTS = ("lost", "reply lost", "twice", "corrupt", "for another message")


class Died(BaseException):
    """The simulated process is dead: no code of it may go on, nor write anything."""


@dataclass(frozen=True)
class Death:
    """The process dies at a ``place``, a share in [0, 1) of the file operations of the run without deaths.

    It dies ``after`` the operation, or before. It ``loses`` one of :data:`LOSSES`.
    """

    place: float
    after: bool
    loses: str


@dataclass(frozen=True)
class Schedule:
    """A schedule is what happens to a run of ``system``: bad messages drawn from ``messages``, and some deaths."""

    seed: int
    system: str
    messages: int
    deaths: tuple[Death, ...]

    @classmethod
    def drawn(cls, seed: int, system: str) -> Schedule:
        """Return the schedule of a seed."""
        draw = rng.numpy_generator(seed, f"faults of {system}")
        deaths = tuple(
            Death(float(draw.random()), bool(draw.integers(2)), LOSSES[draw.integers(len(LOSSES))])
            for _ in range(draw.integers(1, _MOST_DEATHS + 1))
        )
        return cls(seed, system, seed // _SAME_MESSAGES, deaths)


@dataclass(frozen=True)
class Violation:
    """A law was broken by a ``schedule``, the smallest that breaks it; ``lines`` tell what happened."""

    schedule: Schedule
    law: str
    lines: tuple[str, ...]


# --- messages -----------------------------------------------------------------------------------------------------


def faulty_grid(messages: int) -> type[InProcessGrid]:
    """Return a grid on which some messages of this number's draw go wrong; 0 has none."""

    class Faulty(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            for message_id in message_ids:
                if (message := self._pending.get(message_id)) is None:
                    continue
                yield from self._answers(message_id, self._fault(message))

        def _fault(self, message: Message) -> str:
            kind = message.metadata.message_type
            if not messages or kind != MessageType.TRAIN:
                return ""
            partition = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
            draw = rng.numpy_generator(messages, "bad message", partition, int(message.metadata.group_id))
            return MESSAGE_FAULTS[draw.integers(len(MESSAGE_FAULTS))] if draw.random() < _BAD_SHARE else ""

        def _answers(self, message_id: str, fault: str) -> Iterator[Message]:
            if fault == "lost":
                self._pending.pop(message_id)
                return
            (reply,) = super().pull_messages([message_id])
            if fault == "reply lost":
                return
            if fault == "corrupt":
                reply = testing.malformed(reply)
            elif fault == "for another message":
                reply.metadata.__dict__["_reply_to_message_id"] = "1"  # of the first query, long answered
            yield reply
            if fault == "twice":
                yield reply

    return Faulty


# --- the disk -----------------------------------------------------------------------------------------------------


@dataclass
class _Undo:
    """A change of a folder is not on disk before the folder is synced."""

    folder: Path
    path: Path
    before: bytes | None


@dataclass
class Disk:
    """The disk below ``root`` counts changes of files, and lets the process die at one of them."""

    root: Path
    dies_at: int | None = None
    after: bool = False
    loses: str = ""
    count: int = 0
    is_dead: bool = False
    log: list[str] = field(default_factory=list)
    folders: set[Path] = field(default_factory=set)  # in which something was written
    _undo: list[_Undo] = field(default_factory=list)
    _synced: dict[Path, int] = field(default_factory=dict)  # by file, how many bytes are on disk for certain
    _renamed_unsynced: set[Path] = field(default_factory=set)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let all changes below the root go through this disk until the block ends."""
        with ExitStack() as stack:
            for name in ("replace", "rename", "unlink", "fsync"):
                real = getattr(os, name)
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, real)))
            # one thread at a time, so that the same operation has the same number every time
            stack.enter_context(mock.patch.object(files, "ThreadPoolExecutor", _OneByOne))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **more: Any) -> Any:
            path = _path_of(name, arguments, more)
            if path is None or not path.is_relative_to(self.root):
                return real(*arguments, **more)
            if self.is_dead:
                raise Died
            number, self.count = self.count, self.count + 1
            self.folders.add(path.parent)
            self.log.append(f"{name} {files.without_temporary(path.relative_to(self.root))}")
            if number == self.dies_at and not self.after:
                self._die()
            self._note(name, path, arguments, more)
            found = real(*arguments, **more)
            self._noted(name, path)
            if number == self.dies_at:
                self._die()
            return found

        return change

    def _note(self, name: str, path: Path, arguments: Sequence[Any], more: Mapping[str, Any]) -> None:
        if name == "fsync" or files.is_temporary(path.name):
            return
        if path.is_dir():  # a folder takes the place of another, and is synced at once
            return
        before = path.read_bytes() if path.is_file() else None
        self._undo.append(_Undo(path.parent, path, before))
        if name in ("replace", "rename"):
            source = _named(arguments[0], more.get("src_dir_fd"))
            if self._synced.pop(source, -1) < 0:
                self._renamed_unsynced.add(path)
            else:
                self._synced[path] = source.stat().st_size
                self._renamed_unsynced.discard(path)

    def _noted(self, name: str, path: Path) -> None:
        if name != "fsync":
            return
        if path.is_dir():
            self._undo = [each for each in self._undo if each.folder != path]
        elif path.is_file():
            self._synced[path] = path.stat().st_size
            self._renamed_unsynced.discard(path)

    def _die(self) -> None:
        self.is_dead = True
        self.log.append("the process dies" + (f", unsynced {self.loses} are lost" if self.loses else ""))
        if self.loses:
            with mock.patch.object(self, "is_dead", False), mock.patch.object(self, "root", self.root / "nowhere"):
                self._lose()
        raise Died

    def _lose(self) -> None:
        if self.loses == "contents":
            self._lose_contents()
            return
        for each in reversed(self._undo):
            if each.before is None:
                each.path.unlink(missing_ok=True)
            elif each.folder.is_dir():
                each.path.write_bytes(each.before)

    def _lose_contents(self) -> None:
        for path in self._renamed_unsynced:
            if path.is_file():
                os.truncate(path, 0)
        for path, size in self._synced.items():
            if path.is_file() and path.stat().st_size > size:  # of lines that were added, half is there
                os.truncate(path, size + (path.stat().st_size - size) // 2)


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


# --- a schedule ---------------------------------------------------------------------------------------------------


class Simulation:
    """A simulation runs schedules in a ``folder`` of its own; runs without deaths are shared between schedules."""

    def __init__(self, folder: Path, settings: Mapping[str, Scalar] | None = None) -> None:
        self._folder = folder
        self._settings = settings or {}
        self._whole: dict[tuple[str, int], tuple[FinishedRun, int]] = {}
        self._count = 0

    def check(self, schedule: Schedule) -> Violation | None:
        """Run a schedule; return the law that it breaks, by the smallest schedule that does, or None."""
        found = self._broken(schedule)
        if found is None:
            return None
        for smaller in _smaller(schedule):
            if again := self._broken(smaller):
                return self.check(smaller) or Violation(smaller, *again)
        return Violation(schedule, *found)

    def _broken(self, schedule: Schedule) -> tuple[str, tuple[str, ...]] | None:
        whole, operations = self._without_deaths(schedule.system, schedule.messages)
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        lines: list[str] = []
        try:
            law = self._with_deaths(schedule, whole, operations, folder, lines)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return (law, tuple(lines)) if law else None

    def _with_deaths(
        self, schedule: Schedule, whole: FinishedRun, operations: int, folder: Path, lines: list[str]
    ) -> str:
        """Return the law that was broken, or an empty text."""
        grid = faulty_grid(schedule.messages)
        for death in (*schedule.deaths, None):
            disk = Disk(folder)
            if death is not None:
                disk = Disk(folder, int(death.place * operations), death.after, death.loses)
            resumes = any((folder / "checkpoints").glob("round-*.safetensors"))
            if not resumes:
                shutil.rmtree(folder, ignore_errors=True)  # nothing that could be resumed: the user starts again
            more: dict[str, Scalar] = {"resume-from": str(folder)} if resumes else {}
            lines.append(("resumes" if resumes else "starts") + f" {schedule.system}")
            try:
                with disk.watched(), testing.patient_clock(), quiet():
                    testing.run_with({**self._values(schedule.system), **more}, folder, grid, CLIENTS)
            except Died:
                lines += disk.log[-4:]
                continue
            except Exception as error:  # whatever the code under test raises
                lines += [*disk.log[-4:], f"fails: {type(error).__name__}: {error}"]
                return "a run that was interrupted can be resumed"
            lines.append(f"completes after {disk.count} operations")
            if death is None or disk.dies_at is None or disk.count <= disk.dies_at:
                break
        return self._difference(FinishedRun(folder), whole, disk.folders)

    def _difference(self, found: FinishedRun, whole: FinishedRun, written: Iterable[Path]) -> str:
        if found.info["status"] != "completed":
            return f"a run completes: its status is {found.info['status']!r}"
        if found.sha256 != whole.sha256:
            return "the final models are those of the run without deaths"
        for name in ("rounds", "clients"):
            if lasting(getattr(found, name)) != lasting(getattr(whole, name)):
                return f"{name}.jsonl is that of the run without deaths"
        for key, value in whole.rounds[-1].items():
            if "epsilon" in key and isinstance(value, float) and not found.rounds[-1][key] >= value:
                return f"a ledger is never below what was released: {key} is {found.rounds[-1][key]}, not {value}"
        # what a dead writer left goes when somebody writes in the same folder
        left = [path.name for folder in written if folder.is_dir() for path in folder.iterdir()]
        left = [name for name in left if files.is_temporary(name)]
        return f"nothing is left over: {left[0]} is" if left else ""

    def _values(self, system: str) -> dict[str, Scalar]:
        return {**SETTINGS, **testing.NEEDED.get(system, {}), **self._settings, "system": system}

    def _without_deaths(self, system: str, messages: int) -> tuple[FinishedRun, int]:
        key = system, messages
        if key not in self._whole:
            folder = self._folder / f"whole-{system}-{messages}"
            disk = Disk(folder)
            with disk.watched(), testing.patient_clock(), quiet():
                grid = faulty_grid(messages)
                testing.run_with(self._values(system), folder, grid, CLIENTS)
            self._whole[key] = FinishedRun(folder), disk.count
        return self._whole[key]


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules with less in them."""
    if schedule.messages:
        yield replace(schedule, messages=0)
    for number, death in enumerate(schedule.deaths):
        rest = schedule.deaths[:number], schedule.deaths[number + 1 :]
        if len(schedule.deaths) > 1:
            yield replace(schedule, deaths=(*rest[0], *rest[1]))
        if death.loses:
            yield replace(schedule, deaths=(*rest[0], replace(death, loses=""), *rest[1]))
