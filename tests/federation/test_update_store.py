"""Letters go in and out unread; the disk is as unreliable as it may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.federation import update_store
from fedprune_app.federation.update_store import UpdateStore

ROOM = 10**6


def update(number: int = 0) -> ArrayRecord:
    """All of one size, no two the same."""
    tensors = {"w": torch.full((20, 50), float(number)), "b": torch.arange(3.0)}
    return wire.to_arrays(Payload.pruned(tensors, {"w": torch.arange(1000).reshape(20, 50) % 3 == 0}))


SIZE = sum(map(len, wire.to_bytes(update()).values()))


@pytest.fixture
def store(tmp_path: Path) -> UpdateStore:
    return UpdateStore(tmp_path / "peers")


def reopened(store: UpdateStore) -> UpdateStore:
    store.settle()
    return UpdateStore(store.folder)


def content(store: UpdateStore, client: int, round: int) -> dict[str, bytes]:
    return wire.to_bytes(store.get(client, round))


@pytest.mark.parametrize("data", [b"any bytes, for nobody reads them", bytes(range(256)), b"\xff" * 1001, b""])
def test_what_was_put_comes_back_byte_for_byte_also_from_disk(store, data):
    store.put(7, 3, wire.from_bytes({"fp1": data}), ROOM)
    assert content(store, 7, 3) == content(reopened(store), 7, 3) == {"fp1": data}


def test_an_update_comes_back_as_the_payload_it_was(store):
    store.put(0, 1, update(4), ROOM)
    assert wire.from_arrays(reopened(store).get(0, 1), ROOM).digest() == wire.from_arrays(update(4), ROOM).digest()


def test_an_update_is_put_as_it_came_off_the_network(store):
    """There it is a plain record, not one of ours that knows its size."""
    store.put(0, 1, ArrayRecord(dict(update(4).items())), ROOM)
    assert content(store, 0, 1) == wire.to_bytes(update(4))


def test_every_client_and_round_has_its_own_update(store):
    keys = [(client, round) for client in (0, 1, 10) for round in (1, 2, 12)]
    for number, (client, round) in enumerate(keys):
        store.put(client, round, update(number), ROOM)
    for number, (client, round) in reversed(list(enumerate(keys))):
        assert content(store, client, round) == wire.to_bytes(update(number))


def test_a_resumed_run_finds_the_updates_that_its_checkpoint_names(store):
    """Checkpoints go back two rounds, so an update is still there when its sender has sent two more."""
    for round in (4, 6, 7):
        store.put(0, round, update(round), ROOM)
    assert [content(reopened(store), 0, round) for round in (4, 6, 7)] == [wire.to_bytes(update(r)) for r in (4, 6, 7)]


def test_the_disk_holds_three_updates_of_a_client_however_long_the_run(store):
    for round in range(1, 10):
        for client in (0, 1):
            store.put(client, round, update(round), ROOM)
    store.settle()
    assert len([path for path in store.folder.rglob("*") if path.is_file()]) == 6
    with pytest.raises(ValueError, match="round-00006"):
        store.get(1, 6)


def test_an_abandoned_future_is_forgotten_and_the_past_is_not(store):
    for client, rounds in ((0, (1, 2, 3)), (1, (2,)), (2, (3,))):
        for round in rounds:
            store.put(client, round, update(round), ROOM)
    again = reopened(store)
    again.drop_after(2)
    for client, round in ((0, 1), (0, 2), (1, 2)):
        assert content(again, client, round) == wire.to_bytes(update(round))
    for client in (0, 2):
        with pytest.raises(ValueError, match="round-00003"):
            again.get(client, 3)


def test_a_store_that_nobody_wrote_to_has_no_future_to_forget(store):
    store.drop_after(0)
    assert not store.folder.exists()


@pytest.mark.parametrize("damage", [None, b"", b"\xff" * 100, "cut", "missing"])
def test_an_update_that_cannot_be_read_is_one_line_that_names_its_file(store, damage):
    store.put(3, 5, update(), ROOM)
    store.settle()
    (path,) = store.folder.rglob("*.safetensors")
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage is not None:
        path.write_bytes(damage)
    if damage is None:
        assert content(reopened(store), 3, 5) == wire.to_bytes(update())
        return
    with pytest.raises(ValueError, match=r"00003/round-00005\.safetensors' is damaged") as caught:
        reopened(store).get(3, 5)
    assert "\n" not in str(caught.value)


def test_an_update_that_cannot_be_written_is_an_error_before_anything_relies_on_it(store):
    (store.folder / "00001").parent.mkdir()
    (store.folder / "00001").write_text("a file where the folder has to be")
    for client in range(3):
        store.put(client, 1, update(client), ROOM)
    with pytest.raises(FileExistsError, match="00001"):
        store.settle()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_update_of_more_bytes_than_its_model_is_refused_and_leaves_nothing(store):
    with pytest.raises(ValueError, match=f"has {SIZE} bytes, allowed: at most {SIZE - 1}"):
        store.put(0, 1, update(), SIZE - 1)
    assert not store.folder.exists()
    store.put(0, 1, update(), SIZE)


@pytest.mark.parametrize(
    "array",
    [
        Array("uint8", (3,), "numpy.ndarray", b"abc"),
        Array("float32", (3,), "fedprune.codec", b"abc"),
        Array("uint8", (3,), "", b"abc"),
    ],
)
def test_arrays_that_no_codec_made_are_refused_and_leave_the_update_before(store, array):
    store.put(0, 1, update(), ROOM)
    with pytest.raises(ValueError, match="array 'fp1' is of type"):
        store.put(0, 2, ArrayRecord({"fp1": array}), ROOM)
    assert content(reopened(store), 0, 1) == wire.to_bytes(update())
    with pytest.raises(ValueError, match="round-00002"):
        store.get(0, 2)


@pytest.mark.parametrize("names", [[], ["__metadata__"], ["fp1", "more"], ["fp2"]])
def test_an_update_whose_arrays_no_file_could_hold_is_refused_before_it_is_kept(tmp_path, names):
    with pytest.raises(ValueError, match="allowed: exactly 'fp1'"):
        UpdateStore(tmp_path).put(0, 1, wire.from_bytes(dict.fromkeys(names, b"abc")), ROOM)


# --- what stays in memory ---------------------------------------------------------------------------------------------


def test_decoded_updates_are_remembered_within_the_bound(tmp_path):
    decoded = wire.from_arrays(update(), ROOM)
    size = sum(t.nbytes for t in (*decoded.tensors.values(), *decoded.masks.values()))
    store = UpdateStore(tmp_path, decoded_bytes=2 * size)
    for client in range(3):
        store.remember(client, 1, decoded)
    assert [store.remembered(client, 1) is decoded for client in range(4)] == [True, True, False, False]
    store.forget_all_but({0: 2, 1: 1, 2: 1})
    store.remember(0, 2, decoded)
    store.remember(2, 1, decoded)
    assert [store.remembered(*key) is decoded for key in ((0, 1), (0, 2), (1, 1), (2, 1))] == [False, True, True, False]


def test_in_a_container_a_quarter_of_its_memory_is_for_decoded_updates(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(update_store, "_CONTAINER_LIMIT", limit)
    without = UpdateStore(tmp_path).decoded_bytes
    for written, expected in (("max\n", without), (f"{2**28}\n", 2**26)):
        limit.write_text(written)
        assert UpdateStore(tmp_path).decoded_bytes == expected
