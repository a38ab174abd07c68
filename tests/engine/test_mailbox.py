"""Letters go in and out unread; the disk is as unreliable as it may be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.mailbox import Mailbox

ROOM = 10**6


def letter(number: int = 0) -> wire.EncodedArrays:
    """All of one size, no two the same."""
    tensors = {"w": torch.full((20, 50), float(number)), "b": torch.arange(3.0)}
    return wire.to_arrays(Payload.pruned(tensors, {"w": torch.arange(1000).reshape(20, 50) % 3 == 0}))


SIZE = sum(map(len, wire.to_bytes(letter()).values()))


@pytest.fixture
def box(tmp_path: Path) -> Mailbox:
    return Mailbox(tmp_path / "mailbox")


def reopened(box: Mailbox, cache_bytes: int = ROOM) -> Mailbox:
    return Mailbox(box.folder, cache_bytes)


def content(box: Mailbox, partition: int, round: int) -> dict[str, bytes]:
    return wire.to_bytes(box.get(partition, round))


@pytest.mark.parametrize("data", [b"any bytes, for nobody reads them", bytes(range(256)), b"\xff" * 1001, b""])
def test_what_was_put_comes_back_byte_for_byte_also_from_disk(box, data):
    box.put(7, 3, wire.from_bytes({"fp1": data}), ROOM)
    assert content(box, 7, 3) == content(reopened(box), 7, 3) == {"fp1": data}


def test_a_letter_comes_back_as_the_payload_it_was(box):
    box.put(0, 1, letter(4), ROOM)
    assert wire.from_arrays(reopened(box).get(0, 1), ROOM).digest() == wire.from_arrays(letter(4), ROOM).digest()


def test_a_letter_is_put_as_it_came_off_the_network(box):
    """There it is a plain record, not one of ours that knows its size."""
    box.put(0, 1, ArrayRecord(dict(letter(4).items())), ROOM)
    assert content(box, 0, 1) == wire.to_bytes(letter(4))


def test_every_client_and_round_has_its_own_letter(box):
    keys = [(partition, round) for partition in (0, 1, 10) for round in (1, 2, 12)]
    for number, (partition, round) in enumerate(keys):
        box.put(partition, round, letter(number), ROOM)
    for number, (partition, round) in reversed(list(enumerate(keys))):
        assert content(box, partition, round) == wire.to_bytes(letter(number))


def test_a_resumed_run_finds_the_letters_that_its_checkpoint_names(box):
    """Checkpoints go back two rounds, so a letter is still there when its sender has sent two more."""
    for round in (4, 6, 7):
        box.put(0, round, letter(round), ROOM)
    assert [content(reopened(box), 0, round) for round in (4, 6, 7)] == [wire.to_bytes(letter(r)) for r in (4, 6, 7)]


def test_the_disk_holds_three_letters_of_a_client_however_long_the_run(box):
    for round in range(1, 10):
        for partition in (0, 1):
            box.put(partition, round, letter(round), ROOM)
    assert len([path for path in box.folder.rglob("*") if path.is_file()]) == 6
    with pytest.raises(ValueError, match="round-00006"):
        box.get(1, 6)


def test_an_abandoned_future_is_forgotten_and_the_past_is_not(box):
    for partition, rounds in ((0, (1, 2, 3)), (1, (2,)), (2, (3,))):
        for round in rounds:
            box.put(partition, round, letter(round), ROOM)
    again = reopened(box)
    again.drop_after(2)
    for partition, round in ((0, 1), (0, 2), (1, 2)):
        assert content(again, partition, round) == wire.to_bytes(letter(round))
    for partition in (0, 2):
        with pytest.raises(ValueError, match="round-00003"):
            again.get(partition, 3)


def test_a_mailbox_that_nobody_wrote_to_has_no_future_to_forget(box):
    box.drop_after(0)
    assert not box.folder.exists()


@pytest.mark.parametrize("damage", [None, b"", b"\xff" * 100, "cut", "missing"])
def test_a_letter_that_cannot_be_read_is_one_line_that_names_its_file(box, damage):
    box.put(3, 5, letter(), ROOM)
    (path,) = box.folder.rglob("*.safetensors")
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage is not None:
        path.write_bytes(damage)
    if damage is None:
        assert content(reopened(box), 3, 5) == wire.to_bytes(letter())
        return
    with pytest.raises(ValueError, match=r"00003/round-00005\.safetensors' is damaged") as caught:
        reopened(box).get(3, 5)
    assert "\n" not in str(caught.value)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_letter_of_more_bytes_than_its_model_is_refused_and_leaves_nothing(box):
    with pytest.raises(ValueError, match=f"has {SIZE} bytes, allowed: at most {SIZE - 1}"):
        box.put(0, 1, letter(), SIZE - 1)
    assert not box.folder.exists()
    box.put(0, 1, letter(), SIZE)


@pytest.mark.parametrize(
    "array",
    [
        Array("uint8", (3,), "numpy.ndarray", b"abc"),
        Array("float32", (3,), "fedprune.codec", b"abc"),
        Array("uint8", (3,), "", b"abc"),
    ],
)
def test_arrays_that_no_codec_made_are_refused_and_leave_the_letter_before(box, array):
    box.put(0, 1, letter(), ROOM)
    with pytest.raises(ValueError, match="array 'fp1' is of type"):
        box.put(0, 2, ArrayRecord({"fp1": array}), ROOM)
    assert content(reopened(box), 0, 1) == wire.to_bytes(letter())
    with pytest.raises(ValueError, match="round-00002"):
        box.get(0, 2)


# --- what stays in memory ---------------------------------------------------------------------------------------------


def remembered(box: Mailbox, reads: list[int], cache_bytes: int) -> list[int]:
    """Whose letters a mailbox still has in memory after these reads: those that outlive their files."""
    box = reopened(box, cache_bytes)
    for partition in reads:
        assert content(box, partition, 1) == wire.to_bytes(letter(partition))
    shutil.rmtree(box.folder)
    found = []
    for partition in sorted(set(reads)):
        try:
            assert content(box, partition, 1) == wire.to_bytes(letter(partition))
            found.append(partition)
        except ValueError:
            pass
    return found


@pytest.mark.parametrize(
    ("reads", "stay"),
    [
        ([0, 1, 2], [1, 2]),
        ([0, 1, 0, 2], [0, 2]),  # used last, not put in last
        ([0, 0, 0, 0, 1], [0, 1]),  # reading again takes no more room
        ([0, 1, 2, 3, 0, 1, 2, 3, 4], [3, 4]),  # what left gave its room back
        ([4, 3, 4, 0, 4, 1], [1, 4]),
    ],
)
def test_the_letters_read_last_stay_in_memory_as_far_as_there_is_room(box, reads, stay):
    for partition in range(5):
        box.put(partition, 1, letter(partition), ROOM)
    assert remembered(box, reads, cache_bytes=2 * SIZE + SIZE // 2) == stay


@pytest.mark.parametrize(("cache_bytes", "count"), [(3 * SIZE, 3), (3 * SIZE - 1, 2), (SIZE, 1)])
def test_the_letters_in_memory_never_exceed_their_bound(box, cache_bytes, count):
    for partition in range(5):
        box.put(partition, 1, letter(partition), ROOM)
    assert len(remembered(box, [0, 1, 2, 3, 4], cache_bytes)) == count


def test_a_letter_larger_than_all_of_the_room_can_be_read(box):
    box.put(0, 1, letter(), ROOM)
    assert remembered(box, [0, 0], cache_bytes=SIZE - 1) in ([], [0])


def test_a_letter_for_many_is_measured_once(box, monkeypatch):
    box.put(0, 1, letter(), ROOM)
    measured = []
    real = wire.recorddict_to_proto
    monkeypatch.setattr(wire, "recorddict_to_proto", lambda record: measured.extend(record) or real(record))
    for _ in range(3):
        assert box.get(0, 1).item_bytes("letter/0") > SIZE
    assert measured == ["letter/0"]


@pytest.mark.parametrize("names", [[], ["__metadata__"], ["fp1", "more"], ["fp2"]])
def test_a_letter_whose_arrays_no_file_could_hold_is_refused_before_it_is_kept(tmp_path, names):
    with pytest.raises(ValueError, match="allowed: exactly 'fp1'"):
        Mailbox(tmp_path).put(0, 1, wire.from_bytes(dict.fromkeys(names, b"abc")), ROOM)


def test_a_letter_that_was_read_does_not_outlive_its_round_or_its_successor(tmp_path):
    box = Mailbox(tmp_path)
    for round in (1, 2):
        box.put(0, round, letter(round), ROOM)
        box.get(0, round)
    box.drop_after(1)
    with pytest.raises(ValueError, match="round-00002"):
        box.get(0, 2)
    box.put(0, 1, letter(9), ROOM)
    assert wire.to_bytes(box.get(0, 1)) == wire.to_bytes(letter(9))
