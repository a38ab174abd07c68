"""The laws of a system of one's own name what breaks them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedprune_app.testing import BrokenLawError, check_system
from tests.examples import full
from tests.plugins.conftest import PRIVATELY, QUICK, write

pytestmark = pytest.mark.usefixtures("no_plugins")


def with_method(name, method):
    """A plug-in's system ``name`` whose ``method``, such as "Server.end(self, round): pass", is this one."""
    head = "from fedprune_app.extend import FedAvg, FedAvgClient, OutgoingMessage, Payload, register_system\n"
    classes = "class Server(FedAvg): pass\nclass Client(FedAvgClient): pass\n"
    kind, _, rest = method.partition(".")
    own = f"class {kind}({kind}):\n    def {rest}"
    end = f"\nregister_system({name!r}, strategy=Server, client=Client, summary='one that fails')\n"
    return f"{head}{classes}{own}{end}"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("Client.personal_model(self, task, state): return {}", "Client.personal_model() lacks tensor 'conv1.bias'"),
        full(
            "Server.send(self, round): yield OutgoingMessage(0, Payload({'a': [1]}))",
            "'a' of a payload is of type list",
        ),
        full(
            "Server.send(self, round): yield OutgoingMessage(0, fields={'x': None})",
            "field 'x' of a message is None, allowed",
        ),
        full(
            "Client.report(self, task, update): return {'loss': None}",
            "field 'loss' of a message is None, allowed: a n",
        ),
    ],
)
def test_a_wrong_value_of_ones_own_code_is_told_with_its_class_and_method(
    fedprune, tmp_path, monkeypatch, method, said
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "wrong.py", with_method("wrong", method))
    code, found = fedprune("run", "--plugin", "wrong.py", "system=wrong", *QUICK, "--out", "run")
    assert code == 2
    assert said in " ".join(found.split())


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("Server.state(self): return {}", "Server.state() returns a value of type dict, allowed: State"),
        ("Server.warnings(self): pass", "Server.warnings() returns nothing, allowed: list"),
        ("Server.expect(self, round, client): pass", "Server.expect() returns nothing, allowed: Schema"),
        ("Server.send(self, round): pass", "Server.send() returns nothing, allowed: Iterable"),
        ("Server.end(self, round): self.model = {'x': 1}", "Server.end() leaves self.model as {'x': 1}, allowed: a d"),
        full(
            "Server.end(self, round): self.model = 3", "Server.end() leaves self.model as 3, allowed: a dict of tensors"
        ),
        full("Client.train(self, task, **how): pass", "Client.train() returns nothing, allowed: TrainingResult"),
        full("Client.local_update(self, task, state): pass", "Client.local_update() returns nothing, allowed: Update"),
        full("Client.begin(self, task, state): return 1", "Client.begin() returns a value of type int, allowed: dict"),
        full("Client.report(self, task, update): pass", "Client.report() returns nothing, allowed: dict"),
        full("Client.evaluation(self, task, state): pass", "Client.evaluation() returns nothing, allowed: tuple"),
        full(
            "Client.personal_model(self, task, state): pass", "Client.personal_model() returns nothing, allowed: dict"
        ),
    ],
)
def test_the_laws_name_a_method_that_returns_another_type(tmp_path, method, said):
    code = write(tmp_path / "wrong.py", with_method("wrong", method))
    with pytest.raises(Exception, match=re.escape(said)):
        check_system("wrong", plugins=code)


@pytest.mark.full
@pytest.mark.parametrize("engines", [[], pytest.param(["ray"], marks=pytest.mark.slow)])
def test_a_network_with_dropout_keeps_the_laws(tmp_path, engines):
    text = "from torch import nn\ndef net(shape, classes):\n    size = shape[0] * shape[1] * shape[2]\n"
    text += "    return nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.Dropout(0.5), nn.Linear(32, classes))"
    check_system("subfedavg", settings={"model": f"{write(tmp_path / 'net.py', text)}:net"}, engines=engines)


BROKEN = """
from fedprune_app.extend import *
import torch

class Strategy(FedAvg):
    {strategy}

class Client(FedAvgClient):
    {client}

register_system("broken", strategy=Strategy, client=Client, summary="breaks a law")
"""


@pytest.mark.parametrize(
    ("strategy", "client", "said"),
    [
        # the server forgets something that it needs
        full(
            "def end(self, round):\n        super().end(round)\n        self.sent = getattr(self, 'sent', 0) + 1\n"
            "        self.model = {n: t * (1 + self.sent / 100) for n, t in self.model.items()}",
            "pass",
            "a run killed after round 1 resumes to the same: its models are others",
        ),
        # randomness that no seed decides
        full(
            "pass",
            "def begin(self, task, state):\n        found = super().begin(task, state)\n        import os\n"
            "        return {n: t + os.urandom(1)[0] / 1000 for n, t in found.items()}",
            "the same settings give the same models",
        ),
        # a reply counts in the state although it is refused
        full(
            "def expect(self, round, client):\n        self.seen = getattr(self, 'seen', 0) + 1\n"
            "        return super().expect(round, client)\n\n"
            "    def end(self, round):\n        super().end(round)\n"
            "        self.model = {n: t * (1 + self.seen / 999) for n, t in self.model.items()}\n        self.seen = 0",
            "pass",
            "bad replies leave everything|a reply that comes twice counts once",
        ),
        # the message of a phase after the last round goes to some alone
        full(
            "def send(self, round):\n        some = list(super().send(round))\n"
            "        return some if round.number < 4 else some[:1]",
            "pass",
            "every client can train once more after the last round: 2 of 5 clients did",
        ),
    ],
)
def test_a_system_that_breaks_a_law_is_told_which(tmp_path, strategy, client, said):
    path = write(tmp_path / "broken.py", BROKEN.format(strategy=strategy, client=client))
    with pytest.raises(BrokenLawError, match=said):
        check_system("broken", plugins=path)


def test_an_option_that_nobody_reads_is_told_by_its_key(tmp_path):
    text = """
from dataclasses import dataclass
from fedprune_app.extend import *

@dataclass(frozen=True)
class Options(Table):
    used: float = option(1.0, "Is used.")
    idle_one: float = option(1.0, "Is not.")

class Client(FedAvgClient):
    def begin(self, task, state):
        assert self.config.table(Options).used
        return super().begin(task, state)

register_system("idle", strategy=FedAvg, client=Client, summary="reads one", options=Options)
"""
    with pytest.raises(BrokenLawError, match=r"every option that the system declares is read: idle\.idle-one is not"):
        check_system("idle", plugins=write(tmp_path / "idle.py", text))


MASKED = """def masks(self, task, state):
        weights = {n: p for n, p in self.model.named_parameters() if n in self.prunable}
        return {n: torch.arange(p.numel()).view(p.shape) % 2 == 0 for n, p in weights.items()}

    def begin(self, task, state):
        return dict(Payload.pruned(super().begin(task, state), self.masks(task, state)).tensors)

    def train(self, task, **how):
        return super().train(task, **{**how, "masks": self.masks(task, None)})"""


def test_a_client_that_prunes_and_sends_a_dense_model_ends_the_laws(tmp_path):
    path = write(tmp_path / "broken.py", BROKEN.format(strategy="pass", client=MASKED))
    with pytest.raises(Exception, match=r"what is pruned is not sent: '.*' is sent with its zeros"):
        check_system("broken", plugins=path)


def test_a_client_that_remembers_something_beside_its_state_ends_the_laws(tmp_path):
    """The next message makes a new object."""
    code = "def local_update(self, *given):\n        self.correction = 1.0\n        return super().local_update(*given)"
    path = write(tmp_path / "broken.py", BROKEN.format(strategy="pass", client=code))
    with pytest.raises(Exception, match=r"in its State: Client\.local_update\(\) sets correction"):
        check_system("broken", plugins=path)


@pytest.mark.full
def test_a_new_plugin_is_that_of_the_page_and_keeps_the_laws(fedprune, tmp_path):
    assert fedprune("new", "my-prune")[0] == 0
    folder = tmp_path / "my-prune"
    assert sorted(path.name for path in folder.iterdir()) == ["matrix.yaml", "my_prune.py", "test_my_prune.py"]
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    text = page.partition("```python\n# half.py\n")[2].partition("```")[0]
    written = (folder / "my_prune.py").read_text()
    assert written == text.replace("half", "my-prune").replace("Half", "MyPrune")
    check_system("my-prune", plugins=str(folder / "my_prune.py"), settings={"my-prune.kept": 0.3})
    assert "my_prune.py" in (folder / "test_my_prune.py").read_text()
    assert fedprune("new", "my-prune")[0] == 2
    assert fedprune("new", "../elsewhere")[0] == 2


@pytest.mark.full
@pytest.mark.parametrize("hook", ["train", "send"])
def test_a_system_that_asks_those_that_are_held_out_ends_the_laws(tmp_path, hook):
    ask = {
        "train": "def train(self, round):\n        messages = OutgoingMessage.to_each(self.clients, Payload({}))\n"
        "        list(request_payloads(round, 'a number', messages, Schema.like({}))) if round.number == 1 else None\n"
        "        super().train(round)",
        "send": "def send(self, round):\n        return OutgoingMessage.to_each(self.clients, Payload(self.model))",
    }
    client = "def answer(self, task, state):\n        return Payload({})"
    path = write(tmp_path / "broken.py", BROKEN.format(strategy=ask[hook], client=client))
    with pytest.raises(BrokenLawError, match="a round asks no client that is held out: one asks client"):
        check_system("broken", plugins=path)


def test_a_reply_with_an_undeclared_field_ends_the_laws_with_its_name(tmp_path):
    client = "def answer_training(self, *given):\n        arrays, *rest, told = super().answer_training(*given)\n"
    client += "        return (arrays, *rest, {**told, 'diary': 1})"
    path = write(tmp_path / "broken.py", BROKEN.format(strategy="pass", client=client))
    with pytest.raises(Exception, match="field 'diary' is in a reply"):
        check_system("broken", plugins=path)


UNTRUE = """
import torch
from fedprune_app.extend import FedAvg, FedAvgClient, register_system

class Half(FedAvgClient):
    def masks(self, task, state):
        weights = self.model.state_dict()
        return {name: torch.arange(weights[name].numel()).view(weights[name].shape) % 2 == 0 for name in self.prunable}

class Own(FedAvgClient):
    def train(self, task, **how):
        return super().train(task, **how)

class Said(Own):
    @classmethod
    def why_not_private(cls, config):
        return ""

for name, client in (("half", Half), ("own", Own), ("said", Said)):
    register_system(name, strategy=FedAvg, client=client, summary=name)
"""


def test_a_client_whose_model_is_not_as_sparse_as_its_masks_say_is_an_error(fedprune, tmp_path):
    write(tmp_path / "untrue.py", UNTRUE)
    code, said = fedprune("run", "--plugin", "untrue.py", "system=half", *QUICK, "--out", "run")
    assert code == 2  # the trial before the start finds it
    assert re.search(r"Half\.masks\(\) says that weights of '.*' are pruned, and personal_model\(\) has others", said)


@pytest.mark.full
def test_a_client_that_changes_a_private_one_has_to_say_whether_it_is_private(fedprune, tmp_path):
    write(tmp_path / "untrue.py", UNTRUE)
    code, said = fedprune("run", "--plugin", "untrue.py", "system=own", *PRIVATELY, *QUICK, "--out", "run")
    assert code == 2
    assert "Own changes train and does not say by why_not_private that this is private" in said
    code, said = fedprune("run", "--plugin", "untrue.py", "system=said", *PRIVATELY, *QUICK, "--out", "said")
    assert code == 0, said


def test_a_client_that_cannot_be_made_is_one_line(fedprune, tmp_path):
    text = (
        "from fedprune_app.extend import FedAvg, FedAvgClient, register_system\n"
        "class Other(FedAvgClient):\n    def __init__(self, one):\n        pass\n"
        "register_system('other', strategy=FedAvg, client=Other, summary='x')\n"
    )
    write(tmp_path / "other.py", text)
    code, said = fedprune("check", "--plugin", "other.py", "system=other", "--clients", "2")
    assert (code, "Other.__init__()" in said, said.count("\n")) == (2, True, 1), said
