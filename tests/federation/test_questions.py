"""What a strategy asks clients for before it trains them: answers are checked as replies are, and are no replies."""

from __future__ import annotations

import pytest

from fedprune_app.testing import QUICK, run_with

pytestmark = pytest.mark.usefixtures("no_plugins")
ASKING = """
import torch
from fedprune_app.extend import FedAvg, FedAvgClient, Outgoing, Payload, Schema, register_system

class Server(FedAvg):
    def before(self, round, exchanges):
        answers = {}
        def take(client, payload):
            if client == 2:
                raise ValueError("not from this one")
            answers[client] = payload.tensors["number"]
        schema = Schema.like({"number": torch.zeros(1)})
        exchanges.ask_for("a number", round, Outgoing.to_each(self.clients, Payload({})), schema, take)
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
