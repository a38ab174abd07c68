from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from fedprune_app.engine.store import State, VersionedStore, exclusive, grouped, read_tensors, write_tensors


def state(value: float) -> State:
    return State(
        grouped(weights={"w": torch.full((3,), value)}, masks={"w": torch.tensor([True, False, True])}), {"v": 1}
    )


def test_a_state_comes_back_with_its_groups_and_values(tmp_path):
    write_tensors(tmp_path / "s.safetensors", state(2.0).tensors, {"v": [1, "ü"]})
    back = read_tensors(tmp_path / "s.safetensors")
    assert back.group("weights")["w"].tolist() == [2.0] * 3
    assert back.group("masks")["w"].dtype == torch.bool
    assert back.meta == {"v": [1, "ü"]}


def test_numbers_that_are_keys_come_back_as_texts_in_whatever_order_they_sort(tmp_path):
    write_tensors(tmp_path / "s.safetensors", {}, {"counts": {number: number for number in (2, 10, 1)}})
    assert read_tensors(tmp_path / "s.safetensors").meta == {"counts": {"2": 2, "10": 10, "1": 1}}


def test_a_resumed_round_finds_the_state_before_it_even_if_that_round_was_saved(tmp_path):
    store = VersionedStore(tmp_path)
    for round in (2, 5, 9):
        store.save(round, state(round))
    assert store.load(before=9)[0] == 5
    assert store.load(before=6)[1].group("weights")["w"][0] == 5
    assert store.load()[0] == 9
    assert store.load(before=2) is None


def test_a_version_that_was_overtaken_does_not_remove_what_overtook_it(tmp_path):
    store = VersionedStore(tmp_path)
    for round in (1, 2, 4):
        store.save(round, state(round))
    store.save(3, state(3), accepted=2)
    assert store.rounds() == [1, 2, 3, 4]
    store.drop_after(2)
    assert store.rounds() == [1, 2]


def test_versions_the_server_has_not_taken_in_do_not_push_out_those_it_has(tmp_path):
    store = VersionedStore(tmp_path, keep=2)
    for round in (1, 2, 3):
        store.save(round, state(round), accepted=round - 1)
    for round in (4, 5, 6, 7):  # all too late
        store.save(round, state(round), accepted=3)
    assert store.rounds() == [2, 3, 7]
    store.save(8, state(8), accepted=7)
    assert store.rounds() == [3, 7, 8]


def test_only_the_newest_versions_are_kept(tmp_path):
    store = VersionedStore(tmp_path, keep=2)
    for round in range(1, 6):
        store.save(round, state(round))
    assert store.rounds() == [4, 5]


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, None])
def test_a_damaged_version_is_said_and_the_previous_one_used(tmp_path, caplog, damage):
    store = VersionedStore(tmp_path)
    store.save(1, state(1))
    store.save(2, state(2))
    newest = tmp_path / "round-00002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert store.load()[0] == 1
    assert "round-00002.safetensors" in caplog.text


def test_a_writer_that_dies_leaves_the_old_file_whole(tmp_path):
    store = VersionedStore(tmp_path)
    store.save(1, state(1))
    (tmp_path / ".writing-abc").write_bytes(b"half")
    assert store.rounds() == [1]
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        store.save(1, State({"x": torch.zeros(1)}, {"unserialisable": object()}))
    assert store.load()[1].group("weights")["w"][0] == 1


@pytest.mark.programs
def test_a_folder_belongs_to_one_process_at_a_time(tmp_path):
    claim = (
        "import sys; from pathlib import Path; from fedprune_app.engine.store import exclusive\n"
        "with exclusive(Path(sys.argv[1]), patience_seconds=0.2): print('held')"
    )
    command = [sys.executable, "-c", claim, str(tmp_path)]
    with exclusive(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True)
    assert "in use by another process" in refused.stderr
    assert subprocess.run(command, capture_output=True, text=True).stdout == "held\n"


def test_a_tensor_may_stand_under_two_names(tmp_path):
    twice = torch.arange(3.0)
    write_tensors(tmp_path / "state", {"a": twice, "b": twice, "c": twice[:0]})
    found = read_tensors(tmp_path / "state").tensors
    assert torch.equal(found["a"], twice)
    assert torch.equal(found["b"], twice)


@pytest.mark.parametrize("meta", [{"a": {1, 2}}, {"a": {"b": object()}}, {1: 2, "a": 3}])
def test_values_that_are_no_json_are_named(tmp_path, meta):
    with pytest.raises(ValueError, match=r"^a state's meta cannot be written as JSON: .*; allowed: texts, numbers"):
        write_tensors(tmp_path / "state", {}, meta)
    assert not (tmp_path / "state").exists()
