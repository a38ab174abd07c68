"""What clients of a run in one process leave to threads: a reply still means that all of it is done."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedprune_app.core.payload import Payload
from fedprune_app.engine import background, wire
from fedprune_app.engine.background import begin_work, finished, hold, save_state, to_arrays
from fedprune_app.engine.exchange import message_to
from fedprune_app.engine.flower_private import SUPERLINK_NODE_ID
from fedprune_app.engine.store import State, VersionedStore

PAYLOAD = Payload.pruned({"w": torch.arange(6.0)}, {"w": torch.tensor([True, False] * 3)})


def state(value: float, size: int = 3) -> State:
    return State({"w": torch.full((size,), value), "b": torch.ones(2, dtype=torch.bool)}, {"pair": (1, 2)})


def reply_of_a_client(*work: Future) -> Message:
    message = message_to(1, RecordDict(), MessageType.TRAIN, 1, 60.0)
    reply = Message(RecordDict(), reply_to=message)
    begin_work()
    background._work.get().extend(work)
    hold(reply, message)
    return reply


@pytest.fixture(autouse=True)
def _a_run_in_this_process():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    with background.background():
        begin_work()
        yield


def test_while_a_clients_work_goes_on_the_next_clients_train():
    work, seen = Future(), []

    def replies():
        yield reply_of_a_client(work)
        seen.append("the second client trains")
        work.set_result(None)
        yield reply_of_a_client()

    arriving = finished(replies())
    next(arriving)
    assert seen == ["the second client trains"]
    assert len(list(arriving)) == 1


def test_no_more_replies_are_held_than_fit(monkeypatch):
    monkeypatch.setattr(background, "_MOST_HELD", 2)
    work, fetched = Future(), []

    def replies():
        for number in range(5):
            fetched.append(number)
            yield reply_of_a_client(work)

    threading.Timer(0.05, work.set_result, [None]).start()
    next(finished(replies()))
    assert fetched == [0, 1, 2]


def test_work_that_failed_makes_the_reply_an_error():
    work = Future()
    work.set_exception(OSError("No space left on device"))
    (reply,) = finished([reply_of_a_client(work)])
    assert reply.error.reason == "OSError: No space left on device"


def test_a_client_may_go_on_to_use_the_tensors_that_it_sent_and_kept(tmp_path):
    expected = wire.to_arrays(PAYLOAD)
    tensors = {"w": PAYLOAD.tensors["w"].clone()}
    holding = threading.Event()
    for _ in range(background.os.cpu_count() or 1):  # all threads are busy until the tensors have changed
        background._background.get().submit(holding.wait)
    try:
        arrays = to_arrays(Payload(tensors, PAYLOAD.masks))
        sent = message_to(1, wire.pack(arrays, {}), MessageType.TRAIN, 1, 60.0)  # a message waits for no thread
        save_state(VersionedStore(tmp_path), 1, State(tensors), 0, durable=False)
        tensors["w"].zero_()
    finally:
        holding.set()
    assert wire.to_bytes(wire.arrays_of(sent.content)) == wire.to_bytes(expected)
    assert wire.num_bytes(sent.content) == wire.num_bytes(wire.pack(expected, {}))
    for future in background._work.get():
        future.result()
    assert torch.equal(VersionedStore(tmp_path).read(1).tensors["w"], PAYLOAD.tensors["w"])


def test_what_is_too_large_to_copy_is_done_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "_MOST_COPIED", 4)
    save_state(VersionedStore(tmp_path), 1, state(1.0), 0, durable=False)
    assert wire.to_bytes(to_arrays(PAYLOAD)) == wire.to_bytes(wire.to_arrays(PAYLOAD))
    assert VersionedStore(tmp_path).rounds() == [1]
    assert background._work.get() == []


def test_a_run_that_ends_early_leaves_no_thread_that_writes(tmp_path):
    versions = VersionedStore(tmp_path)

    def run():
        for round in range(1, 100):
            save_state(versions, round, state(1.0), 0, durable=False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), background.background():
        run()
    assert all(future.done() for future in background._work.get())
