"""The exchange over grids that misbehave."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from fedprune_app import client_app
from fedprune_app.config import DEFAULTS
from fedprune_app.engine import replies, rounds, wire
from fedprune_app.engine.inprocess import InProcessGrid
from tests.conftest import tampered_app

KEY = "0123456789abcdef"


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


def ask(grid: ScriptedGrid, deadline: float = 1.0) -> dict[int, rounds.Answer]:
    content = wire.pack(None, {"round": 1})
    messages = {node: rounds.message_to(node, content, MessageType.TRAIN, 1, 10) for node in grid.script}
    answers = list(rounds.exchange(grid, messages.items(), deadline))
    assert len(answers) == len(grid.script), "each client is answered for exactly once"
    return {answer.partition: answer for answer in answers}


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
    grid = ScriptedGrid({1: 0.0, 2: 0.5})
    content = wire.pack(None, {"round": 1})
    messages = {node: rounds.message_to(node, content, MessageType.TRAIN, 1, 10) for node in grid.script}
    started = time.monotonic()
    first = next(iter(rounds.exchange(grid, messages.items(), 5)))
    assert first.partition == 1
    assert time.monotonic() - started < 0.4


def test_replies_are_asked_for_in_small_batches():
    grid = ScriptedGrid(dict.fromkeys(range(100), 0.0))
    ask(grid)
    assert max(grid.pulls) <= 32


def test_waiting_does_not_poll_in_a_tight_loop():
    grid = ScriptedGrid({1: "never"})
    ask(grid, deadline=1.0)
    assert len(grid.pulls) < 80


def test_too_few_replies_name_the_first_failure():
    rounds.require(2, 2, "round 3", [])
    with pytest.raises(rounds.TooFewReplies, match=r"round 3 had 1 good replies, .* asks for 2; first failure: x"):
        rounds.require(1, 2, "round 3", ["x", "y"])


def test_the_roster_is_in_partition_order_whatever_the_node_ids():
    grid = InProcessGrid(client_app.app, 5, DEFAULTS)
    roster, left_out = rounds.gather_roster(grid, 30, KEY)
    assert left_out == []
    assert list(roster) == [0, 1, 2, 3, 4]
    assert [peer.node_id for peer in roster.values()] != sorted(peer.node_id for peer in roster.values())
    assert sum(peer.num_examples for peer in roster.values()) + sum(
        sum(peer.label_counts["validation"]) for peer in roster.values()
    ) == sum(sum(peer.label_counts[part]) for peer in roster.values() for part in ("train", "validation"))
    assert roster[0].image_shape == (1, 8, 8)


def test_a_node_that_cannot_start_is_left_out_with_its_reason():
    grid = InProcessGrid(client_app.app, 3, DEFAULTS)
    lost = next(node for node, context in grid._contexts.items() if context.node_config["partition-id"] == 1)
    grid._contexts[lost].run_config["dataset"] = "mnist"
    roster, left_out = rounds.gather_roster(grid, 30, KEY)
    assert list(roster) == [0, 2]
    assert len(left_out) == 1
    assert "data-dir" in left_out[0]


def introduced(*said: tuple[int, dict[str, object]], clients: int = 4):
    """The roster, and who is left out of it, where these partitions say this of themselves."""

    def lie(request, reply, partition):
        reply.content["fields"].update(dict(said).get(partition, {}))
        return reply

    return rounds.gather_roster(InProcessGrid(tampered_app(query=lie), clients, DEFAULTS), 30, KEY)


def test_two_nodes_of_one_partition_are_both_left_out_and_the_others_go_on():
    roster, left_out = introduced((3, {"partition": 1}))
    assert list(roster) == [0, 2]
    assert len(left_out) == 2
    assert all("and another claim partition-id 1, allowed: one each" in reason for reason in left_out)


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ({"image-shape": [3, 32, 32]}, "has images (3, 32, 32) of 10 classes, allowed: as most have, (1, 8, 8) of 10"),
        ({"image-shape": [4096, 4096, 4096]}, "field 'image-shape' is"),
        ({"image-shape": [1, 4096, 4096], "num-classes": 10**6, "labels-train": []}, "field 'image-shape' is"),
        ({"num-classes": 10**5}, "field 'labels-train' is"),
        ({"labels-train": [1] * 2_000_000}, "field 'labels-train' is"),
        ({"labels-test": ["\x1b[2J" * 10**5] * 10}, "field 'labels-test' is"),
        ({"labels-test": ["\x1b[2J" * 10**6] * 10}, "its reply is refused: it has 1 records and 40000"),
        ({"classes": ["x"] * 10**6}, "field 'classes' is"),
        ({"num-examples": 0}, "field 'num-examples' is 0"),
        ({"num-examples": "9" * 10**6}, "field 'num-examples' is '999"),
        ({"partition": 2**40}, "field 'partition' is"),
        ({"capacity": math.nan}, "field 'capacity' is nan"),
        ({"own-data": True, "partition": 99}, "says that it is 99, allowed: its"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_who_says_of_itself_what_cannot_be_is_left_out_alone(lie, says):
    roster, left_out = introduced((0, lie))
    assert list(roster) == [1, 2, 3]
    (reason,) = left_out
    assert says in reason
    assert len(reason) < 600
    assert reason.isprintable()


def text_client(partition: int, **said) -> rounds.TextPeer:
    fields = {"partition": partition, "num-examples": 5, "shell-digest": "s", "layer-digests": ["a", "b"]}
    return rounds.TextPeer.read(partition, {**fields, **{key.replace("_", "-"): value for key, value in said.items()}})


def test_what_clients_of_text_say_is_bounded():
    assert text_client(1).unlike(text_client(2, layer_digests=["c"], shell_digest="t")) == ""  # not theirs to decide
    with pytest.raises(ValueError, match=r"field 'documents' is .*, allowed: at most 64 texts"):
        text_client(0, documents=["x"] * 10**6)
    with pytest.raises(ValueError, match=r"field 'layer-digests' is .*, allowed: at most 1024 texts"):
        text_client(0, layer_digests=["x"] * 10**6)


@pytest.mark.parametrize("partition", [None, "1", -1, 2])
def test_a_node_without_a_proper_partition_is_told_so(partition):
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    for context in grid._contexts.values():
        context.node_config["partition-id"] = partition
    with pytest.raises(rounds.TooFewReplies, match="node-config has partition-id"):
        rounds.gather_roster(grid, 30, KEY)


@pytest.mark.parametrize("key", ["", "../../etc", "0123456789abcdeg", "0" * 17])
def test_a_client_writes_nowhere_on_a_key_that_is_none(key):
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    with pytest.raises(rounds.TooFewReplies, match="run-key is"):
        rounds.gather_roster(grid, 30, key)


def test_a_federation_without_clients_is_refused():
    with pytest.raises(ValueError, match="num-supernodes is 0"):
        InProcessGrid(client_app.app, 0, DEFAULTS)


# --- a window of messages ---------------------------------------------------------------------------------------------


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
            yield node, rounds.message_to(node, wire.pack(arrays, {}), MessageType.TRAIN, 1, 10)


SIZES = {node: 1000 + 700 * (node % 3) for node in range(40)}


def test_a_message_is_made_only_when_there_is_room_for_it():
    grid = Window(dict.fromkeys(range(6), 0.0))
    answers = rounds.exchange(grid, grid.messages(), 5, in_flight_bytes=2000)
    assert grid.num_made == 0
    for answered in range(1, 7):
        next(answers)
        assert grid.num_made <= answered + 1, "two have room at a time"
    assert grid.num_made == 6


@pytest.mark.parametrize("in_flight_bytes", [1, 3000, 20_000, 10**9])
def test_a_message_is_sent_only_while_what_is_under_way_weighs_less_than_the_limit(in_flight_bytes):
    """So one message may exceed it, the last one sent, and one that is larger than the limit travels alone."""
    grid = Window({node: 0.0 if node % 4 else 0.02 for node in SIZES})
    answers = list(rounds.exchange(grid, grid.messages(SIZES), 5, in_flight_bytes))
    assert sorted(answer.partition for answer in answers) == sorted(SIZES)
    assert all(answer.content is not None for answer in answers)
    assert max(grid.before_each) < in_flight_bytes
    if in_flight_bytes >= 20_000:
        assert max(grid.before_each) > min(in_flight_bytes, sum(SIZES.values())) - 3000, "the room is used"


@pytest.mark.parametrize("in_flight_bytes", [1, 5000, 10**9])
def test_with_and_without_room_each_client_is_answered_for_once(in_flight_bytes):
    kinds = (0.0, "error", "twice", "refuse", 0.05, "never")
    grid = Window({node: kinds[node % len(kinds)] for node in range(30)})
    answers = list(rounds.exchange(grid, grid.messages(SIZES), 0.3, in_flight_bytes))
    assert sorted(answer.partition for answer in answers) == list(range(30))
    by_node = {answer.partition: answer for answer in answers}
    for node, what in grid.script.items():
        answer = by_node[node]
        assert answer.late == (what == "never")
        assert (answer.content is not None) == (what in (0.0, 0.05, "twice"))
        assert (answer.bytes_down == 0) == (what == "refuse")


def test_a_message_that_waited_for_room_has_all_of_its_time():
    grid = Window(dict.fromkeys(range(4), 0.2))
    started = time.monotonic()
    answers = list(rounds.exchange(grid, grid.messages(), 0.5, in_flight_bytes=1))
    assert time.monotonic() - started > 0.7
    assert [answer.error for answer in answers] == [""] * 4


def test_a_message_that_waited_for_room_has_no_more_than_its_time():
    grid = Window({0: 0.3, 1: "never"})
    started = time.monotonic()
    answers = list(rounds.exchange(grid, grid.messages(), 0.5, in_flight_bytes=1))
    assert [answer.late for answer in answers] == [False, True]
    assert 0.8 <= time.monotonic() - started < 1.6


def test_a_client_that_hangs_gives_its_room_to_the_others_when_its_time_is_up():
    grid = Window({0: "never", 1: 0.0, 2: "never", 3: 0.0})
    answers = list(rounds.exchange(grid, grid.messages(), 0.2, in_flight_bytes=1))
    assert [(answer.partition, answer.late) for answer in answers] == [(0, True), (1, False), (2, True), (3, False)]


def test_a_client_that_hangs_lets_the_others_pass_where_there_is_room_for_two():
    grid = Window({0: "never", **dict.fromkeys(range(1, 8), 0.0)})
    answers = list(rounds.exchange(grid, grid.messages(), 1.0, in_flight_bytes=1500))
    assert [answer.partition for answer in answers] == [*range(1, 8), 0]
    assert [answer.late for answer in answers] == [False] * 7 + [True]


def test_a_node_that_refuses_its_message_takes_no_room():
    grid = Window({**dict.fromkeys(range(20), "refuse"), 20: 0.0})
    answers = list(rounds.exchange(grid, grid.messages(), 5, in_flight_bytes=1))
    assert [answer.partition for answer in answers] == list(range(21))
    assert max(grid.before_each) == 0


def test_replies_to_large_messages_are_asked_for_in_smaller_batches(monkeypatch):
    monkeypatch.setattr(replies, "_BATCH_BYTES", 5000)
    grid = Window(dict.fromkeys(range(20), 0.05))
    list(rounds.exchange(grid, grid.messages(), 5))
    assert max(grid.asked_for) == 4


def test_an_error_in_making_a_message_is_not_swallowed():
    grid = Window({0: 0.0, 1: 0.0})

    def messages() -> Iterator[tuple[int, Message]]:
        yield next(grid.messages())
        raise ValueError("state file 'x' is damaged")

    with pytest.raises(ValueError, match="state file 'x' is damaged"):
        list(rounds.exchange(grid, messages(), 5, in_flight_bytes=1))


def test_a_reply_that_came_while_the_server_was_busy_is_not_late():
    grid = Window({0: 0.0, 1: 0.2})
    answers = rounds.exchange(grid, grid.messages(), 0.5)
    first = next(answers)
    time.sleep(0.7)  # taking in the first takes longer than the second may
    assert [first.late, *(answer.late for answer in answers)] == [False, False]


def test_large_replies_to_small_messages_are_asked_for_in_smaller_batches(monkeypatch):
    monkeypatch.setattr(replies, "_BATCH_BYTES", 50_000)
    grid = Window(dict.fromkeys(range(20), 0.05))
    list(rounds.exchange(grid, grid.messages(), 5, reply_bytes=10_000))
    assert max(grid.asked_for) == 5


# --- waiting for clients ----------------------------------------------------------------------------------------------


class Arriving(InProcessGrid):
    """One more node is connected each time it is asked which there are."""

    asked = 0

    def get_node_ids(self):
        self.asked += 1
        return list(super().get_node_ids())[: self.asked]


def test_a_run_begins_when_enough_clients_are_there_and_says_how_many_are():
    said = []
    roster, left_out = rounds.gather_roster(Arriving(client_app.app, 5, DEFAULTS), 30, KEY, least=3, say=said.append)
    assert len(roster) == 3
    assert left_out == []
    assert said == ["waiting for clients: 1 of 3 connected", "waiting for clients: 2 of 3 connected"]


def test_too_few_clients_are_waited_for_no_longer_than_allowed():
    started = time.monotonic()
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    with pytest.raises(
        rounds.TooFewReplies,
        match=r"^2 of the 3 clients that the run waits for connected within startup-seconds = 0.5$",
    ):
        rounds.gather_roster(grid, 0.5, KEY, least=3)
    assert 0.5 <= time.monotonic() - started < 5


def test_clients_that_cannot_take_part_do_not_count_as_there():
    grid = InProcessGrid(client_app.app, 3, DEFAULTS)
    next(iter(grid._contexts.values())).run_config["dataset"] = "mnist"
    with pytest.raises(
        rounds.TooFewReplies, match=r"^2 of the 3 clients that .* can take part; first reason: .*data-dir"
    ):
        rounds.gather_roster(grid, 30, KEY, least=3)
