"""A schedule as a page that people understand: who was asked, what went wrong, what was on disk, and how the run ended.

The page is one HTML file with a picture in SVG. It needs no script, no server and no network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from devtools.faults.messages import SPOILS
from devtools.faults.schedule import Schedule
from devtools.faults.simulation import CLIENTS, Told
from devtools.faults.story import BETWEEN, STOPS, Event, Kind
from fedprune_app.files import replace_file
from fedprune_app.results.ownership import check_report_file
from fedprune_app.results.report import filled

_LEFT, _TOP, _COLUMN, _GAP, _LANE = 96, 64, 92, 84, 52  # pixels of the picture
_CHECKPOINT = re.compile(r"replace checkpoints/round-(\d+)\.safetensors")
_SPOILT = {str(fault) for fault in SPOILS}


@dataclass(frozen=True)
class Mark:
    """A mark stands in the picture at (``x``, ``y``); ``kind`` is its class, and ``title`` says what happened."""

    x: float
    y: float
    kind: str
    title: str
    label: str = ""


@dataclass
class Stretch:
    """A stretch of the picture is one process of the run, from ``x`` to ``end``."""

    number: int
    x: float
    end: float
    rounds: list[tuple[float, str]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def write_tour(schedule: Schedule, told: Told, out: Path, *, force: bool = False) -> Path:
    """Write the page of a schedule that was run to ``out`` in one step, and return ``out``.

    Raises ``ValueError`` for an ``out`` that exists and is no page of fedprune's, unless ``force`` says to replace it.
    """
    if not force:
        check_report_file(out)
    stretches, notes = _stretches(told.story.events)
    lanes = [(_lane(client), f"client {client}") for client in range(CLIENTS)] + [(_lane(CLIENTS), "checkpoints")]
    page = filled(
        __package__,
        "tour.html",
        schedule=schedule,
        told=told,
        stretches=stretches,
        notes=notes,
        lanes=lanes,
        left=_LEFT,
        bottom=_lane(CLIENTS) + _LANE / 2,
        width=(stretches[-1].end if stretches else _LEFT) + _GAP,
        height=_lane(CLIENTS) + _LANE,
    )
    replace_file(out, page.encode())
    return out


def _lane(number: int) -> float:
    return _TOP + _LANE * (number + 0.5)


def _stretches(events: Sequence[Event]) -> tuple[list[Stretch], list[str]]:
    """Return the processes of a story, and in words what happened between them and at their ends, by number."""
    found: list[Stretch] = []
    notes: list[str] = []
    for number in sorted({event.process for event in events if event.kind != Kind.LAW}):
        own = [event for event in events if event.process == number and event.kind != Kind.LAW]
        x = found[-1].end + _GAP if found else float(_LEFT)
        rounds = sorted({event.round for event in own if event.round >= 0})
        stretch = Stretch(number, x, x + _COLUMN * max(1, len(rounds)))
        place = {round: x + _COLUMN * (column + 0.5) for column, round in enumerate(rounds)}
        stretch.rounds = [(place[round], f"round {round}") for round in rounds]
        stretch.marks = [*_client_marks(own, place), *_checkpoint_marks(own, place, stretch)]
        offset = 0
        for event in own:
            if event.text.startswith("completes"):
                stretch.marks.append(Mark(stretch.end + 14, 30, "end", f"the run {event.text}", "✓"))
            elif event.kind in STOPS | BETWEEN or event.text.startswith(("ends with", "is given up")):
                notes.append(_note(event, own))
                kind = "stop" if event.kind in STOPS else "between" if event.kind in BETWEEN else "refused"
                label = str(len(notes))
                stretch.marks.append(Mark(stretch.end + 14 + 24 * offset, 30, kind, notes[-1], label))
                offset += 1
        found.append(stretch)
    return found, notes


def _note(event: Event, own: Sequence[Event]) -> str:
    if event.kind in STOPS:
        changes = [each.text for each in own[: own.index(event)] if each.kind == Kind.DISK]
        return f"{event.text}: {changes[-1]}" if changes else event.text
    who = f"client {event.client} " if event.client >= 0 else ""
    return f"{who}{event.text}" if event.kind in BETWEEN else f"the process {event.text}"


def _client_marks(own: Sequence[Event], place: dict[int, float]) -> list[Mark]:
    marks = []
    for asked in (event for event in own if event.kind == Kind.ASKED):
        same = [each for each in own if (each.round, each.client) == (asked.round, asked.client)]
        faults = [each.text for each in same if each.kind == Kind.MESSAGE]
        replied = any(each.kind == Kind.REPLIED for each in same)
        if faults:
            kind = "spoilt" if faults[0] in _SPOILT else "odd"
        else:
            kind = "good" if replied else "open"
        said = faults[0] if faults else "asked, and replied" if replied else "asked, and the process stopped"
        title = f"client {asked.client}, round {asked.round}: {said}"
        marks.append(Mark(place[asked.round], _lane(asked.client), kind, title))
    return marks


def _checkpoint_marks(own: Sequence[Event], place: dict[int, float], stretch: Stretch) -> list[Mark]:
    marks = []
    for event in own:
        if event.kind == Kind.DISK and (match := _CHECKPOINT.match(event.text)):
            round = int(match[1])
            x = place.get(round, stretch.x + _COLUMN / 2)
            title = f"the checkpoint of round {round} is written"
            marks.append(Mark(x + _COLUMN / 4, _lane(CLIENTS), "checkpoint", title, str(round)))
    return marks
