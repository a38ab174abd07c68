"""The simulator of faults: the code that there is breaks no law, planted bugs do, and a seed is one schedule."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest

from fedprune_app import files, simulated_faults
from fedprune_app.engine import store
from fedprune_app.registry import SYSTEMS
from fedprune_app.results import recorder
from fedprune_app.simulated_faults import Death, Died, Disk, Schedule, Simulation


@pytest.fixture
def simulation(tmp_path):
    return Simulation(tmp_path)


@pytest.mark.parametrize("system", ["subfedavg", "ldp-fedp3"])
def test_faults_change_nothing(simulation, system):
    for seed in (22, 23, 24, 25, 26):  # those below 25 have no bad messages
        assert simulation.check(Schedule.drawn(seed, system)) is None


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_hundred_schedules_of_every_system_change_nothing(simulation, system):
    if SYSTEMS[system].data == "images":
        assert [found for seed in range(100) if (found := simulation.check(Schedule.drawn(seed, system)))] == []


def test_a_death_after_the_last_round_changes_nothing(simulation):
    for place in (0.93, 0.96, 0.98):
        schedule = Schedule(0, "dispfl", 0, (Death(place, after=True, loses="names"),))
        assert simulation.check(schedule) is None


def test_a_seed_is_one_schedule(tmp_path):
    schedule = Schedule.drawn(3, "fedavg")
    assert schedule == Schedule.drawn(3, "fedavg")
    assert schedule not in (Schedule.drawn(4, "fedavg"), Schedule.drawn(3, "dispfl"))
    lines = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        simulation = Simulation(tmp_path / name)
        whole, operations = simulation._without_deaths("fedavg", 0)
        lines.append([])
        assert simulation._with_deaths(schedule, whole, operations, tmp_path / name / "run", lines[-1]) == ""
    assert lines[0] == lines[1]
    assert "the process dies" in " ".join(lines[0])


def without_fsync():
    real = files.replacing

    @contextmanager
    def replacing(path, mode=0o666, *, durable=True):
        with real(path, mode, durable=False) as file:
            yield file

    return files, "replacing", replacing


def states_not_synced():
    return store, "make_durable", lambda paths: None


def appended_without_fsync():
    def append_lines(path, lines):
        with files.appending(path) as file:
            file.write(lines)

    return recorder, "append_lines", append_lines


def written_in_place():
    def replace_file(path, content, mode=0o666, *, durable=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            os.fsync(file.fileno())
            file.write(content[len(content) // 2 :])
            file.flush()
            os.fsync(file.fileno())

    return recorder, "replace_file", replace_file


@pytest.mark.parametrize("bug", [without_fsync, states_not_synced, appended_without_fsync, written_in_place])
def test_planted_bugs_are_found(simulation, monkeypatch, bug):
    monkeypatch.setattr(*bug())
    found = (simulation.check(Schedule.drawn(seed, "subfedavg")) for seed in range(25))
    violation = next(filter(None, found))
    assert len(violation.schedule.deaths) == 1  # the smallest schedule
    assert any(line.startswith("the process dies") for line in violation.lines)


def died(disk, work):
    with disk.watched(), pytest.raises(Died):
        work()


@pytest.mark.parametrize(
    ("dies_at", "after", "loses", "content"),
    [
        (0, False, "", b"old"),  # before the fsync of the new file
        (1, False, "", b"old"),  # before the rename
        (1, True, "", b"new"),
        (1, True, "names", b"old"),  # the folder was not synced yet
        (2, True, "names", b"new"),
        (1, True, "contents", b"new"),
    ],
)
def test_a_file_is_the_old_one_or_the_new_one(tmp_path, dies_at, after, loses, content):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    died(Disk(tmp_path, dies_at, after, loses), lambda: files.replace_file(path, b"new"))
    assert path.read_bytes() == content


def test_what_was_not_synced_can_be_lost(tmp_path):
    path = tmp_path / "file"
    died(Disk(tmp_path, 0, True, "contents"), lambda: files.replace_file(path, b"new", durable=False))
    assert path.read_bytes() == b""
    lines = tmp_path / "lines"
    disk = Disk(tmp_path, 1, False, "contents")

    def twice():
        files.append_lines(lines, b"first\n")
        files.append_lines(lines, b"second\n")

    died(disk, twice)
    assert lines.read_bytes() == b"first\nsec"


def test_a_dead_process_writes_nothing_more(tmp_path):
    disk = Disk(tmp_path, 0)

    def stubborn():
        try:
            files.replace_file(tmp_path / "a", b"1")
        finally:
            files.replace_file(tmp_path / "b", b"2")

    died(disk, stubborn)
    assert [path.name for path in tmp_path.iterdir() if not files.is_temporary(path.name)] == []


def test_a_run_that_cannot_end_is_a_violation(simulation, monkeypatch):
    real = simulated_faults.testing.run_with

    def stops(values, folder, *more):
        if "resume-from" in values:
            raise ValueError("no way on")
        return real(values, folder, *more)

    monkeypatch.setattr(simulated_faults.testing, "run_with", stops)
    schedule = Schedule(0, "fedavg", 0, (Death(0.9, after=False, loses=""),))
    violation = simulation.check(schedule)
    assert violation.law == "a run that was interrupted can be resumed"
    assert violation.lines[-1] == "fails: ValueError: no way on"
