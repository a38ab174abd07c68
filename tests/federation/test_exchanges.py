"""Replies come one by one: what the strategy refuses does not count, and answers to questions are no replies."""

from __future__ import annotations

import pytest

from fedprune_app.testing import QUICK, run_with

pytestmark = pytest.mark.usefixtures("no_plugins")
ASKING = """
import torch
from fedprune_app.extend import FedAvg, FedAvgClient, OutgoingMessage, Payload, Schema
from fedprune_app.extend import register_system, request_payloads

class Server(FedAvg):
    def train(self, round):
        answers = {}
        schema = Schema.like({"number": torch.zeros(1)})
        for reply in request_payloads(round, "a number", OutgoingMessage.to_each(self.clients, Payload({})), schema):
            with round.log.rejecting(reply):
                if reply.client == 2:
                    raise ValueError("not from this one")
                answers[reply.client] = reply.update.tensors["number"]
        super().train(round)
        assert sorted(answers) == [0, 3] and all(int(value) == client for client, value in answers.items())

class Client(FedAvgClient):
    ANSWER

register_system("asking", strategy=Server, client=Client, summary="it asks")
"""
ANSWER = """def answer(self, task, state):
        assert task.fields["asks"] == "a number" and ("weights/fc1.bias" in state.tensors) == (task.round > 1)
        return Payload({"number": torch.full((2 if self.client_id == 1 else 1,), float(self.client_id))})"""


def asking(folder, answer, **settings):
    file = folder / "asking.py"
    file.write_text(ASKING.replace("ANSWER", answer))
    return run_with({**QUICK, "system": "asking", "plugins": str(file), **settings}, folder / "run", clients=4)


def test_answers_that_fit_are_taken_and_others_are_failures_of_the_round(tmp_path):
    run = asking(tmp_path, ANSWER)
    assert [row["replies"] for row in run.rounds] == [4, 4, 4]
    assert [row["failures"] for row in run.rounds] == [2, 2, 2]
    assert any("not from this one" in reason for reason in run.rounds[0]["failure_reasons"])


def test_a_run_with_too_few_answers_ends_with_the_first_reason(tmp_path):
    with pytest.raises(RuntimeError, match=r"TooFewReplies: a number had 2 .*client 1: a message decodes to more"):
        asking(tmp_path, ANSWER, **{"min-replies": 3})
    with pytest.raises(RuntimeError, match=r"Client has no answer\(\) to 'a number'"):
        asking(tmp_path, "pass")


REFUSING = """
from fedprune_app.extend import FedAvg, FedAvgClient, exchange, register_system

class Server(FedAvg):
    def train(self, round):
        earlier = []
        for reply in exchange(round, self.send(round), self.expect):
            assert reply.update.tensors and reply.encoded and reply.num_examples == reply.row["num_examples"]
            assert not any(one.update.tensors or one.encoded for one in earlier), "one reply is in memory at a time"
            earlier.append(reply)
            with round.log.rejecting(reply):
                if reply.client == 1:
                    raise ValueError("not from this one")
                self.receive(round, reply)
        assert len(earlier) == 4
        assert {client: round.number for client in (0, 2, 3)} == self.state_rounds

register_system("refusing", strategy=Server, client=FedAvgClient, summary="it refuses")
"""


def test_a_reply_that_the_strategy_refuses_does_not_count(tmp_path):
    file = tmp_path / "refusing.py"
    file.write_text(REFUSING)
    run = run_with({**QUICK, "system": "refusing", "plugins": str(file)}, tmp_path / "run", clients=4)
    assert [(row["replies"], row["failures"]) for row in run.rounds] == [(3, 1)] * 3
    assert all("client 1: not from this one" in row["failure_reasons"][0] for row in run.rounds)
    losses = {row["partition"]: row.get("loss") for row in run.clients if row["round"] == 1}
    assert losses.pop(1) is None
    assert None not in losses.values()
    with pytest.raises(RuntimeError, match=r"round 1 had 3 good replies, min-replies asks for 4; .*not from this one"):
        run_with({**QUICK, "system": "refusing", "plugins": str(file), "min-replies": 4}, tmp_path / "few", clients=4)
