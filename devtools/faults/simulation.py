"""A schedule is run, and held to the laws that no fault may break.

* A run ends with a status, within a bound of processor time; after a full disk the error says so.
* A run takes no more than a bound of memory.
* The final models and records are those of the run with the same bad messages that was never interrupted.
* A bad message leaves everything as if its client had answered with an error, or as if the message had been good. The
  model of a run with secure sums is that of one without.
* A client that is lost between two secure sums ends a run with one line, after which it can be resumed.
* Where files were lost or damaged, the run may be refused with one line that names the file or the client. Damage never
  passes in silence.
* What a private client has released is never less than what its ledger says.
* Nothing is left over in the run's folder.
"""

from __future__ import annotations

import logging
import re
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.faults.arithmetic import Remembered
from devtools.faults.disk import Died, Disk, Snapshot, is_temporary, tell_stop, without_temporary
from devtools.faults.messages import failing_grid, faulty_grid
from devtools.faults.schedule import Cause, Later, Schedule, Stop
from devtools.faults.story import Kind, Story
from devtools.faults.texts import tiny_texts
from fedprune_app import plugins, testing
from fedprune_app.config import Scalar
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.registry import SYSTEMS
from fedprune_app.testing import FinishedRun, lasting

CLIENTS = 3
SETTINGS: Mapping[str, Scalar] = {
    **testing.QUICK,
    "cohort": 1,  # clients work one after the other, so that a schedule is the same every time
    "deadline-seconds": 5.0,
    "shard-size": 8,
    "dispfl.neighbours": 2,
    "dpsgd.neighbours": 2,
}
LIMIT_SECONDS = 120.0
"""A process of a run that takes more processor time than this does not end."""


MOST_MEMORY_BYTES = 1 << 30
"""A run adds no more than this to what the process has held, whatever comes late, twice or out of order."""


def values_of(system: str, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the values of a system's runs; ``settings`` are those that a user gives, whose plug-ins are loaded."""
    named = {**settings, "system": system}
    plugins.load(named)
    is_text = system in SYSTEMS and SYSTEMS[system].reads_text
    texts: Mapping[str, Scalar] = {"dataset": "text", "data-dir": "/texts", "model": "auto"} if is_text else {}
    return {**SETTINGS, **testing.NEEDED.get(system, {}), **texts, **named}


class Unending(BaseException):
    """A run did not end within :data:`LIMIT_SECONDS`."""


@dataclass(frozen=True)
class Violation:
    """A law was broken by a ``schedule``, the smallest that breaks it; ``lines`` tell what happened."""

    schedule: Schedule
    law: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """A schedule was run: the ``law`` that it broke, or an empty text, and the story of what happened.

    ``whole_sha256`` is the hash of the models of the run that is never interrupted, and ``sha256`` that of this run,
    which is empty where the run was refused.
    """

    law: str
    story: Story
    whole_sha256: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class _Whole:
    """The run that is never interrupted: what it left, and its disk before and after each change of a file."""

    run: FinishedRun
    snapshots: list[tuple[Snapshot, Snapshot]]
    story: Story
    broken: str = ""  # the law that bad messages alone break


class Simulation:
    """A simulation runs schedules in a ``folder`` of its own; ``settings`` are keys of the runs' configuration.

    Runs that are never interrupted are shared between schedules with the same messages. ``happened`` counts the events
    of all schedules that were checked.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Scalar] | None = None) -> None:
        self.happened: Counter[Kind] = Counter()
        self._folder = folder
        self._settings = settings or {}
        self._whole: dict[tuple[str, int], _Whole] = {}
        self._texts: dict[str, Scalar] = {}
        self._arithmetic = Remembered()

    def check(self, schedule: Schedule) -> Violation | None:
        """Run a schedule; return the law that it breaks, by the smallest schedule that does, or None."""
        told = self.told(schedule)
        self.happened.update(event.kind for event in told.story.events)
        return self._smallest(schedule, told) if told.law else None

    def _smallest(self, schedule: Schedule, told: Told) -> Violation:
        for smaller in schedule.smaller():
            if (again := self.told(smaller)).law:
                return self._smallest(smaller, again)
        return Violation(schedule, told.law, tuple(told.story.lines()))

    def told(self, schedule: Schedule) -> Told:
        """Run a schedule, and return what happened."""
        with self._arithmetic.used():
            whole = self._uninterrupted(schedule.system, schedule.messages)
            story = Story()
            attempt = _Attempt(self._place, self._values(schedule.system), schedule, whole, story)
            law = whole.broken or attempt.run()
        story.tell(Kind.LAW, f"broken: {law}" if law else "all laws hold")
        return Told(law, story, whole.run.sha256, attempt.sha256)

    @property
    def _place(self) -> Path:
        """The folder of every run: a snapshot of a folder is only good for a folder of the same name."""
        return self._folder / "run"

    def _values(self, system: str) -> dict[str, Scalar]:
        values = values_of(system, self._settings)
        is_text = system in SYSTEMS and SYSTEMS[system].reads_text
        if is_text and not self._texts:
            self._texts = tiny_texts(self._folder / "texts")
        return {**values, **self._texts, **self._settings} if is_text else values

    def _uninterrupted(self, system: str, messages: int) -> _Whole:
        key = system, messages
        if key in self._whole:
            return self._whole[key]
        for other in [each for each in self._whole if each[0] != system or each[1]]:
            shutil.rmtree(self._whole.pop(other).run.folder)
            self._arithmetic.forget()
        shutil.rmtree(self._place, ignore_errors=True)
        story = Story(process=1)
        disk = Disk(self._place, records=True, story=story)
        story.tell(Kind.PROCESS, f"starts {system}")
        values = self._values(system)
        _process(values, self._place, messages, disk)
        kept = FinishedRun(self._folder / f"whole-{system}-{messages}")
        shutil.copytree(self._place, kept.folder)
        broken = ""
        # where clients mix, the server passes updates on unread: their receivers leave bad ones out, and say so
        if messages and values.get(f"{system}.gossip") != "client":
            shutil.rmtree(self._place)
            sums = _sums(values)
            plain = {key: value for key, value in values.items() if not key.startswith("secure-sums")}
            with testing.patient_clock(), _silent():
                testing.run_with(plain, self._place, failing_grid(messages, sums), CLIENTS)
            reference = FinishedRun(self._place)
            failures = [[row["failures"] for row in run.rounds] for run in (kept, reference)]
            # a client that is lost after its addend came has failed, and yet is in the sum
            same = failures[0] == failures[1] or sums > 0
            if kept.sha256 != reference.sha256 or not same:
                broken = "a bad message counts as no answer, or as a good one"
        self._whole[key] = _Whole(kept, disk.snapshots, story, broken)
        return self._whole[key]


def _sums(values: Mapping[str, Scalar]) -> int:
    """Return how many secure sums a round has."""
    return (1 + ("min-holders" in values)) * bool(values.get("secure-sums"))


def _process(
    values: Mapping[str, Scalar], folder: Path, messages: int, disk: Disk, ended: set[tuple[int, int]] | None = None
) -> None:
    """Run the federation in a process that may die, of which the disk and the story take note."""
    with disk.watched(), testing.patient_clock() as clock, _silent(), _limited():

        def jump(seconds: float) -> None:
            clock.seconds += seconds

        testing.run_with(values, folder, faulty_grid(messages, disk.story, jump, _sums(values), ended), CLIENTS)


@contextmanager
def _silent() -> Iterator[None]:
    """Log nothing until the block ends: the errors of a schedule are told in its story."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _limited() -> Iterator[None]:
    """Raise :class:`Unending` when the block has taken too much processor time; a busy machine makes no difference."""

    def end(*_: Any) -> None:
        raise Unending

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Attempt:
    """An attempt runs one schedule to its end."""

    def __init__(
        self, folder: Path, values: Mapping[str, Scalar], schedule: Schedule, whole: _Whole, story: Story
    ) -> None:
        self._folder = folder
        self._values = values
        self._schedule = schedule
        self._whole = whole
        self._story = story
        self._written: set[Path] = set()
        self._has_lost_files = self._accepts_loss = False
        self._ended: set[tuple[int, int]] = set()  # rounds and clients that were lost between two sums
        self.sha256 = ""
        self._held_before = _most_held_bytes()

    def run(self) -> str:
        """Return the law that was broken, or an empty text."""
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            for stop in self._schedule.stops:
                if self._stopped(stop):
                    self._spoil(stop)
                else:
                    return self._difference()
            return self._difference() if self._completes() or self._completes() else _REFUSED
        except _Broken as broken:
            return str(broken)
        except _GivenUp:
            return ""

    def _stopped(self, stop: Stop) -> bool:
        """Let a process run until a stop; return False if the run completes and nothing more happens to its files."""
        self._story.process += 1
        if self._story.process == 1 and stop.cause != Cause.DISK_FULL:
            self._stop_first(stop)
            return True
        disk = Disk(self._folder, int(stop.place * len(self._whole.snapshots)), stop.after, stop.cause)
        return not self._lives(disk) or stop.later != Later.NOTHING

    def _stop_first(self, stop: Stop) -> None:
        """Leave the folder as a stop of the first process leaves it: until then that process is the whole run's."""
        before, after = self._whole.snapshots[int(stop.place * len(self._whole.snapshots))]
        snapshot = after if stop.after else before
        self._story.events += self._whole.story.events[: snapshot.events]
        tell_stop(self._story, stop.after, stop.cause)
        snapshot.restore(self._folder, stop.cause)

    def _completes(self) -> bool:
        """Run a process that nothing stops; return whether the run completes."""
        self._story.process += 1
        return self._lives(Disk(self._folder))

    def _lives(self, disk: Disk) -> bool:
        """Run a process on a disk, and others where clients are lost between two sums; return whether it completes."""
        disk.story, num_ended = self._story, len(self._ended)
        more: dict[str, Scalar] = {}
        if (self._folder / "run.json").is_file():
            more = {"resume-from": str(self._folder), "accept-loss": self._accepts_loss}
        self._story.tell(Kind.PROCESS, f"{'resumes' if more else 'starts'} {self._schedule.system}")
        try:
            _process({**self._values, **more}, self._folder, self._schedule.messages, disk, self._ended)
        except Died:
            self._written.clear()
            return False
        except Unending:
            raise _Broken(f"a run ends: this one took over {LIMIT_SECONDS:g} s of processor time") from None
        except Exception as error:  # whatever the code under test raises
            if len(self._ended) > num_ended and _BETWEEN_SUMS.fullmatch(str(error)):
                self._story.tell(Kind.PROCESS, f"ends with {type(error).__name__}: {error}")
                self._story.process += 1
                return self._lives(Disk(self._folder, disk.stops_at, disk.after, disk.cause))
            self._refused(error, disk)
            return False
        self._written |= disk.folders
        self._story.tell(Kind.PROCESS, f"completes after {disk.count} changes of files")
        return True

    def _refused(self, error: Exception, disk: Disk) -> None:
        """Take note of the error that ended a process; raise an error if that may not be."""
        lines = str(error).strip().splitlines() or [""]
        said = lines[-1].replace(f"{self._folder}/", "")
        self._story.tell(Kind.PROCESS, f"ends with {type(error).__name__}: {said}")
        if disk.is_full:
            if "No space left" not in str(error):
                raise _Broken("an error on a full disk says so")
            return
        names = str(self._folder) in lines[0] or re.search(r"client \d", lines[0])
        if not (self._has_lost_files and isinstance(error, (ValueError, TooFewReplies)) and len(lines) == 1 and names):
            raise _Broken(_REFUSED)
        if self._accepts_loss:
            self._story.tell(Kind.PROCESS, "is given up")
            raise _GivenUp
        self._accepts_loss = True

    def _spoil(self, stop: Stop) -> None:
        """Let happen to the files what a stop says."""
        if stop.later == Later.STALE:
            checkpoints = sorted((self._folder / "checkpoints").glob("round-*.safetensors"))
            if len(checkpoints) > 1:
                checkpoints[-1].unlink()
                # clients that keep one version of their state have none that goes with an older checkpoint
                self._has_lost_files |= SYSTEMS[self._schedule.system].client.versions_kept < 2
                self._story.tell(Kind.STALE, f"{checkpoints[-1].name}, the newest checkpoint, is gone")
        elif stop.later == Later.FORGOTTEN:
            client = int(stop.which * CLIENTS)
            for path in (self._folder / "clients" / f"{client:05d}").glob("round-*"):
                path.unlink()
                self._has_lost_files = True
            self._story.tell(Kind.FORGOTTEN, "has lost its states", client=client)
        elif stop.later == Later.DAMAGED:
            self._damage(stop.which)

    def _damage(self, which: float) -> None:
        found = sorted(path for path in self._folder.rglob("*") if path.is_file() and path.stat().st_size)
        if not found:
            return
        number, share = divmod(which * len(found), 1.0)
        path = found[int(number)]
        kind, place = divmod(share * len(_DAMAGES), 1.0)
        how, change = _DAMAGES[int(kind)]
        content = path.read_bytes()
        path.write_bytes(change(content, int(place * len(content))))
        self._story.tell(Kind.DAMAGED, f"{without_temporary(path.relative_to(self._folder))} is damaged: {how}")
        self._has_lost_files = True

    def _difference(self) -> str:
        """Return the law that the finished run breaks, or an empty text."""
        found, whole = FinishedRun(self._folder), self._whole.run
        if _most_held_bytes() - self._held_before > MOST_MEMORY_BYTES:
            return f"a run takes no more than {MOST_MEMORY_BYTES >> 30} GiB of memory"
        if found.info["status"] != "completed":
            return f"a run completes: its status is {found.info['status']!r}"
        self.sha256 = found.sha256
        if self._has_lost_files and found.info.get("losses"):
            return ""
        if self._has_lost_files and (_failures(found) > _failures(whole) or found.info["clients_left_out"]):
            return ""  # a client with a damaged file answers with an error, which is recorded
        if found.sha256 != whole.sha256:
            return "the final models are those of the run without stops"
        for name in ("rounds", "clients"):
            if lasting(getattr(found, name)) != lasting(getattr(whole, name)):
                return f"{name}.jsonl is that of the run without stops"
        for key, value in whole.rounds[-1].items():
            if "epsilon" in key and isinstance(value, float) and not found.rounds[-1][key] >= value:
                return f"a ledger is never below what was released: {key} is {found.rounds[-1][key]}, not {value}"
        # what a dead writer left goes when somebody writes in the same folder afterwards
        left = [path.name for folder in self._written if folder.is_dir() for path in folder.iterdir()]
        left = [name for name in left if is_temporary(name)]
        return f"nothing is left over: {left[0]} is" if left else ""


def _most_held_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _failures(run: FinishedRun) -> int:
    return sum(row["failures"] + (row["evaluation_failures"] or 0) for row in run.rounds)


class _Broken(Exception):
    """A law was broken; the message says which one."""


class _GivenUp(Exception):
    """A run is refused for good, as it may be."""


_BETWEEN_SUMS = re.compile(
    r"the values that enough clients send: \d clients are left after stage '(keys|shares|input)' of the secure sum, "
    r"allowed: \d or more; first failure: client \d: .*"
)
_REFUSED = "a run that was interrupted can be resumed"


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


_DAMAGES: tuple[tuple[str, Callable[[bytes, int], bytes]], ...] = (
    ("one bit is another", _flipped),
    ("its end is missing", lambda content, place: content[:place]),
    (
        "one part of it is zeros",
        lambda content, place: content[:place] + bytes(len(content[place : place + 512])) + content[place + 512 :],
    ),
    ("it is empty", lambda content, place: b""),
)
