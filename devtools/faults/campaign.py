"""A campaign runs many schedules in several processes, and tells of each part of them as soon as that part is done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from devtools.faults.messages import SPOILS, fault_of
from devtools.faults.schedule import SAME_MESSAGES, Schedule
from devtools.faults.simulation import CLIENTS, Simulation, Violation, values_of
from devtools.faults.story import Kind
from fedprune_app import __version__, testing
from fedprune_app.config import ConfigError, Scalar
from fedprune_app.files import append_lines, scratch_folder
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare_all

_MEMORY = Path("/dev/shm")
_PARTS_PER_PROCESS = 40
COUNTED = {
    "kills": Kind.STOP,
    "full_disks": Kind.FULL,
    "damaged_files": Kind.DAMAGED,
    "lost_states": Kind.FORGOTTEN,
    "stale_checkpoints": Kind.STALE,
    "bad_messages": Kind.MESSAGE,
}
"""The columns of a table that count events."""
_DRAWN: Sequence[Mapping[str, Scalar]] = (
    {},
    {"holdout-clients": 1},
    {"dispfl.gossip": "client"},
    {"dpsgd.gossip": "client"},
    {"fedspallm.merge": "masks", "num-server-rounds": 1},
    {"fedspallm.merge": "hessians", "num-server-rounds": 1},
    testing.PRIVATE,
    {"secure-sums": True, "secure-sums-threshold": 2},
    {"secure-sums": True, "secure-sums-threshold": 2, "min-holders": 2},
    {"secure-sums": True, "secure-sums-threshold": 2, "fedspallm.merge": "hessians", "num-server-rounds": 1},
)
"""Settings of which the seed draws one for its run, of those that have an effect with its system."""
_MOST_ROUNDS = 10  # of a run, or layers of a language model
_HEAD = ",".join(("version", "system", "first_seed", "end_seed", "processor_seconds", "violations", *COUNTED)) + "\n"


@dataclass(frozen=True)
class Part:
    """A part of a campaign: the schedules of a system and some ``seeds``.

    It has their processor time, the laws that were broken, and how often each kind of event ``happened``.
    """

    system: str
    seeds: range
    seconds: float
    violations: tuple[Violation, ...]
    happened: Counter[Kind]

    def __add__(self, other: Part) -> Part:
        """Return both parts of a system as one; ``seeds`` go from the first to the last."""
        return Part(
            self.system,
            range(min(self.seeds.start, other.seeds.start), max(self.seeds.stop, other.seeds.stop)),
            self.seconds + other.seconds,
            self.violations + other.violations,
            self.happened + other.happened,
        )


def campaign(systems: Sequence[str], seeds: range, settings: Mapping[str, Scalar], workers: int = 1) -> Iterator[Part]:
    """Run the schedules of all ``seeds`` for each of the systems, and yield the parts as they are done.

    ``settings`` are keys of the runs' configuration. With one worker everything happens in this process.
    """
    parts = [(system, part, settings) for system in systems for part in _parts(seeds)]
    if workers == 1:
        yield from (_checked(*part) for part in parts)
        return
    # a forked process would inherit locks that threads of this one hold
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=_PARTS_PER_PROCESS) as pool:
        try:
            for done in as_completed([pool.submit(_checked, *part) for part in parts]):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def scratch_place() -> Path | None:
    """Return the folder in memory where a simulated disk is fastest, or None where there is none."""
    return _MEMORY if _MEMORY.is_dir() else None


def check_settings(systems: Sequence[str], settings: Mapping[str, Scalar]) -> None:
    """Raise :class:`ConfigError` for a setting that a campaign decides, or that has no effect in any of its runs."""
    if "system" in settings:
        raise ConfigError("system", settings["system"], hint="--system says it")
    prepare_all([RunInputs(values_of(system, settings), on_command_line=settings) for system in systems])


def drawn_settings(system: str, seed: int, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of a seed's run: those that are given, and what the seed draws beside them.

    Seeds whose schedules have the same messages have the same settings.
    """
    choices = []
    for drawn in _DRAWN:
        if drawn.get("secure-sums") and not _leaves_a_sum(Schedule.drawn(seed, system).messages):
            continue
        with suppress(ConfigError):
            more = {key: value for key, value in drawn.items() if key not in settings}
            prepare_all([RunInputs(values_of(system, {**settings, **more}), on_command_line=more)])
            choices.append(more)
    return {**settings, **choices[seed // SAME_MESSAGES % len(choices)]}


def _leaves_a_sum(messages: int) -> bool:
    """Return whether two clients answer in every round, since a sum of fewer ends the run."""
    rounds = range(1, _MOST_ROUNDS + 1)
    return all(sum(fault_of(messages, round, k) not in SPOILS for k in range(CLIENTS)) >= 2 for round in rounds)


def check_table(path: Path) -> None:
    """Raise :class:`ConfigError` where ``path`` is a file to which :func:`write_rows` does not add."""
    if path.is_dir() or (path.exists() and path.read_bytes()[: len(_HEAD)] != _HEAD.encode()):
        raise ConfigError("--table", path, f"a new file, or one that begins with {_HEAD.strip()!r}")


def write_rows(path: Path, parts: Iterable[Part]) -> None:
    """Add a line for each part: a system, its seeds, the processor time in seconds, and counts."""
    text = "" if path.exists() else _HEAD
    for part in parts:
        counts = [part.seeds.start, part.seeds.stop, round(part.seconds), len(part.violations)]
        counts += [part.happened[kind] for kind in COUNTED.values()]
        text += ",".join((__version__, part.system, *map(str, counts))) + "\n"
    append_lines(path, text.encode())


def _parts(seeds: range) -> Iterator[range]:
    """Yield the seeds in ranges whose schedules have the same messages."""
    first = seeds.start
    while first < seeds.stop:
        end = min(seeds.stop, (first // SAME_MESSAGES + 1) * SAME_MESSAGES)
        yield range(first, end)
        first = end


def _checked(system: str, seeds: range, settings: Mapping[str, Scalar]) -> Part:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models gain nothing from more
    began = time.process_time()
    try:
        with scratch_folder(scratch_place()) as folder:
            simulation = Simulation(folder, drawn_settings(system, seeds.start, settings))
            found = [simulation.check(Schedule.drawn(seed, system)) for seed in seeds]
    finally:
        torch.set_num_threads(threads)
    violations = tuple(each for each in found if each)
    return Part(system, seeds, time.process_time() - began, violations, simulation.happened)
