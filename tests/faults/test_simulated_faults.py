"""The simulator of faults: the code that there is breaks no law, planted bugs do, and a seed is one schedule."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clients import node
from devtools.faults import simulation
from devtools.faults.__main__ import app
from devtools.faults.campaign import Part, campaign, check_settings, check_table, drawn_settings, write_rows
from devtools.faults.disk import Died, Disk, is_temporary
from devtools.faults.messages import SPOILS, Fault, Place, fault_of
from devtools.faults.schedule import SAME_MESSAGES, Cause, Later, Schedule, Stop
from devtools.faults.simulation import Simulation, Told
from devtools.faults.story import BETWEEN, STOPS, Kind, Story
from devtools.faults.tour import write_tour
from fedprune_app import files, resuming, testing
from fedprune_app.cli import main
from fedprune_app.core.payload import Payload
from fedprune_app.engine import exchange, replies, store
from fedprune_app.engine.secure_aggregation import STAGES
from fedprune_app.privacy import ledger
from fedprune_app.registry import SYSTEMS
from fedprune_app.results import reader, recorder
from strategies import base
from tests.docs.scripts import script
from tests.refusing import refuses

pytestmark = pytest.mark.full
SLOW = pytest.mark.slow


@pytest.fixture
def simulated(tmp_path):
    return Simulation(tmp_path)


SLOWER = {"fedltp": 7, "fedspa": 6, "fedcr": 6, "fedspallm": 4, "subfedavg-hy": 4}
SAMPLE = dict.fromkeys(SYSTEMS, 20) | SLOWER
"""How many schedules of each system are tried every time, some 350 in all. `make faults-sim` tries as many as asked."""


@pytest.mark.parametrize("system", SAMPLE)
def test_faults_change_nothing(simulated, system):
    first = max(0, 25 - SAMPLE[system] // 2)  # those below 25 have no bad messages
    for seed in range(first, first + SAMPLE[system]):
        assert simulated.check(Schedule.drawn(seed, system)) is None


def test_faults_change_nothing_of_a_run_with_secure_sums(tmp_path):
    simulated = Simulation(tmp_path, {"secure-sums": True, "secure-sums-threshold": 2})
    for seed in [*range(20, 30), 115]:
        assert simulated.check(Schedule.drawn(seed, "fedavg")) is None


TWO_SUMS = {"secure-sums": True, "secure-sums-threshold": 2, "min-holders": 2}
IN_EITHER_SUM = (50, 525, 650, 850, 950, 301, 1851)
"""Seeds in whose runs a client is lost in each stage of the sum of masks, and of that of values."""


@pytest.mark.parametrize("seed", IN_EITHER_SUM)
@pytest.mark.parametrize("system", ["subfedavg", "fedp3", pytest.param("subfedavg-hy", marks=SLOW)])
def test_faults_change_nothing_of_a_run_with_two_secure_sums_a_round(tmp_path, system, seed):
    assert Simulation(tmp_path, TWO_SUMS).check(Schedule.drawn(seed, system)) is None


def test_clients_are_lost_in_each_stage_of_either_sum():
    lost = set()
    for messages, round, client in itertools.product(
        {seed // SAME_MESSAGES for seed in IN_EITHER_SUM}, (1, 2, 3), range(3)
    ):
        if fault_of(messages, round, client) in SPOILS:
            lost.add(Place.drawn(messages, round, client, 2))
    assert lost == {Place(number, stage) for number in range(2) for stage in STAGES}


def test_a_client_that_is_lost_between_two_secure_sums_ends_a_run_which_resumes_to_the_same_model(tmp_path):
    told = Simulation(tmp_path, TWO_SUMS).told(Schedule.drawn(1126, "subfedavg"))
    assert told.law == ""
    assert [event.text for event in told.story.events if event.text.startswith("ends with")] == [
        "ends with TooFewReplies: the values that enough clients send: 2 clients are left after stage 'shares' of the "
        "secure sum, allowed: 3 or more; first failure: client 1: no reply in 5 s"
    ]
    assert told.sha256 == told.whole_sha256 != ""


def values_of_fewer_clients():
    """The values of the clients that are left are taken for those of the clients whose masks were counted."""
    real = base.request_payloads
    return base, "request_payloads", lambda *arguments, least: real(*arguments)


def test_a_sum_of_other_clients_than_the_one_before_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(*values_of_fewer_clients())
    told = Simulation(tmp_path, TWO_SUMS).told(Schedule.drawn(1150, "subfedavg"))
    assert told.law == "a run that was interrupted can be resumed"
    assert "the difference of two sums is a single addend" in told.story.events[-2].text


def test_a_run_that_takes_too_much_memory_is_a_violation(simulated, monkeypatch):
    monkeypatch.setattr(simulation, "MOST_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(simulation, "_most_held_bytes", itertools.count(0, 2 << 20).__next__)  # 2 MiB more at each look
    found = simulated.check(Schedule(0, "subfedavg", 0, (Stop(0.5, after=True),)))
    assert "of memory" in found.law


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_hundred_schedules_of_every_system_change_nothing(simulated, system):
    assert [found for seed in range(100) if (found := simulated.check(Schedule.drawn(seed, system)))] == []


def test_a_death_after_the_last_round_changes_nothing(simulated):
    for place in (0.93, 0.96, 0.98):
        schedule = Schedule(0, "dispfl", 0, (Stop(place, after=True, cause=Cause.NAMES_LOST),))
        assert simulated.check(schedule) is None


@pytest.mark.parametrize("cause", Cause)
def test_two_stops_of_every_cause_change_nothing(simulated, cause):
    schedule = Schedule(0, "subfedavg", 0, (Stop(0.5, after=True, cause=cause), Stop(0.4, after=False, cause=cause)))
    told = simulated.told(schedule)
    assert told.law == ""
    assert sum(event.kind in STOPS for event in told.story.events) == 2


def test_a_seed_is_one_schedule(tmp_path):
    schedule = Schedule.drawn(3, "fedavg")
    assert schedule == Schedule.drawn(3, "fedavg")
    assert schedule not in (Schedule.drawn(4, "fedavg"), Schedule.drawn(3, "dispfl"))
    stories = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        stories.append(Simulation(tmp_path / name).told(schedule).story)
    assert stories[0].events == stories[1].events
    assert any(event.kind in STOPS for event in stories[0].events)


@pytest.mark.parametrize("system", ["dispfl", "subfedavg", pytest.param("fedltp", marks=SLOW)])
def test_what_is_remembered_of_arithmetic_changes_nothing(tmp_path, monkeypatch, system):
    stories = []
    for name in ("remembered", "computed"):
        (tmp_path / name).mkdir()
        told = Simulation(tmp_path / name).told(Schedule.drawn(26, system))
        stories.append((told.sha256, told.whole_sha256, told.story.events))
        monkeypatch.setattr(simulation.Remembered, "used", nullcontext)
    assert stories[0] == stories[1]
    assert stories[0][0]


def test_the_last_checkpoint_knows_the_final_models(simulated):
    """A client's ledger is damaged between the last checkpoint and the end of the run, and it is not asked again."""
    ledger = (8 + 0.4777) / 21  # the ninth of 21 files
    damage = Stop(0.85, after=False, later=Later.DAMAGED, which=ledger)
    schedule = Schedule(0, "fedspa", 0, (Stop(0.07, after=False), damage))
    told = simulated.told(schedule)
    assert told.law == ""
    assert told.sha256 == told.whole_sha256 != ""
    assert any("ledger.jsonl is damaged" in event.text for event in told.story.events)


def test_a_lost_update_does_not_end_a_run_that_accepts_loss(simulated):
    """MTL's server reads the last model of every client in every round; one of them is damaged here."""
    told = simulated.told(Schedule.drawn(3092, "mtl"))
    assert told.law == ""
    assert any("peers/00002" in event.text and "is damaged" in event.text for event in told.story.events)
    assert told.sha256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "stops"),
    [
        pytest.param(0, [Stop(0.2, after=False, later=Later.FORGOTTEN, which=0.5)], id="before the first checkpoint"),
        pytest.param(
            1, [Stop(0.9, after=False, later=Later.FORGOTTEN, which=0.6)], id="the last round is repeated for a client"
        ),
        pytest.param(
            6,
            [Stop(0.6, after=True), Stop(0.2, after=True, later=Later.STALE)],
            id="no state is as old as a checkpoint",
        ),
    ],
)
def test_a_language_models_clients_lose_no_layer_in_silence(simulated, messages, stops):
    assert simulated.check(Schedule(0, "fedspallm", messages, tuple(stops))) is None


@pytest.mark.parametrize("later", [Later.FORGOTTEN, Later.DAMAGED])
def test_lost_files_are_told(simulated, later):
    """Each file in turn is damaged; a run is then refused, or ends as it would have, or says what is lost."""
    endings = []
    for number in range(8):
        schedule = Schedule(0, "ldp-fedp3", 0, (Stop(0.8, after=True, later=later, which=(number + 0.3) / 8),))
        told = simulated.told(schedule)
        assert told.law == "", told.story.lines()
        (between,) = (event for event in told.story.events if event.kind in BETWEEN)
        assert ("damaged" in between.text) == (later == Later.DAMAGED)
        endings += [event.text for event in told.story.events if event.kind == Kind.PROCESS]
    assert any(text.startswith("completes") for text in endings)
    assert any(text.startswith("ends with") for text in endings)


def test_without_the_newest_checkpoint_a_run_goes_on_from_an_older_one(simulated):
    told = simulated.told(Schedule(0, "dispfl", 0, (Stop(0.95, after=True, later=Later.STALE),)))
    assert told.law == ""
    assert any("the newest checkpoint, is gone" in line for line in told.story.lines())


# --- messages -----------------------------------------------------------------------------------------------------


def seed_with(fault):
    """A draw of messages that has this fault in the first two of three rounds, and no fault that spoils."""
    for number in range(1, 100_000):
        drawn = [fault_of(number, round, client) for round in (1, 2, 3) for client in range(simulation.CLIENTS)]
        if fault in drawn[:6] and drawn.count(None) == len(drawn) - 1:
            return number
    raise AssertionError(fault)


QUICK = (Fault.LATE, Fault.ANOTHER, Fault.CLOCK)


@pytest.mark.parametrize("fault", [pytest.param(each, marks=[] if each in QUICK else SLOW) for each in Fault])
def test_a_bad_message_counts_as_none_or_as_a_good_one(simulated, fault):
    for system in ("subfedavg", "dispfl"):
        good = simulated._uninterrupted(system, 0)
        whole = simulated._uninterrupted(system, seed_with(fault))
        assert whole.broken == ""
        assert (whole.run.sha256 == good.run.sha256) == (fault not in SPOILS)
        assert sum(row["failures"] for row in whole.run.rounds) == (fault in SPOILS)


def test_no_message_goes_wrong_in_draw_0():
    assert not any(fault_of(0, round, client) for round in range(50) for client in range(50))


# --- planted bugs -------------------------------------------------------------------------------------------------


def without_fsync():
    real = files.replacing

    @contextmanager
    def replacing(path, mode=0o666, **how):
        with real(path, mode, **{**how, "durable": False}) as file:
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
    def replace_file(path, content, mode=0o666, **how):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            os.fsync(file.fileno())
            file.write(content[len(content) // 2 :])
            file.flush()
            os.fsync(file.fileno())

    return recorder, "replace_file", replace_file


def folders_not_synced():
    return files, "_sync", lambda descriptor: None


def leftovers_not_removed():
    return files, "_sweep", lambda folder: None


def reasons_not_quoted():
    """The error of a run that too few clients answer does not say why, be it a full disk."""

    def require(good, least, what, failures):
        if good < least:
            raise exchange.TooFewReplies(f"{what} had {good} good replies, min-replies asks for {least}")

    return base, "require", require


def older_states_removed():
    """A client keeps only its newest state, which may be ahead of the server's checkpoint."""
    real = store.client_store
    return node, "client_store", lambda states, client, run_key, keep=3: real(states, client, run_key, 1)


def newest_state_taken():
    """A client goes on from its newest state, whichever the server names."""
    real = store.VersionedStore.read

    def read(self, round):
        newest = max(self.rounds(), default=round)
        return real(self, newest if "clients" in self.folder.parts else round)

    return store.VersionedStore, "read", read


def digests_unchecked():
    return Payload, "digest", lambda self: "0" * 64


def records_unchecked():
    return resuming, "check_records", lambda folder, marks: []


def later_rows_kept():
    return recorder, "readable_lines", lambda path, last, mark: reader.readable_lines(path, 10**6, None)


def any_reply_counts():
    """A reply to another message is taken for one to the message that waits longest."""
    real = replies.arrived

    def arrived(grid, deadlines, *arguments):
        for reply in real(grid, deadlines, *arguments):
            yield reply if reply.message_id in deadlines else replace(reply, message_id=next(iter(deadlines)))

    return exchange.replies, "arrived", arrived


def charged_without_fsync():
    def append(self, entry, file):
        text = json.dumps(entry)
        line = f"{ledger._check(self._check, text)} {text}\n".encode()
        file.truncate(self._offset)
        file.seek(self._offset)
        file.write(line)
        file.flush()
        self._read_line(line)

    return ledger.Ledger, "_append", append


BUGS = {
    without_fsync: "subfedavg",
    states_not_synced: "subfedavg",
    appended_without_fsync: "subfedavg",
    written_in_place: "subfedavg",
    folders_not_synced: "subfedavg",
    leftovers_not_removed: "subfedavg",
    reasons_not_quoted: "subfedavg",
    older_states_removed: "subfedavg",
    newest_state_taken: "dispfl",
    digests_unchecked: "subfedavg",
    records_unchecked: "subfedavg",
    later_rows_kept: "subfedavg",
    any_reply_counts: "subfedavg",
    charged_without_fsync: "ldp-fedp3",
}
"""Each bug and the system in which it is planted."""


QUICKLY_FOUND = (written_in_place, without_fsync, charged_without_fsync)


def seeds_until_found(simulated, system, most=1000):
    """The number of schedules until one breaks a law, and the violation."""
    for count in range(1, most + 1):
        if (found := simulated.check(Schedule.drawn(count - 1, system))) is not None:
            return count, found
    raise AssertionError(f"{most} schedules do not find the bug")


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[] if bug in QUICKLY_FOUND else SLOW) for bug in BUGS])
def test_planted_bugs_are_found(simulated, monkeypatch, bug):
    monkeypatch.setattr(*bug())
    count, violation = seeds_until_found(simulated, BUGS[bug])
    assert violation.lines[-1] == f"broken: {violation.law}"
    if table := os.environ.get("PLANTED_BUGS"):
        law = violation.law.partition(":")[0]
        row = {"bug": bug.__name__, "system": BUGS[bug], "schedules": count, "law": law}
        script("_rows").append_rows(Path(table), [row])


# --- the disk -----------------------------------------------------------------------------------------------------


def stopped(disk, work, error=Died):
    with disk.watched(), pytest.raises(error):
        work()


@pytest.mark.parametrize(
    ("stops_at", "after", "cause", "content"),
    [
        (0, False, Cause.KILLED, b"old"),  # before the fsync of the new file
        (1, False, Cause.KILLED, b"old"),  # before the rename
        (1, True, Cause.KILLED, b"new"),
        (1, True, Cause.NAMES_LOST, b"old"),  # the folder was not synced yet
        (2, True, Cause.NAMES_LOST, b"new"),
        (1, True, Cause.CONTENTS_LOST, b"new"),
    ],
)
def test_a_file_is_the_old_one_or_the_new_one(tmp_path, stops_at, after, cause, content):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    stopped(Disk(tmp_path, stops_at, after, cause), lambda: files.replace_file(path, b"new"))
    assert path.read_bytes() == content


def test_a_snapshot_is_what_a_stop_leaves(tmp_path):
    """The run that is recorded and the one that is stopped leave the same files, for every change and cause."""

    def work(folder):
        files.replace_file(folder / "a", b"first")
        files.append_lines(folder / "lines", b"one\n")
        files.replace_file(folder / "a", b"second", durable=False)
        files.append_lines(folder / "lines", b"two\n")
        (folder / "a").unlink()

    def content(folder):
        # a temporary name is drawn
        found = ((p.name, p.read_bytes()) for p in folder.iterdir())
        return sorted(("temporary" if is_temporary(name) else name, data) for name, data in found)

    root = tmp_path / "run"
    root.mkdir()
    recorded = Disk(root, records=True)
    with recorded.watched():
        work(root)
    assert recorded.count > 6
    for number, snapshots in enumerate(recorded.snapshots):
        for after, snapshot in enumerate(snapshots):
            for cause in (Cause.KILLED, Cause.NAMES_LOST, Cause.CONTENTS_LOST):
                snapshot.restore(root, cause)
                expected = content(root)
                for path in root.iterdir():
                    path.unlink()
                stopped(Disk(root, number, bool(after), cause), lambda: work(root))
                assert content(root) == expected, (number, after, cause)


def test_what_was_not_synced_can_be_lost(tmp_path):
    path = tmp_path / "file"
    cause = Cause.CONTENTS_LOST
    stopped(Disk(tmp_path, 0, True, cause), lambda: files.replace_file(path, b"new", durable=False))
    assert path.read_bytes() == b""
    lines = tmp_path / "lines"
    disk = Disk(tmp_path, 1, False, cause)

    def twice():
        files.append_lines(lines, b"first\n")
        files.append_lines(lines, b"second\n")

    stopped(disk, twice)
    assert lines.read_bytes() == b"first\nsec"


def test_a_dead_process_writes_nothing_more(tmp_path):
    disk = Disk(tmp_path, 0)

    def stubborn():
        try:
            files.replace_file(tmp_path / "a", b"1")
        finally:
            files.replace_file(tmp_path / "b", b"2")

    stopped(disk, stubborn)
    assert [path.name for path in tmp_path.iterdir() if not is_temporary(path.name)] == []


def test_a_full_disk_takes_no_new_file_and_keeps_the_old_one(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    disk = Disk(tmp_path, 0, cause=Cause.DISK_FULL)
    stopped(disk, lambda: files.replace_file(tmp_path / "a", b"new"), OSError)
    with disk.watched(), pytest.raises(OSError, match="No space left"):
        files.append_lines(tmp_path / "lines", b"x")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


# --- the laws -----------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_end_is_a_violation(simulated, monkeypatch):
    real = testing.run_with

    def stops(values, folder, *more):
        if "resume-from" in values:
            raise ValueError("no way on")
        return real(values, folder, *more)

    monkeypatch.setattr(testing, "run_with", stops)
    violation = simulated.check(Schedule(0, "fedavg", 0, (Stop(0.9, after=False),)))
    assert violation.law == "a run that was interrupted can be resumed"
    assert violation.lines[-2:] == ("ends with ValueError: no way on", f"broken: {violation.law}")


def test_a_run_without_end_is_a_violation(simulated, monkeypatch):
    real = testing.run_with

    def endless(values, folder, *more):
        while "resume-from" in values:
            pass
        return real(values, folder, *more)

    schedule = Schedule(0, "fedavg", 0, (Stop(0.9, after=False),))
    assert simulated.check(schedule) is None
    monkeypatch.setattr(testing, "run_with", endless)
    monkeypatch.setattr(simulation, "LIMIT_SECONDS", 0.5)
    assert simulated.check(schedule).law == "a run ends: this one took over 0.5 s of processor time"


# --- campaigns and the command ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_campaign_is_the_same_with_any_number_of_workers(monkeypatch):
    seeds = range(23, 28)
    found = [
        sorted((part.seeds.start, part.happened, part.violations) for part in campaign(["fedavg"], seeds, {}, workers))
        for workers in (1, 2)
    ]
    assert found[0] == found[1]
    assert [each[0] for each in found[0]] == [23, 25]


def test_rows_are_added_to_a_table(tmp_path):
    path = tmp_path / "table.csv"
    for _ in range(2):
        check_table(path)
        parts = [Part("fedavg", range(a, a + 2), 6.2, (), Counter({Kind.STOP: 3, Kind.DAMAGED: 1})) for a in (7, 5)]
        write_rows(path, [parts[0] + parts[1]])
    head, *rows = path.read_text().splitlines()
    counted = "kills,full_disks,damaged_files,lost_states,stale_checkpoints,bad_messages"
    assert head == f"version,system,first_seed,end_seed,processor_seconds,violations,{counted}"
    assert [row.partition(",")[2] for row in rows] == ["fedavg,5,9,12,0,6,0,2,0,0,0"] * 2


@pytest.mark.parametrize("content", [None, b"other\n"])
def test_another_file_is_no_table(tmp_path, content):
    path = tmp_path
    if content is not None:
        path = tmp_path / "other.csv"
        path.write_bytes(content)
    with refuses("--table", path):
        check_table(path)


def test_the_command_prints_a_table_and_violations(tmp_path, monkeypatch):
    table = tmp_path / "table.csv"
    given = ["--system", "fedavg", "--seeds", "0:2", "--workers", "1", "--table", str(table)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "fedavg" in done.output
    assert table.read_text().count("\n") == 2
    monkeypatch.setattr(*written_in_place())
    done = CliRunner().invoke(app, [*given[:3], "1:2", *given[4:]])
    assert done.exit_code == 1
    assert "violation: fedavg, seed" in done.output
    assert " this change the " in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "5:5"], "--seeds is '5:5'"),
        (["--seeds", "x"], "--seeds is 'x'"),
        (["--workers", "0"], "--workers is 0"),
        (["system=fedavg"], "system is 'fedavg'"),
        (["out-dir=/x"], "out-dir is '/x'"),
        (["density=0.1"], "density is 0.1"),
        (["--seeds", "3:4", "--report", "x.pdf"], "--report is 'x.pdf'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["devtools.faults", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(app)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- the page -----------------------------------------------------------------------------------------------------


def test_a_schedule_is_a_page(tmp_path):
    out = tmp_path / "tour.html"
    given = ["--system", "dispfl", "--seeds", "3:4", "--report", str(out)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    page = out.read_text()
    told = Simulation(tmp_path).told(Schedule.drawn(3, "dispfl"))
    assert page.count("<title>client ") == sum(event.kind == Kind.ASKED for event in told.story.events)
    assert page.count('class="flag stop"') == sum(event.kind in STOPS for event in told.story.events)
    assert len(told.sha256) == 64
    assert f"Both have the hash <code>{told.sha256}</code>" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert CliRunner().invoke(app, given).exit_code == 0  # a page of fedprune's is replaced
    out.write_text("mine")
    assert "mine" not in str(CliRunner().invoke(app, given).exception)
    assert out.read_text() == "mine"


def test_the_page_of_a_broken_law_names_the_law(tmp_path):
    story = Story(process=1)
    story.tell(Kind.ASKED, "is asked to train", 1, 0)
    story.tell(Kind.DISK, "fsync run.json")
    story.tell(Kind.STOP, "after this change the process is killed")
    out = write_tour(Schedule.drawn(0, "fedavg"), Told("a run <ends>", story), tmp_path / "tour.html")
    page = out.read_text()
    assert "<strong>A law is broken:</strong> a run &lt;ends&gt;." in page
    assert "after this change the process is killed: fsync run.json" in page
    assert 'class="open" cx' in page.partition("</svg>")[0]


def test_a_page_is_of_one_schedule(tmp_path):
    given = ["--seeds", "3:5", "--report", str(tmp_path / "tour.html")]
    with refuses("--report"):
        CliRunner().invoke(app, given, catch_exceptions=False)


def test_seeds_draw_settings_of_what_a_system_has_and_keep_what_is_given():
    def drawn(system, **given):
        check_settings([system], given)
        return [drawn_settings(system, group * SAME_MESSAGES, given) for group in range(3)]

    assert drawn("fedavg") == [{}, {"holdout-clients": 1}, testing.PRIVATE]
    assert drawn_settings("fedavg", 3 * SAME_MESSAGES, {})["secure-sums"]
    assert "secure-sums" not in drawn_settings("fedavg", 75 * SAME_MESSAGES, {}), "too few would answer in a round"
    assert {"dispfl.gossip": "client"} in drawn("dispfl")
    assert [found.get("fedspallm.merge") for found in drawn("fedspallm")] == [None, "masks", "hessians"]
    assert all(found["seed"] == 3 for found in drawn("fedavg", seed=3))
