"""A schedule is everything that goes wrong in one run; it is drawn from a seed, and can be made smaller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from fedprune_app.core import rng

SAME_MESSAGES = 25
"""So many schedules, one after the other, have the same bad messages: they share the run that is never interrupted."""
_MOST_STOPS = 3
_LATER_SHARE = 0.3  # of the stops, with something that happens to the files before the run is resumed


class Cause(StrEnum):
    """How a process stops."""

    KILLED = "the process is killed"
    NAMES_LOST = "the power fails, and new names of files that were not synced are lost"
    CONTENTS_LOST = "the power fails, and contents of files that were not synced are lost"
    DISK_FULL = "the disk is full"


class Later(StrEnum):
    """What happens to the files of a run before it is resumed."""

    NOTHING = ""
    STALE = "the newest checkpoint is gone"
    FORGOTTEN = "a client's states are gone"
    DAMAGED = "a file is damaged"


@dataclass(frozen=True)
class Stop:
    """A process stops at a ``place``, a share in [0, 1) of the changes of files of the run that is never interrupted.

    The process stops ``after`` that change, or before. Then ``later`` happens to the files; ``which`` in [0, 1) says to
    which of them, and how.
    """

    place: float
    after: bool
    cause: Cause = Cause.KILLED
    later: Later = Later.NOTHING
    which: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """A schedule is what happens to a run of ``system``: bad messages drawn from ``messages``, and some stops.

    With ``messages`` 0 no message goes wrong.
    """

    seed: int
    system: str
    messages: int
    stops: tuple[Stop, ...]

    @classmethod
    def drawn(cls, seed: int, system: str) -> Schedule:
        """Return the schedule of a seed."""
        draw = rng.numpy_generator(seed, f"faults of {system}")
        stops = tuple(_stop(draw) for _ in range(draw.integers(1, _MOST_STOPS + 1)))
        return cls(seed, system, seed // SAME_MESSAGES, stops)

    @property
    def loses_files(self) -> bool:
        """Return whether files of the run go or are damaged: then the run may be refused when it is resumed."""
        return any(stop.later in (Later.FORGOTTEN, Later.DAMAGED) for stop in self.stops)

    def smaller(self) -> Iterator[Schedule]:
        """Yield schedules in which less goes wrong."""
        if self.messages:
            yield replace(self, messages=0)
        for number, stop in enumerate(self.stops):
            before, after = self.stops[:number], self.stops[number + 1 :]
            if len(self.stops) > 1:
                yield replace(self, stops=(*before, *after))
            if stop.later:
                yield replace(self, stops=(*before, replace(stop, later=Later.NOTHING), *after))
            if stop.cause != Cause.KILLED:
                yield replace(self, stops=(*before, replace(stop, cause=Cause.KILLED), *after))


def _stop(draw: np.random.Generator) -> Stop:
    causes, later = list(Cause), [each for each in Later if each]
    return Stop(
        place=float(draw.random()),
        after=bool(draw.integers(2)),
        cause=causes[draw.integers(len(causes))],
        later=later[draw.integers(len(later))] if draw.random() < _LATER_SHARE else Later.NOTHING,
        which=float(draw.random()),
    )
