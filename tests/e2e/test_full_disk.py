"""Disks that are full for real: the kernel refuses the write. Finished rounds stay, and with room the run goes on."""

from __future__ import annotations

import json
import re
import resource
import shutil
from contextlib import contextmanager

import pytest
from flwr.clientapp import ClientApp
from rich.console import Console

from fedprune_app import client_app
from fedprune_app.engine import background
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.store import State, VersionedStore
from fedprune_app.errors import LaunchError
from fedprune_app.files import append_lines
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy.accounting import Steps
from fedprune_app.privacy.ledger import Ledger
from fedprune_app.running import run
from tests.conftest import Finished, wrapped_app
from tests.examples import full

SETTINGS = {"num_server_rounds": 3, "fraction_train": 1.0, "local_epochs": 1, "evaluate_every": 0}
FULL = "[Errno 28] No space left on device"


@contextmanager
def files_of_at_most(size):
    """The kernel refuses to make any file of this process longer: EFBIG, after writing what fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def on_round(round, client, action):
    """The product, but ``action`` happens before this client trains in this round."""

    def train(message, context, honest):
        fields = message.content["fields"]
        if (fields["round"], context.node_config["partition-id"]) == (round, client):
            action()
        return honest(message, context)

    return wrapped_app(train)


def fail(message="it is not there"):
    raise TimeoutError(message)


@pytest.mark.parametrize(
    "left",
    [0, pytest.param(8192, marks=pytest.mark.programs), full(16384), pytest.param(24576, marks=pytest.mark.programs)],
)
@pytest.mark.parametrize("system", ["subfedavg", full("dispfl")])
def test_wherever_the_run_folders_disk_fills_up_the_run_stops_on_one_line_and_resumes(
    federate, small_disk, tmp_path, system, left
):
    """Records, checkpoints, peers, run.json: what does not fit first depends on the room that is left."""
    settings = {**SETTINGS, "clients": 3, "system": system}
    whole = federate(name="whole", **settings)
    disk = small_disk(tmp_path / "run", 4096)
    settings["state_dir"] = str(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=re.escape(f"{FULL}: '{disk.folder}/")) as caught:
        federate(app=on_round(3, 2, lambda: disk.fill(left)), **settings)
    assert "\n" not in str(caught.value)
    run = Finished(disk.folder)
    lines = (disk.folder / "rounds.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["round"] for line in lines[:2]] == [1, 2]
    assert (disk.folder / "checkpoints" / "round-00002.safetensors").exists()
    assert run.info["status"] in ("running", "failed")
    disk.free()
    assert federate(**settings, resume_from=str(disk.folder)).sha256 == whole.sha256
    assert [row["round"] for row in run.rounds] == [1, 2, 3]
    assert run.info["status"] == "completed"


@pytest.mark.programs
def test_the_command_line_says_that_the_disk_is_full(small_disk, tmp_path):
    """Not that run.json could not be written because of it; and what says so is a failed run, not a wrong setting."""
    disk = small_disk(tmp_path / "run", 2048)
    disk.fill(left=12288)  # run.json is written; the records or checkpoints of some round are not
    values = {**{key.replace("_", "-"): v for key, v in SETTINGS.items()}, "out-dir": str(disk.folder)}
    prepared = prepare(RunInputs(values), Placement("inprocess", 4))
    with pytest.raises(LaunchError) as caught:
        run(prepared, disk.folder, Console(stderr=True))
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_a_client_whose_disk_is_full_is_left_out_and_goes_on_when_there_is_room(
    federate, small_disk, tmp_path, monkeypatch
):
    monkeypatch.setattr(background, "_MOST_COPIED", 0)  # states are written at once, while the disk is as it is
    settings = {**SETTINGS, "system": "subfedavg", "num_server_rounds": 4, "evaluate_every": 1}
    settings["cohort"] = 1  # the disk is full for one client at a time
    disk = small_disk(tmp_path / "clients-of-run", 4096)

    def train(message, context, honest):
        round, client = message.content["fields"]["round"], context.node_config["partition-id"]
        disk.free()
        if round == 2 and client in (1, 4):
            disk.fill()
        return honest(message, context)

    run = federate(app=wrapped_app(train), state_dir=str(disk.folder), **settings)
    assert [row["replies"] for row in run.rounds] == [6, 4, 6, 6]
    assert all(FULL in text for text in run.rounds[1]["failure_reasons"])
    assert "client 1: OSError" in run.rounds[1]["failure_reasons"][0]
    assert [row["evaluation_failures"] for row in run.rounds] == [0] * 4
    assert not any(row["notes"] for row in run.rounds), "no state is lost"

    def skipping(message, context, honest):
        if message.content["fields"]["round"] == 2 and context.node_config["partition-id"] in (1, 4):
            fail()
        return honest(message, context)

    assert run.sha256 == federate(name="skipped", app=wrapped_app(skipping), **settings).sha256


def test_an_evaluation_needs_no_room(federate, small_disk, tmp_path):
    disk = small_disk(tmp_path / "state", 4096)
    app = ClientApp()
    app.query()(client_app.query)
    app.train()(client_app.train)

    @app.evaluate()
    def evaluate(message, context):
        disk.fill()
        return client_app.evaluate(message, context)

    run = federate(app=app, **{**SETTINGS, "num_server_rounds": 1}, state_dir=str(disk.folder))
    assert run.rounds[-1]["evaluation_failures"] == 0
    assert not list(disk.folder.rglob("scores.json")), "there was no room for what it remembers"


def test_a_private_client_with_a_full_disk_releases_nothing_and_forgets_nothing(federate, small_disk, tmp_path):
    """The kernel cuts a client's charge in its middle."""
    disk = small_disk(tmp_path / "ledgers", 64)
    page = 4096

    def fill():
        for path in disk.folder.glob("*.jsonl"):  # a line without a spend, up to ten bytes before the end of a page
            empty = Ledger(tmp_path / "empty.jsonl")
            empty.charge_steps(1.0, 0.5, 0)
            room = page - 10 - path.stat().st_size - empty.path.stat().st_size
            empty.path.unlink()
            Ledger(path).charge_steps(1.0, 0.5, 0, note="x" * room)
            assert path.stat().st_size == page - 10
        disk.fill()

    dp = {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.accuracies": "open", "dp.ledger-dir": str(disk.folder)}
    settings = {**SETTINGS, "system": "fedavg", "shard_size": 40, "clients": 2}
    app = on_round(2, 0, fill)
    with pytest.raises(TooFewReplies, match="round 2 had 0 good replies"):
        federate(app=app, **settings, **dp)
    spent = [sum(Ledger(next(disk.folder.glob(f"{k:05d}-*.jsonl"))).spent.values()) for k in range(2)]
    disk.free()
    run = federate(**settings, **dp, resume_from=str(tmp_path / "run"))
    assert run.info["rounds_completed"] == 3
    after = [sum(Ledger(next(disk.folder.glob(f"{k:05d}-*.jsonl"))).spent.values()) for k in range(2)]
    assert [now - then for now, then in zip(after, spent, strict=True)] == [2 * then for then in spent]


# --- a write that is cut anywhere -------------------------------------------------------------------------------------


def test_a_charge_that_does_not_fit_is_an_error_and_leaves_the_ledger_as_it_was(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    first.charge_steps(1.0, 0.1, 5)
    size = path.stat().st_size
    for more in range(size):  # the lines are of one length
        with files_of_at_most(size + more), pytest.raises(OSError, match=f"too large.*{path.name}"):
            first.charge_steps(1.0, 0.1, 7)
        assert Ledger(path).spent == first.spent == {Steps(1.0, 0.1): 5}
    first.charge_steps(1.0, 0.1, 7)
    assert Ledger(path).spent == first.spent == {Steps(1.0, 0.1): 12}


def test_a_state_that_does_not_fit_leaves_the_one_before_it_and_no_litter(tmp_path):
    import torch

    store = VersionedStore(tmp_path)
    store.save(1, State({"w": torch.ones(1000)}))
    for size in (0, 1, 100, 4000):
        with files_of_at_most(size), pytest.raises(OSError, match=r"round-00002\.safetensors"):
            store.save(2, State({"w": torch.zeros(1000)}))
    assert [path.name for path in tmp_path.iterdir()] == ["round-00001.safetensors"]
    assert store.load()[1].tensors["w"].sum() == 1000


def test_lines_that_do_not_fit_name_their_file(tmp_path):
    append_lines(tmp_path / "rounds.jsonl", b"one\n")
    with files_of_at_most(6), pytest.raises(OSError, match=r"rounds\.jsonl"):
        append_lines(tmp_path / "rounds.jsonl", b"two\n")
    assert (tmp_path / "rounds.jsonl").read_bytes() == b"one\ntw"


# --- what a crash or a full disk leaves -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", full("missing")])
def test_a_run_that_lost_its_only_checkpoint_begins_again_and_says_so(federate, tmp_path, damage):
    """Killed, or out of room, between the record of round 1 and its checkpoint: one round is lost, not the folder."""
    settings = {"fraction_train": 1.0, "local_epochs": 2, "evaluate_every": 1}
    whole = federate(name="whole", num_server_rounds=2, **settings)
    federate(num_server_rounds=1, **settings)
    checkpoint = tmp_path / "run" / "checkpoints" / "round-00001.safetensors"
    if damage == "missing":
        shutil.rmtree(checkpoint.parent)
    else:
        checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    run = federate(num_server_rounds=2, **settings, resume_from=str(tmp_path / "run"))
    assert run.sha256 == whole.sha256
    assert [row["round"] for row in run.rounds] == [1, 2]
    if damage == "missing":
        assert run.info["notes"] == ["round 1 left no readable checkpoint: rounds repeated: 1"]
    else:
        named, repeated = run.info["notes"]
        assert named.startswith(f"state file '{checkpoint}' is damaged: ")
        assert repeated == "rounds repeated: 1"
