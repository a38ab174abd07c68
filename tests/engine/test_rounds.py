"""The exchange over grids that misbehave."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from fedprune_app import client_app
from fedprune_app.config import DEFAULTS
from fedprune_app.engine import rounds, wire
from fedprune_app.engine.inprocess import InProcessGrid

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


def test_two_nodes_of_one_partition_are_refused():
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    for context in grid._contexts.values():
        context.node_config["partition-id"] = 1
    with pytest.raises(ValueError, match="partition-id 1 is claimed by two nodes"):
        rounds.gather_roster(grid, 30, KEY)


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
