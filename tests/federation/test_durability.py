"""What a checkpoint relies on is on disk before the checkpoint is, whoever puts it there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clients import node
from fedprune_app.engine.store import VersionedStore
from fedprune_app.files import make_durable
from tests.examples import full


@pytest.fixture
def on_disk(monkeypatch):
    """The inodes of the files and folders that were synced so far."""
    inodes, fsync = set(), os.fsync

    def note(descriptor):
        inodes.add(os.fstat(descriptor).st_ino)
        return fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return inodes


@pytest.mark.parametrize("elsewhere", [False, full(True)])
@pytest.mark.parametrize("shares_disk", [True, full(False)])
def test_states_are_on_disk_before_the_checkpoint_that_names_them(
    federate, monkeypatch, tmp_path, on_disk, shares_disk, elsewhere
):
    monkeypatch.setattr(node, "shares_disk_with_server", lambda: shares_disk)
    states = tmp_path / "elsewhere" if elsewhere else tmp_path / "run" / "clients"
    by_client, checked, save = [], [], VersionedStore.save

    def saving(self, round, state, accepted=None, *, durable=True):
        if self.folder.name == "checkpoints":
            for client, at in state.meta["state-rounds"].items():
                (path,) = states.rglob(f"{int(client):05d}/round-{at:05d}.safetensors")
                checked.append(path.stat().st_ino in on_disk and path.parent.stat().st_ino in on_disk)
        save(self, round, state, accepted, durable=durable)
        if self.folder.is_relative_to(states):
            by_client.append(self.path(round).stat().st_ino in on_disk)

    monkeypatch.setattr(VersionedStore, "save", saving)
    federate(system="subfedavg", **({"state_dir": str(states)} if elsewhere else {}))
    assert len(checked) >= 9  # three clients in each of three rounds
    assert all(checked)
    assert by_client == [not shares_disk] * 9


def test_files_that_are_not_there_are_passed_over(tmp_path: Path, on_disk):
    written = tmp_path / "written"
    written.write_bytes(b"content")
    make_durable([tmp_path / "missing", tmp_path / "no folder" / "missing", written])
    assert {written.stat().st_ino, tmp_path.stat().st_ino} <= on_disk
