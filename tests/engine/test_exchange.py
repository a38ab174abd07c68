"""The exchange over grids that misbehave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from fedprune_app import client_app
from fedprune_app.engine import replies, wire
from fedprune_app.engine.exchange import ReceivedReply, TooFewReplies, message_to, require, send_and_receive
from fedprune_app.engine.simulated_grid import InProcessGrid


@pytest.fixture(autouse=True)
def _task() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1


class ScriptedGrid(InProcessGrid):
    """Node ``n`` answers as ``script[n]`` says: a delay in seconds, "never", "error", "twice" or "refuse"."""

    def __init__(self, script: dict[int, object]) -> None:
        super().__init__(client_app.app, 1, {})
        self.script = script
        self.requests: dict[str, Message] = {}
        self.started = time.monotonic()
        self.pulls: list[int] = []

    def push_messages(self, messages):
        accepted = []
        for message in messages:
            message_id = f"m{len(self.requests)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.requests[message_id] = message
            if self.script[message.metadata.dst_node_id] != "refuse":
                accepted.append(message_id)
        return accepted

    def pull_messages(self, message_ids) -> Iterator[Message]:
        ids = list(message_ids)
        self.pulls.append(len(ids))
        for message_id in ids:
            request = self.requests[message_id]
            what = self.script[request.metadata.dst_node_id]
            reply = Message(wire.pack(None, {"node": request.metadata.dst_node_id}), reply_to=request)
            if what == "error":
                yield Message(Error(2, "Traceback\n  boom\nException: Message: my disk is full'>"), reply_to=request)
            elif what == "twice":
                yield reply
                yield reply
            elif isinstance(what, float) and time.monotonic() - self.started >= what:
                yield reply


def ask(grid: ScriptedGrid, deadline: float = 1.0) -> dict[int, ReceivedReply]:
    content = wire.pack(None, {"round": 1})
    messages = {node: message_to(node, content, MessageType.TRAIN, 1, 10) for node in grid.script}
    answers = list(send_and_receive(grid, messages.items(), deadline))
    assert len(answers) == len(grid.script), "each client is answered for exactly once"
    return {answer.client: answer for answer in answers}


class Restarting(ScriptedGrid):
    """A SuperLink that is started anew while the first ``restarts`` batches are uploaded forgets the uploads."""

    def __init__(self, restarts: int) -> None:
        super().__init__({1: 0.0, 2: 0.0})
        self.restarts = restarts

    def push_messages(self, messages):
        if self.restarts:
            self.restarts -= 1
            raise ObjectPushError("ab12", 1, "a session")
        return super().push_messages(messages)


def test_messages_whose_upload_a_restarted_superlink_forgot_are_sent_again():
    assert all(answer.content is not None for answer in ask(Restarting(1)).values())
    with pytest.raises(ObjectPushError):
        ask(Restarting(2))


def test_each_kind_of_failure_is_said_and_the_rest_arrives():
    answers = ask(ScriptedGrid({1: 0.0, 2: "error", 3: "never", 4: "twice", 5: "refuse", 6: 0.2}), deadline=0.6)
    assert [n for n, a in answers.items() if a.content is not None] == [1, 4, 6]
    assert answers[2].error == "my disk is full (error code 2)"
    assert answers[3].late
    assert answers[3].error == "no reply in 0.6 s"
    assert "did not accept" in answers[5].error
    assert answers[5].bytes_down == 0
    assert answers[1].bytes_down == answers[3].bytes_down > 0
    assert answers[1].bytes_up == wire.num_bytes(answers[1].content)


@pytest.mark.parametrize(
    "reason",
    [
        "<class 'RuntimeError'>:<'my disk is full'>",  # a SuperNode's
        "<class 'flwr.E'>:<'\nException <class 'RuntimeError'> occurred. Message: my disk is full'>",  # Ray's
        "<class 'a.b.ConfigError'>:<'two\nmy disk is full'>",
    ],
)
def test_a_client_s_error_is_said_in_its_own_words_on_every_engine(reason):
    assert replies.error_line(Error(2, reason)) == "my disk is full (error code 2)"


def test_a_reply_is_handed_on_before_slower_ones_have_come():
    grid = ScriptedGrid({1: 0.0, 2: 60.0})
    content = wire.pack(None, {"round": 1})
    messages = {node: message_to(node, content, MessageType.TRAIN, 1, 10) for node in grid.script}
    started = time.monotonic()
    first = next(iter(send_and_receive(grid, messages.items(), 90)))
    assert first.client == 1
    assert time.monotonic() - started < 60


def test_replies_are_asked_for_in_small_batches():
    grid = ScriptedGrid(dict.fromkeys(range(100), 0.0))
    ask(grid)
    assert max(grid.pulls) <= 32


def test_waiting_does_not_poll_in_a_tight_loop():
    grid = ScriptedGrid({1: "never"})
    ask(grid, deadline=1.0)
    assert len(grid.pulls) < 80


def test_too_few_replies_name_the_first_failure():
    require(2, 2, "round 3", [])
    with pytest.raises(TooFewReplies, match=r"round 3 had 1 good replies, .* asks for 2; first failure: x"):
        require(1, 2, "round 3", ["x", "y"])


class Window(ScriptedGrid):
    """Replies come so long after their message was sent; what is under way is weighed."""

    def __init__(self, script: dict[int, object]) -> None:
        super().__init__(script)
        self.sent_at: dict[str, float] = {}
        self.under_way: dict[str, int] = {}
        self.before_each: list[int] = []  # bytes under way when a message was sent
        self.num_made = 0
        self.asked_for: list[int] = []  # replies, per poll

    def push_messages(self, messages):
        messages = list(messages)
        accepted = super().push_messages(messages)
        for message in messages:
            message_id = message.metadata.message_id
            if message_id in accepted:
                self.before_each.append(sum(self.under_way.values()))
                self.under_way[message_id] = wire.num_bytes(message.content)
                self.sent_at[message_id] = time.monotonic()
        return accepted

    def pull_messages(self, message_ids) -> list[Message]:
        """A list, as Flower's Grids return."""
        ids, replies = list(message_ids), []
        self.asked_for.append(len(ids))
        for message_id in ids:
            self.started = self.sent_at[message_id]
            replies += super().pull_messages([message_id])
        for reply in replies:
            self.under_way.pop(reply.metadata.reply_to_message_id, None)
        return replies

    def messages(self, sizes: dict[int, int] | None = None) -> Iterator[tuple[int, Message]]:
        """To every node of the script, of about so many bytes."""
        for node in self.script:
            arrays = wire.from_bytes({"fp1": bytes((sizes or {}).get(node, 1000))})
            self.num_made += 1
            yield node, message_to(node, wire.pack(arrays, {}), MessageType.TRAIN, 1, 10)


SIZES = {node: 1000 + 700 * (node % 3) for node in range(40)}


def test_too_few_replies_without_a_failure_say_that_fewer_were_asked():
    with pytest.raises(TooFewReplies, match=r"^round 1 had 1 good replies, .* asks for 2; no reply failed: fewer"):
        require(1, 2, "round 1", [])


def test_a_message_is_made_only_when_there_is_room_for_it():
    grid = Window(dict.fromkeys(range(6), 0.0))
    answers = send_and_receive(grid, grid.messages(), 5, in_flight_bytes=2000)
    assert grid.num_made == 0
    for answered in range(1, 7):
        next(answers)
        assert grid.num_made <= answered + 1, "two have room at a time"
    assert grid.num_made == 6


@pytest.mark.parametrize("in_flight_bytes", [1, 3000, 20_000, 10**9])
def test_a_message_is_sent_only_while_what_is_under_way_weighs_less_than_the_limit(in_flight_bytes):
    """So one message may exceed it, the last one sent, and one that is larger than the limit travels alone."""
    grid = Window({node: 0.0 if node % 4 else 0.02 for node in SIZES})
    answers = list(send_and_receive(grid, grid.messages(SIZES), 5, in_flight_bytes))
    assert sorted(answer.client for answer in answers) == sorted(SIZES)
    assert all(answer.content is not None for answer in answers)
    assert max(grid.before_each) < in_flight_bytes
    if in_flight_bytes >= 20_000:
        assert max(grid.before_each) > min(in_flight_bytes, sum(SIZES.values())) - 3000, "the room is used"


@pytest.mark.full
@pytest.mark.parametrize("in_flight_bytes", [1, 5000, 10**9])
def test_with_and_without_room_each_client_is_answered_for_once(in_flight_bytes):
    kinds = (0.0, "error", "twice", "refuse", 0.05, "never")
    grid = Window({node: kinds[node % len(kinds)] for node in range(30)})
    answers = list(send_and_receive(grid, grid.messages(SIZES), 0.3, in_flight_bytes))
    assert sorted(answer.client for answer in answers) == list(range(30))
    by_node = {answer.client: answer for answer in answers}
    for node, what in grid.script.items():
        answer = by_node[node]
        assert answer.late == (what == "never")
        assert (answer.content is not None) == (what in (0.0, 0.05, "twice"))
        assert (answer.bytes_down == 0) == (what == "refuse")


def test_a_message_that_waited_for_room_has_all_of_its_time():
    grid = Window(dict.fromkeys(range(4), 0.2))
    started = time.monotonic()
    answers = list(send_and_receive(grid, grid.messages(), 0.5, in_flight_bytes=1))
    assert time.monotonic() - started > 0.7
    assert [answer.error for answer in answers] == [""] * 4


def test_a_message_that_waited_for_room_has_no_more_than_its_time():
    grid = Window({0: 0.3, 1: "never"})
    started = time.monotonic()
    answers = list(send_and_receive(grid, grid.messages(), 0.5, in_flight_bytes=1))
    assert [answer.late for answer in answers] == [False, True]
    assert 0.8 <= time.monotonic() - started < 1.6


def test_a_client_that_hangs_gives_its_room_to_the_others_when_its_time_is_up():
    grid = Window({0: "never", 1: 0.0, 2: "never", 3: 0.0})
    answers = list(send_and_receive(grid, grid.messages(), 0.2, in_flight_bytes=1))
    assert [(answer.client, answer.late) for answer in answers] == [(0, True), (1, False), (2, True), (3, False)]


def test_a_client_that_hangs_lets_the_others_pass_where_there_is_room_for_two():
    grid = Window({0: "never", **dict.fromkeys(range(1, 8), 0.0)})
    answers = list(send_and_receive(grid, grid.messages(), 1.0, in_flight_bytes=1500))
    assert [answer.client for answer in answers] == [*range(1, 8), 0]
    assert [answer.late for answer in answers] == [False] * 7 + [True]


def test_a_node_that_refuses_its_message_takes_no_room():
    grid = Window({**dict.fromkeys(range(20), "refuse"), 20: 0.0})
    answers = list(send_and_receive(grid, grid.messages(), 5, in_flight_bytes=1))
    assert [answer.client for answer in answers] == list(range(21))
    assert max(grid.before_each) == 0


def test_replies_to_large_messages_are_asked_for_in_smaller_batches(monkeypatch):
    monkeypatch.setattr(replies, "_BATCH_BYTES", 5000)
    grid = Window(dict.fromkeys(range(20), 0.05))
    list(send_and_receive(grid, grid.messages(), 5))
    assert max(grid.asked_for) == 4


def test_an_error_in_making_a_message_is_not_swallowed():
    grid = Window({0: 0.0, 1: 0.0})

    def messages() -> Iterator[tuple[int, Message]]:
        yield next(grid.messages())
        raise ValueError("state file 'x' is damaged")

    with pytest.raises(ValueError, match="state file 'x' is damaged"):
        list(send_and_receive(grid, messages(), 5, in_flight_bytes=1))


def test_a_reply_that_came_while_the_server_was_busy_is_not_late():
    grid = Window({0: 0.0, 1: 0.2})
    answers = send_and_receive(grid, grid.messages(), 0.5)
    first = next(answers)
    time.sleep(0.7)  # taking in the first takes longer than the second may
    assert [first.late, *(answer.late for answer in answers)] == [False, False]


def test_large_replies_to_small_messages_are_asked_for_in_smaller_batches(monkeypatch):
    monkeypatch.setattr(replies, "_BATCH_BYTES", 50_000)
    grid = Window(dict.fromkeys(range(20), 0.05))
    list(send_and_receive(grid, grid.messages(), 5, reply_bytes=10_000))
    assert max(grid.asked_for) == 5


# --- waiting for clients ----------------------------------------------------------------------------------------------


class QueueingGrid(ScriptedGrid):
    """One worker takes the messages one after the other; ``script`` has each one's virtual seconds, or "never"."""

    def __init__(self, script: dict[int, object]) -> None:
        super().__init__(script)
        self.now, self.queue, self.at_work, self.done, self.forgotten = 0.0, [], {}, [], []

    def push_messages(self, messages):
        accepted = super().push_messages(messages)
        self.queue += accepted
        self._begin()
        return accepted

    def _begin(self) -> None:
        if self.queue and not self.at_work:
            self.at_work[self.queue.pop(0)] = self.now

    def wait_for_reply(self, seconds: float) -> None:
        self.now += seconds
        for message_id, since in list(self.at_work.items()):
            needed = self.script[self.requests[message_id].metadata.dst_node_id]
            if needed != "never" and self.now - since >= needed:
                del self.at_work[message_id]
                self.done.append(message_id)
                self._begin()

    def begun(self):
        return dict(self.at_work)

    def discard(self, message_ids) -> None:
        self.forgotten += message_ids
        self.queue = [message_id for message_id in self.queue if message_id not in message_ids]

    def pull_messages(self, message_ids) -> Iterator[Message]:
        for message_id in set(message_ids) & set(self.done):
            self.done.remove(message_id)
            request = self.requests[message_id]
            yield Message(wire.pack(None, {"node": request.metadata.dst_node_id}), reply_to=request)


def ask_in_virtual_time(
    monkeypatch, script: dict[int, object], deadline: float
) -> tuple[QueueingGrid, dict[int, ReceivedReply]]:
    grid = QueueingGrid(script)
    monkeypatch.setattr("fedprune_app.engine.exchange.time", SimpleNamespace(monotonic=lambda: grid.now, sleep=None))
    return grid, ask(grid, deadline)


def test_the_time_of_a_simulated_client_begins_with_its_turn(monkeypatch):
    grid, answers = ask_in_virtual_time(monkeypatch, dict.fromkeys(range(1, 9), 3.0), deadline=5.0)
    assert not any(answer.late for answer in answers.values())
    assert grid.now >= 24
    assert grid.forgotten == []


def test_a_client_that_takes_too_long_is_late_and_those_behind_it_are_not(monkeypatch):
    _, answers = ask_in_virtual_time(monkeypatch, {1: 3.0, 2: 5.5, 3: 3.0, 4: 3.0}, deadline=5.0)
    assert {client: answer.late for client, answer in answers.items()} == {1: False, 2: True, 3: False, 4: False}


def test_a_worker_that_hangs_makes_nobody_wait_without_end(monkeypatch):
    grid, answers = ask_in_virtual_time(monkeypatch, {1: 3.0, 2: "never", 3: 3.0, 4: 3.0}, deadline=5.0)
    assert {client: answer.late for client, answer in answers.items()} == {1: False, 2: True, 3: True, 4: True}
    assert grid.now < 3 + 2 * 5 + 1
    assert sorted(grid.forgotten) == ["m1", "m2", "m3"]
    assert grid.queue == []
