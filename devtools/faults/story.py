"""A story is what happened in a schedule, event by event: people read a failing schedule as a time line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_LAST_CHANGES = 4


class Kind(StrEnum):
    """The kinds of events."""

    PROCESS = "process"  # a process starts, resumes or ends
    ASKED = "asked"  # a client is asked to train
    REPLIED = "replied"
    MESSAGE = "message"  # a message goes wrong
    DISK = "disk"  # a file changes
    STOP = "stop"  # a process dies
    FULL = "full"  # the disk of a process is full
    DAMAGED = "damaged"  # a file, while no process runs
    FORGOTTEN = "forgotten"  # a client's states are gone, while no process runs
    STALE = "stale"  # the newest checkpoint is gone, while no process runs
    LAW = "law"


STOPS = frozenset({Kind.STOP, Kind.FULL})
BETWEEN = frozenset({Kind.DAMAGED, Kind.FORGOTTEN, Kind.STALE})


@dataclass(frozen=True)
class Event:
    """An event has a text, and belongs to a process of the run, a round and a client where there is one (else -1)."""

    kind: Kind
    text: str
    process: int = 0
    round: int = -1
    client: int = -1


@dataclass
class Story:
    """A story grows with each event; ``process`` counts how often the run was started."""

    events: list[Event] = field(default_factory=list)
    process: int = 0

    def tell(self, kind: Kind, text: str, round: int = -1, client: int = -1) -> None:
        """Add an event."""
        self.events.append(Event(kind, text, self.process, round, client))

    def lines(self) -> list[str]:
        """Return the time line: all that is out of the ordinary, and the last changes of files before a stop."""
        return [_line(event) for event in _told(self.events)]


def _told(events: Sequence[Event]) -> Iterator[Event]:
    for number, event in enumerate(events):
        if event.kind in STOPS:
            before = [each for each in events[:number] if each.process == event.process and each.kind == Kind.DISK]
            yield from before[-_LAST_CHANGES:]
        if event.kind not in (Kind.ASKED, Kind.REPLIED, Kind.DISK):
            yield event


def _line(event: Event) -> str:
    where = f"round {event.round}: " if event.round >= 0 else ""
    who = f"client {event.client}: " if event.client >= 0 else ""
    indent = "" if event.kind in {Kind.PROCESS, Kind.LAW, *BETWEEN} else "  "
    return f"{indent}{where}{who}{event.text}"
