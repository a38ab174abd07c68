"""Plug-ins: the files of docs/extend.md as a user would write them, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedprune_app
from fedprune_app import plugins, registry
from fedprune_app.config import PolicyError, parse_config, with_carrier
from fedprune_app.data import plugin_datasets
from fedprune_app.data.dataset import Form
from fedprune_app.data.datasets import load_dataset
from fedprune_app.exports.file import read_export_info
from fedprune_app.plugins import loading
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.node import read_policy
from fedprune_app.preflight.prepare import prepare
from fedprune_app.testing import BrokenLawError, check_system
from tests.refusing import refuses

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of the page, in the current folder."""
    assert FILES.keys() == {"mine.py", "my_prox.py", "server_momentum.py", "drift.py", "test_my_prox.py"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


QUICK = ("num-server-rounds=1", "--clients", "4", "--engine", "inprocess")


# --- as the page says ------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("system", ["subfedavg", "dispfl", "fedp3", "fedavg"])
def test_a_network_of_ones_own_runs_with_every_kind_of_system(fedprune, files, system):
    code, said = fedprune("run", "model=mine.py:net", f"system={system}", *QUICK, "--out", "run")
    assert code == 0, said
    info = json.loads((files / "run" / "run.json").read_text())
    assert info["model"]["name"] == f"{files / 'mine.py'}:net"
    assert list(info["plugins"]) == [str(files / "mine.py")]
    assert info["plugins"][str(files / "mine.py")].startswith("sha256 ")


def test_a_network_that_needs_two_examples_is_trained_by_who_has_one_too_many(fedprune, tmp_path):
    """BatchNorm of one value by channel refuses the last batch of 31 examples in batches of 10."""
    write(
        tmp_path / "normed.py",
        "from torch import nn\n"
        "def net(image_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))\n",
    )
    given = (
        "system=fedavg",
        "model=normed.py:net",
        "partition=iid",
        "samples-per-client=31",
        "validation-fraction=0.0",
    )
    code, said = fedprune("run", *given, *QUICK, "local-epochs=2", "batch-size=10", "--out", "run")
    assert code == 0, said
    (row,) = map(json.loads, (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    assert row["failures"] == 0
    whole = 3 * 2 * (64 * 8 + 8 * 10) * 2 * 30  # three passes, of two FLOPs per weight, for 30 examples twice
    assert row["flops"] == row["replies"] * whole
    ticket = ("fedltp.public-samples=61", "fedltp.ticket-iterations=8")
    code, said = fedprune("run", "system=fedltp", given[1], *ticket, *QUICK, "--out", "ticket")
    assert code == 0, said


def test_a_dataset_and_a_partition_of_ones_own_are_what_clients_learn_from(fedprune, files):
    given = ("dataset=mine.py:stripes", "model=mine.py:net", "partition=mine.py:halves", "system=fedavg")
    code, said = fedprune("run", *given, "num-server-rounds=3", *QUICK[1:], "--out", "run")
    assert code == 0, said
    partition = json.loads((files / "run" / "run.json").read_text())["partition"]
    assert [sum(client["train"]) + sum(client["validation"]) for client in partition] == [125, 125, 125, 125]
    rounds = [json.loads(line) for line in (files / "run" / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["accuracy_global"] > 0.9  # the stripes are easy to see


@pytest.mark.full
def test_a_system_of_ones_own_is_the_system_that_it_says(fedprune, files):
    given = ("--plugin", "my_prox.py", "system=my-prox", "my-prox.mu=0.2")
    for out, settings in (("mine", given), ("ours", ("system=fedprox", "fedprox.mu=0.2"))):
        code, said = fedprune("run", *settings, *QUICK, "--out", out)
        assert code == 0, said
    mine, ours = (json.loads((files / out / "run.json").read_text()) for out in ("mine", "ours"))
    assert mine["final_sha256"] == ours["final_sha256"]
    assert mine["config"]["my-prox.mu"] == 0.2
    assert mine["config"]["plugins"] == str(files / "my_prox.py")


@pytest.mark.slow
def test_the_system_of_the_page_keeps_the_laws_also_on_ray(files):
    check_system("my-prox", plugins="my_prox.py", engines=["ray"])


@pytest.mark.full
def test_the_page_s_system_that_remembers_keeps_the_laws(files):
    check_system("fedavg-momentum", plugins="server_momentum.py")


FAULTY = """from fedprune_app.extend import FedAvg, FedAvgClient, register_system

class Server(FedAvg):
    def end(self, round):
        {server}
        super().end(round)

class Client(FedAvgClient):
    def local_update(self, task, state):
        {client}
        return super().local_update(task, state)

register_system("faulty", strategy=Server, client=Client, summary="one that fails")
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("server", "client", "said"),
    [
        (
            "2 // (2 - round.number)",
            "pass",
            "ZeroDivisionError: integer division or modulo by zero (faulty.py, line 5, in end)",
        ),
        ("pass", "['x'][task.round - 1]", "IndexError: list index out of range (faulty.py, line 10, in local_update)"),
    ],
)
def test_an_error_in_ones_own_code_is_told_with_its_place(fedprune, tmp_path, monkeypatch, server, client, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "faulty.py", FAULTY.format(server=server, client=client))
    more = ("system=faulty", *QUICK, "num-server-rounds=2")  # the first round is tried before the start
    code, found = fedprune("run", "--plugin", "faulty.py", *more, "--out", "run")
    assert code == 1
    assert said in " ".join(found.split())
    assert said in json.loads((tmp_path / "run" / "run.json").read_text())["error"]


def with_method(name, method):
    """A plug-in's system ``name`` whose ``method``, such as "Server.end(self, round): pass", is this one."""
    head = "from fedprune_app.extend import FedAvg, FedAvgClient, OutgoingMessage, Payload, register_system\n"
    classes = "class Server(FedAvg): pass\nclass Client(FedAvgClient): pass\n"
    kind, _, rest = method.partition(".")
    own = f"class {kind}({kind}):\n    def {rest}"
    end = f"\nregister_system({name!r}, strategy=Server, client=Client, summary='one that fails')\n"
    return f"{head}{classes}{own}{end}"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("Client.personal_model(self, task, state): return {}", "Client.personal_model() lacks tensor 'conv1.bias'"),
        ("Server.send(self, round): yield OutgoingMessage(0, Payload({'a': [1]}))", "'a' of a payload is of type list"),
        (
            "Server.send(self, round): yield OutgoingMessage(0, fields={'x': None})",
            "field 'x' of a message is None, allowed",
        ),
        ("Client.report(self, task, update): return {'loss': None}", "field 'loss' of a message is None, allowed: a n"),
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


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("Server.state(self): return {}", "Server.state() returns a value of type dict, allowed: State"),
        ("Server.warnings(self): pass", "Server.warnings() returns nothing, allowed: list"),
        ("Server.expect(self, round, client): pass", "Server.expect() returns nothing, allowed: Schema"),
        ("Server.send(self, round): pass", "Server.send() returns nothing, allowed: Iterable"),
        ("Server.end(self, round): self.model = {'x': 1}", "Server.end() leaves self.model as {'x': 1}, allowed: a d"),
        ("Server.end(self, round): self.model = 3", "Server.end() leaves self.model as 3, allowed: a dict of tensors"),
        ("Client.train(self, task, **how): pass", "Client.train() returns nothing, allowed: TrainingResult"),
        ("Client.local_update(self, task, state): pass", "Client.local_update() returns nothing, allowed: Update"),
        ("Client.begin(self, task, state): return 1", "Client.begin() returns a value of type int, allowed: dict"),
        ("Client.report(self, task, update): pass", "Client.report() returns nothing, allowed: dict"),
        ("Client.evaluation(self, task, state): pass", "Client.evaluation() returns nothing, allowed: tuple"),
        ("Client.personal_model(self, task, state): pass", "Client.personal_model() returns nothing, allowed: dict"),
    ],
)
def test_the_laws_name_a_method_that_returns_another_type(tmp_path, method, said):
    code = write(tmp_path / "wrong.py", with_method("wrong", method))
    with pytest.raises(Exception, match=re.escape(said)):
        check_system("wrong", plugins=code)


HEAD = """from dataclasses import dataclass
from fedprune_app.extend import FedAvg, FedAvgClient, Table, option, register_model, register_system
"""
OWN = "register_system({name!r}, strategy=FedAvg, client=FedAvgClient, summary='x', {more})"


@pytest.mark.parametrize(
    ("options", "name", "more", "said"),
    [
        ("", "own", "uses=('nosuch',)", ("uses", "nosuch")),
        ("", "own", "uses='density'", ("uses", "d")),
        ("", "Bad Name!", "", ("system", "Bad Name!")),
        ("mu: float = option(0.1, 'A number.')", "own", "options=O", ("options",)),
        ("@mu: float = 0.1", "own", "options=O", ("mu", ...)),
        ("@mu: float = option('a', 'x')", "own", "options=O", ("mu", ...)),
        ("@mu: float = option(1, 'x')", "own", "options=O", ("mu", ...)),
        ("@mu: tuple = option((), 'x')", "own", "options=O", ("mu", ...)),
    ],
)
def test_a_wrong_registration_is_refused_where_the_plug_in_is_loaded(tmp_path, options, name, more, said):
    frozen = "@dataclass(frozen=True)\n" if options.startswith("@") else ""
    table = f"{frozen}class O(Table):\n    {options.removeprefix('@') or 'pass'}\n"
    code = write(tmp_path / "wrong.py", f"{HEAD}{table}{OWN.format(name=name, more=more)}")
    with refuses(*said):
        plugins.load({"plugins": code})


def test_an_empty_name_of_a_plug_in_is_refused(fedprune, files):
    code, said = fedprune("check", "--plugin", "", "--clients", "2")
    assert code == 2
    assert "argument is ''" in said


@pytest.mark.parametrize(
    ("setting", "text", "said"),
    [
        ("model", "import sys\ndef f(shape, classes): sys.exit(3)", "cannot be made for images of 1x8x8"),
        ("dataset", "import sys\ndef f(folder): sys.exit(3)", "cannot be loaded: SystemExit: 3"),
        ("partition", "import sys\ndef f(labels, n, rng): sys.exit(3)", "fails: SystemExit: 3"),
        ("partition", "def f(labels, n, rng): return [[0.5], [1]]", "client 0 what is not allowed"),
        ("partition", "def f(labels, n, rng): return [[[0]], [1]]", "client 0 what is not allowed"),
        ("partition", "def f(labels, n, rng): return [[True], [1]]", "client 0 what is not allowed"),
    ],
)
def test_a_function_that_leaves_the_program_or_returns_no_indices_is_an_error(fedprune, files, setting, text, said):
    write(files / "own.py", text)
    code, found = fedprune("check", f"{setting}=own.py:f", "system=fedavg", "--clients", "2")
    assert code == 2
    assert said in " ".join(found.split())


@pytest.mark.slow
def test_the_test_of_the_page_passes(files):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_prox.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=files)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_its_keys_are_listed_and_checked_as_those_of_fedprune(fedprune, files):
    assert fedprune("list", "--plugin", "my_prox.py", "--keys", "my-prox")[0] == 0
    for given, said in (
        ("my-prox.mu=-1", "my-prox.mu is -1.0"),
        ("my-prox.mu=yes", "my-prox.mu is 'yes'"),
        ("my-prox.nu=1", "did you mean 'my-prox.mu'?"),
        ("density=0.2", "density is 0.2"),
        ("fedprox.mu=1", "fedprox.mu is 1.0"),
    ):
        code, found = fedprune("check", "--plugin", "my_prox.py", "system=my-prox", given)
        assert (code, said in " ".join(found.split())) == (2, True), found
    code, found = fedprune("check", "--plugin", "my_prox.py", "system=fedavg", "my-prox.mu=1")
    assert code == 2
    assert "my-prox.mu needs system 'my-prox'" in found


@pytest.mark.full
def test_a_sweep_compares_it_with_others(fedprune, files):
    matrix = "systems: [fedavg, {system: my-prox, my-prox.mu: 0.5}]\ncommon: {num-server-rounds: 1}\n"
    write(files / "matrix.yaml", matrix)
    given = ("--plugin", "my_prox.py", "--clients", "3", "--engine", "inprocess", "--out", "swept")
    code, said = fedprune("sweep", "matrix.yaml", *given)
    assert code == 0, said
    assert "my-prox" in (files / "swept" / "table.md").read_text()
    code, said = fedprune("sweep", "matrix.yaml", *given, "--resume")
    assert said.count("finished before") == 2


def test_a_search_draws_its_options(fedprune, files):
    search = "common: {system: my-prox, num-server-rounds: 1}\nsearch: {trials: 1, space: {my-prox.mu: [0.5]}}\n"
    write(files / "search.yaml", search)
    given = ("--plugin", "my_prox.py", "--clients", "3", "--engine", "inprocess", "--out", "found")
    code, said = fedprune("sweep", "search.yaml", *given)
    assert code == 0, said
    assert "best: my-prox.mu=0.5" in said


@pytest.mark.full
def test_a_run_is_resumed_and_exported_where_the_code_is_named_again(fedprune, files):
    given = ("model=mine.py:net", "system=fedavg")
    fedprune("run", *given, "num-server-rounds=2", *QUICK[1:], "--out", "whole")
    fedprune("run", *given, *QUICK, "--out", "run")
    code, said = fedprune("run", "--resume", "num-server-rounds=2", *QUICK[3:], "--out", "run")
    assert code == 2
    assert f"--plugin does not name code that this run used, allowed: {files / 'mine.py'}" in said
    again = ("--plugin", "mine.py")
    assert fedprune("run", "--resume", *again, "num-server-rounds=2", *QUICK[3:], "--out", "run")[0] == 0
    hashes = {json.loads((files / out / "run.json").read_text())["final_sha256"] for out in ("whole", "run")}
    assert len(hashes) == 1
    code, said = fedprune("export", "run", "--global", "-o", "net.safetensors")
    assert code == 2
    assert "--plugin does not name code that this run used" in said
    assert fedprune("export", "run", "--global", "-o", "net.safetensors", *again)[0] == 0
    with pytest.raises(ValueError, match=r"model 'mine.py:net' is of a plug-in, allowed: with --build FILE.py:FUNC"):
        fedprune_app.load_model("net.safetensors")
    scope: dict[str, object] = {}
    exec(FILES["mine.py"], scope)
    model = fedprune_app.load_model("net.safetensors", build=scope["net"])
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    Image.new("L", (8, 8), 9).save("one.png")
    assert fedprune("predict", "net.safetensors", "one.png", "--build", "mine.py:net")[0] == 0
    write(
        files / "other.py",
        "from torch import nn\ndef net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n",
    )
    code, said = fedprune("predict", "net.safetensors", "one.png", "--build", "other.py:net")
    assert code == 2
    code, said = fedprune("predict", "net.safetensors", "one.png", "--build", "mine.py:none")
    assert (code, "mine.py:none'" in " ".join(said.split())) == (2, True)


def test_a_run_says_if_its_plugin_has_changed_since_it_began(fedprune, files):
    fedprune("run", "model=mine.py:net", "system=fedavg", *QUICK, "--out", "run")
    (files / "mine.py").write_text(FILES["mine.py"] + "\n# changed\n")
    code, said = fedprune("run", "--resume", "--plugin", "mine.py", "num-server-rounds=2", *QUICK[3:], "--out", "run")
    assert code == 0, said
    assert "is not the code that the run began with" in " ".join(said.split())
    info = json.loads((files / "run" / "run.json").read_text())
    (began_with,), (since,) = info["plugins"].items(), info["plugins_since"]
    assert since["round"] == 1
    assert since[began_with[0]].startswith("sha256 ")
    assert since[began_with[0]] != began_with[1]


def test_a_network_whose_layers_have_changed_leaves_a_completed_run_as_it_was(fedprune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = "from torch import nn\ndef net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    more = ("--plugin", "net.py", "num-server-rounds=2", *QUICK[3:])
    for system in ("fedavg", "dpsgd"):
        write(tmp_path / "net.py", net)
        assert fedprune("run", "model=net.py:net", f"system={system}", *QUICK, "--out", system)[0] == 0
        before = {path: path.read_bytes() for path in Path(system).rglob("*") if path.is_file()}
        write(tmp_path / "net.py", net.replace("nn.Linear", "nn.Linear(64, 64), nn.Linear"))
        code, said = fedprune("run", "--resume", *more, "--out", system)
        assert (code, "has other layers now" in said, said.count("sha256 ")) == (2, True, 2), said
        assert {path: path.read_bytes() for path in Path(system).rglob("*") if path.is_file()} == before
        code, said = fedprune("export", system, "--client", "0", "-o", "net.safetensors", "--plugin", "net.py")
        assert (code, said.count("sha256 ")) == (2, 2), said


def test_the_python_interface_takes_them_too(files):
    settings = {"num_server_rounds": 1, "plugins": "my_prox.py", "my-prox": {"mu": 0.2}}
    run = fedprune_app.run(system="my-prox", clients=3, engine="inprocess", out="run", progress=False, **settings)
    assert run.info["config"]["my-prox.mu"] == 0.2
    with pytest.raises(ValueError, match="does not name code that this run used"):
        fedprune_app.export(run, "net.safetensors")
    path = fedprune_app.export(run, "net.safetensors", plugins="my_prox.py")
    assert fedprune_app.load_model(path)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_report_needs_no_code(fedprune, files):
    fedprune("run", "model=mine.py:net", "system=fedavg", *QUICK, "--out", "run")
    (files / "mine.py").unlink()
    assert fedprune("report", "run", "-o", "page.html")[0] == 0


# --- an installed package ---------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with entry points, as pip leaves it."""
    site = tmp_path / "site"
    (site / "prox_package").mkdir(parents=True)
    (site / "prox_package" / "__init__.py").write_text("")
    (site / "prox_package" / "my_prox.py").write_text(FILES["my_prox.py"])
    network = "from fedprune_app.extend import register_model\nfrom torch import nn\n\n\ndef flat(shape, classes):\n"
    network += "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))\n\n\n"
    network += "register_model('flat', flat, 'one linear layer')\n"
    (site / "prox_package" / "flat.py").write_text(network)
    about = site / "prox_package-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: prox-package\nVersion: 1.5\n")
    (about / "RECORD").write_text("prox_package/__init__.py,,\nprox_package/my_prox.py,,\nprox_package/flat.py,,\n")
    (about / "entry_points.txt").write_text(
        "[fedprune.systems]\nmy-prox = prox_package.my_prox\n[fedprune.models]\nflat = prox_package.flat\n"
    )
    monkeypatch.syspath_prepend(str(site))
    loading._declaring_modules.cache_clear()
    yield site
    loading._declaring_modules.cache_clear()
    for name in [name for name in sys.modules if name.startswith("prox_package")]:
        del sys.modules[name]


@pytest.mark.full
def test_an_installed_plugin_needs_no_mention(fedprune, installed, tmp_path, capsys):
    code, said = fedprune("run", "system=my-prox", "model=flat", "my-prox.mu=0.3", *QUICK, "--out", "run")
    assert code == 0, said
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    versions = {"prox_package.my_prox": "prox-package 1.5", "prox_package.flat": "prox-package 1.5"}
    assert info["plugins"] == versions
    assert info["config"]["plugins"] == ""


def test_an_installed_plugin_is_listed(installed):
    assert plugins.installed()["system"] == {"my-prox": "prox_package.my_prox"}
    assert plugins.installed()["model"] == {"flat": "prox_package.flat"}


def test_an_entry_point_that_registers_nothing_is_told(installed):
    (installed / "prox_package" / "flat.py").write_text("")
    with refuses("model", "flat"):
        plugins.load({"model": "flat"})


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"plugins": "/no/such/file.py"}, ("plugins", "/no/such/file.py")),
        ({"plugins": "no_such_module"}, ("plugins", "no_such_module")),
        ({"plugins": "relative.py"}, ("plugins", "relative.py")),
        ({"model": "no_such_module:net"}, ("model", "no_such_module")),
        ({"model": "json:nothing"}, ("model", "json:nothing")),
    ],
)
def test_code_that_is_not_there_is_named(settings, said):
    with refuses(*said):
        plugins.load(settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "line 1: ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError"),
        ("import no_such_module_at_all", "line 1: ModuleNotFoundError"),
        ("raise SystemExit(3)", "line 1: SystemExit: 3"),
    ],
)
def test_a_file_that_fails_is_one_line_with_its_place(tmp_path, text, said):
    path = write(tmp_path / "bad.py", text)
    with refuses("plugins", path) as error:
        plugins.load({"plugins": path})
    assert said in str(error.value).replace("; ", ": ")


REGISTER = "from fedprune_app.extend import *\nclass S(FedAvg): pass\nclass C(FedAvgClient): pass\n"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("register_system('fedavg', strategy=S, client=C, summary='')", ("system", "fedavg")),
        ("register_system('a=b', strategy=S, client=C, summary='')", ("system", "a=b")),
        ("register_system('x', strategy=C, client=C, summary='')", ("strategy",)),
        ("register_system('x', strategy=S, client=S, summary='')", ("client",)),
        ("register_system('x', strategy=S, client=C, summary='', options=dict)", ("options", dict)),
        (
            "register_model('lenet5', print, '')",
            ("model", "lenet5"),
        ),
    ],
)
def test_what_a_plugin_may_not_register(tmp_path, call, said):
    with refuses(*said):
        plugins.load({"plugins": write(tmp_path / "bad.py", f"{REGISTER}{call}\n")})


def test_two_plugins_do_not_share_a_name(tmp_path):
    call = f"{REGISTER}register_system('x', strategy=S, client=C, summary='')\n"
    plugins.load({"plugins": write(tmp_path / "one.py", call)})
    with refuses("system", "x", where="two", which="one"):
        plugins.load({"plugins": write(tmp_path / "two.py", call)})


def test_a_file_that_changes_is_loaded_anew(tmp_path):
    text = "import torch\ndef net(shape, classes):\n    return torch.nn.Sequential(torch.nn.Flatten(), "
    path = tmp_path / "net.py"
    sizes = []
    for layers in ("torch.nn.Linear(64, 10))\n", "torch.nn.Linear(64, 9), torch.nn.Linear(9, 10))\n"):
        settings = {"model": write(path, text + layers) + ":net"}
        run = prepare(RunInputs(settings)).config
        from fedprune_app.models.initial import initial_model

        model = initial_model(run.model, run.dataset, (1, 8, 8), 10, init="default", seed=0)
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sizes == [650, 685]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return torch.nn.Linear(3, 4)", "fails on images of 1x8x8: RuntimeError"),
        ("return torch.nn.Flatten()", "has no layer that can be pruned"),
        ("return 7", "is of type int, allowed: torch.nn.Module"),
        ("raise KeyError('x')", "cannot be made for images of 1x8x8 and 10 classes: KeyError"),
        ("return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))", "returns 2x3 for two images"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_before_the_run(fedprune, tmp_path, body, said):
    path = write(tmp_path / "net.py", f"import torch\ndef net(shape, classes):\n    {body}\n")
    code, found = fedprune("run", f"model={path}:net", "--out", "run", *QUICK)
    assert code == 2
    assert re.search(said, " ".join(found.split())), found
    assert not (tmp_path / "run").exists()


NO_TEST = Form(needs_test=False)
GREY = np.zeros((6, 4, 4), np.uint8)
LABELS = np.array([0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (7, "returns a int, allowed: a pair of training and test part"),
        ((None, None), "returns a tuple"),
        (((GREY, LABELS), None), "has no test part, allowed: one with a test part, or test-split 'holdout'"),
        (((GREY, LABELS[:3]), (GREY, LABELS)), r"has training labels of shape \(3,\) for 6 examples"),
        (((GREY, LABELS.astype(float)), (GREY, LABELS)), "training label 0.0, allowed: whole numbers from 0 on"),
        (((GREY, LABELS - 1), (GREY, LABELS)), "allowed: whole numbers from 0 on"),
        (((GREY, LABELS), (GREY, LABELS * 10**9)), "has the test label '1000000000', allowed: 0, 1"),
        (((GREY, np.eye(2)[LABELS]), (GREY, LABELS)), r"training labels of shape \(6, 2\) for 6 .* argmax\(axis=1\)"),
        (((GREY, LABELS.astype(str)), (GREY, LABELS + 1)), "has the test label '2', allowed: 0, 1"),
        (((GREY, [None, "a"] * 3), (GREY, LABELS)), "has the training label None, allowed: whole numbers"),
        (((GREY, [0, 1, None, 1, 0, 1]), (GREY, LABELS)), "has the training label None, allowed: whole numbers"),
        (((GREY, [[0], [0, 1]] * 3), (GREY, LABELS)), r"has the training label \[0\], .* one for each example"),
        (((GREY, ["a"] * 6), (GREY, ["a"] * 6)), "has one label, 'a', allowed: at least two"),
        (((GREY.astype(int), LABELS), (GREY, LABELS)), r"training examples of shape \(6, 4, 4\) and type int64"),
        (((GREY[:, None, :, :].repeat(2, 1), LABELS), (GREY, LABELS)), "allowed: uint8 images with 1 or 3 channels"),
        (((GREY, LABELS), (GREY[:, :3], LABELS)), "allowed: parts of one shape and type"),
        (((np.full((6, 3), np.nan), LABELS), (GREY, LABELS)), "examples with NaN or infinity"),
        (([1, 2], [3, 4]), "the training part, of type list, cannot be read as examples with labels: TypeError"),
    ],
)
def test_a_dataset_that_cannot_be_is_refused(found, said):
    with pytest.raises(ValueError, match=said):
        plugin_datasets.dataset("mine", lambda data_dir: found, "", Form(), public_scale=False)


def test_images_of_every_form_are_the_same_images():
    rng = np.random.default_rng(0)
    colours, labels = rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8), LABELS

    class Items(torch.utils.data.Dataset):
        classes = ("cat", "dog")

        def __len__(self):
            return 6

        def __getitem__(self, i):
            from PIL import Image

            return Image.fromarray(colours[i]), int(labels[i])

    named = {"image": colours, "label": labels[:, None]}
    frame = pd.DataFrame({"label": labels})
    forms = [(colours, frame), (colours.transpose(0, 3, 1, 2), labels == 1), named, Items()]
    loaded = [
        plugin_datasets.dataset(
            "mine", lambda _, part=part: {"train": part, "test": part}, "", Form(), public_scale=False
        )
        for part in forms
    ]
    for each in loaded:
        np.testing.assert_array_equal(each.train_images, colours.transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(each.test_labels, labels)
        assert each.mean == loaded[0].mean
    assert [each.classes for each in loaded] == [("0", "1"), ("0", "1"), ("0", "1"), ("cat", "dog")]


def test_numbers_of_a_table_are_normalised_but_not_where_each_row_is_private():
    rows = np.random.default_rng(0).normal(3.0, 2.0, (50, 4)).astype(np.float32)
    labels = np.arange(50) % 3
    for public_scale in (False, True):
        found = plugin_datasets.dataset(
            "mine", lambda _: ((rows, labels), None), "", NO_TEST, public_scale=public_scale
        )
        assert found.image_shape == (4, 1, 1)
        assert found.num_classes == 3
        assert (found.mean == (0.0,) * 4) is public_scale
    assert len(found.test_labels) == 0


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[0, 1], [2]], "returns 2 parts, allowed: one per client, 3"),
        ([[0, 1], [2], []], "gives client 2 what is not allowed: at least one whole number from 0 to 5"),
        ([[0, 1], [2], [6]], "gives client 2 what is not allowed: at least one whole number from 0 to 5"),
        ([[0, 1], [1], [2]], "gives an example to two clients"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(parts, said):
    with pytest.raises(ValueError, match=f"partition 'mine' {said}"):
        plugin_datasets.dealt("mine", lambda labels, clients, rng: parts, LABELS, 3, np.random.default_rng(0))


# --- real nodes, Flower, and other people's files ---------------------------------------------------------------------


def test_options_travel_through_flower_in_one_declared_key(files):
    plugins.load({"plugins": str(files / "my_prox.py")})
    run = parse_config({"system": "my-prox", "my-prox.mu": 0.7})
    carried = with_carrier(run)
    assert carried.keys() == parse_config({}).to_dict().keys()
    assert json.loads(carried["plugin-options"]) == {"my-prox.mu": 0.7}
    assert parse_config(carried) == run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", ("plugin-options", "{")),
        ("[1]", ("plugin-options", "[1]")),
        ('{"seed": 1}', ("plugin-options", '{"seed": 1}')),
        ('{"my-prox.mu": -1}', ("my-prox.mu", -1)),
        ('{"my-prox.mu": {"a": 1}}', ("my-prox.mu", {"a": 1})),
    ],
)
def test_carried_options_are_checked(files, text, said):
    plugins.load({"plugins": str(files / "my_prox.py")})
    with refuses(*said):
        parse_config({"system": "my-prox", "plugin-options": text})


def node_settings(run, node):
    from fedprune_app.preflight.node import node_settings

    return node_settings(run, {"partition-id": 0, "num-partitions": 2, **node})


def test_a_node_imports_only_what_its_operator_allows(files):
    """No test of a node of a deployment runs inside a simulation, so the rule is asked for directly."""
    mine, prox = str(files / "mine.py"), str(files / "my_prox.py")
    run = {"model": f"{mine}:net", "system": "my-prox", "plugins": prox}
    for allowed in ({}, {"allowed-plugins": mine}, {"allowed-plugins": "my_prox"}):
        with pytest.raises(PolicyError, match="allowed-plugins"):
            node_settings(run, allowed)
        assert "my-prox" not in registry.SYSTEMS
    found, _ = node_settings(run, {"allowed-plugins": f"{mine}, {prox}"})
    assert found.system == "my-prox"


def test_a_node_imports_what_is_installed_there_as_a_plugin(installed):
    found, _ = node_settings({"system": "my-prox"}, {})
    assert found.system == "my-prox"
    with pytest.raises(PolicyError, match="allowed-systems"):
        node_settings({"system": "my-prox"}, {"allowed-systems": "fedavg"})
    assert read_policy({"allowed-systems": "my-prox"}).allowed_systems == "my-prox"


def test_a_system_that_a_node_does_not_have_is_named():
    with refuses("system", "my-prox"):
        node_settings({"system": "my-prox"}, {})


@pytest.mark.full
@pytest.mark.parametrize("engines", [[], pytest.param(["ray"], marks=pytest.mark.slow)])
def test_a_network_with_dropout_keeps_the_laws(tmp_path, engines):
    text = "from torch import nn\ndef net(shape, classes):\n    size = shape[0] * shape[1] * shape[2]\n"
    text += "    return nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.Dropout(0.5), nn.Linear(32, classes))"
    check_system("subfedavg", settings={"model": f"{write(tmp_path / 'net.py', text)}:net"}, engines=engines)


# --- the laws catch what they are for ---------------------------------------------------------------------------------

BROKEN = """
from fedprune_app.extend import *
import torch

class Strategy(FedAvg):
    {strategy}

class Client(FedAvgClient):
    {client}

register_system("broken", strategy=Strategy, client=Client, summary="breaks a law")
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "client", "said"),
    [
        # the server forgets something that it needs
        (
            "def end(self, round):\n        super().end(round)\n        self.sent = getattr(self, 'sent', 0) + 1\n"
            "        self.model = {n: t * (1 + self.sent / 100) for n, t in self.model.items()}",
            "pass",
            "a run killed after round 1 resumes to the same: its models are others",
        ),
        # randomness that no seed decides
        (
            "pass",
            "def begin(self, task, state):\n        found = super().begin(task, state)\n        import os\n"
            "        return {n: t + os.urandom(1)[0] / 1000 for n, t in found.items()}",
            "the same settings give the same models",
        ),
        # a reply counts in the state although it is refused
        (
            "def expect(self, round, client):\n        self.seen = getattr(self, 'seen', 0) + 1\n"
            "        return super().expect(round, client)\n\n"
            "    def end(self, round):\n        super().end(round)\n"
            "        self.model = {n: t * (1 + self.seen / 999) for n, t in self.model.items()}\n        self.seen = 0",
            "pass",
            "bad replies leave everything|a reply that comes twice counts once",
        ),
        # the message of a phase after the last round goes to some alone
        (
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


# --- what the record and the ledger would say wrongly -----------------------------------------------------------------

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
PRIVATELY = ("dp.enabled=true", "dp.noise-multiplier=1", "dp.delta=0.001")


def test_a_client_whose_model_is_not_as_sparse_as_its_masks_say_is_an_error(fedprune, tmp_path):
    write(tmp_path / "untrue.py", UNTRUE)
    code, said = fedprune("run", "--plugin", "untrue.py", "system=half", *QUICK, "--out", "run")
    assert code == 2  # the trial before the start finds it
    assert re.search(r"Half\.masks\(\) says that weights of '.*' are pruned, and personal_model\(\) has others", said)


def test_a_client_that_changes_a_private_one_has_to_say_whether_it_is_private(fedprune, tmp_path):
    write(tmp_path / "untrue.py", UNTRUE)
    code, said = fedprune("run", "--plugin", "untrue.py", "system=own", *PRIVATELY, *QUICK, "--out", "run")
    assert code == 2
    assert "Own changes train and does not say by why_not_private that this is private" in said
    code, said = fedprune("run", "--plugin", "untrue.py", "system=said", *PRIVATELY, *QUICK, "--out", "said")
    assert code == 0, said


def test_a_private_run_takes_a_network_of_one_shape_and_refuses_one_that_mixes_before_it_starts(fedprune, tmp_path):
    write(
        tmp_path / "nets.py",
        "import torch\nfrom torch import nn\n"
        "class Mixed(nn.Sequential):\n"
        "    def forward(self, images):\n        return super().forward(images - images.mean(0))\n"
        "def fixed(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
        "def mixed(shape, classes):\n    return Mixed(nn.Flatten(), nn.Linear(64, classes))\n",
    )
    given = ("system=fedavg", *PRIVATELY, *QUICK)
    code, said = fedprune("run", "model=nets.py:fixed", *given, "--out", "a")
    assert code == 0, said
    code, said = fedprune("run", "model=nets.py:mixed", *given, "--out", "b")
    assert (code, "the network mixes the examples of a batch" in said) == (2, True), said
    assert not (tmp_path / "b").exists()


# --- ordinary networks, datasets and partitions that cannot be used as they are ---------------------------------------

ODD = """
import random

import numpy as np
import torch
from torch import nn
from fedprune_app.data.dataset import Dataset

def layers(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, classes))

def tied(shape, classes):
    model = layers(classes)
    model[3].weight = model[1].weight
    return model

def double(shape, classes):
    return layers(classes).double()

def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def part(shape, kind=np.uint8, classes=2):
    return np.arange(np.prod((20, *shape))).reshape(20, *shape).astype(kind), np.arange(20) % classes

def made(shape=(1, 8, 8), classes=2, std=0.5, **more):
    return Dataset("made", *part(shape, classes=classes), *part(shape), ("a", "b"), (0.5,), (std,), **more)

def flat(folder):
    return made((8, 8))

def labelled(folder):
    return made(classes=4)

def grouped(folder):
    return made(groups=[0] * 19)

def even(folder):
    return made(std=0.0)

def tracked(folder):
    return (torch.zeros(20, 1, 8, 8, requires_grad=True), np.zeros(20, int)), part((1, 8, 8))

def entropy(folder):
    images, labels = part((1, 8, 8))
    return (np.random.default_rng().permutation(images), labels), part((1, 8, 8))

def seeded(folder):
    images, labels = part((1, 8, 8))
    return (np.random.permutation(images), labels), part((1, 8, 8))

def entropic(shape, classes):
    model = layers(classes)
    model[1].weight.data[0, 0] = float(np.random.default_rng().random())
    return model

class Drawn(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.register_buffer("order", torch.randperm(64))
        self.projection = torch.tensor(np.random.randn(64, 64), dtype=torch.float32) / 8
        self.flips = [random.choice((-1.0, 1.0)) for _ in range(64)]
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = x.flatten(1)[:, self.order] * torch.tensor(self.flips)
        return self.fc(torch.relu(x @ self.projection))

def drawn(shape, classes):
    return Drawn(classes)

def unseeded(labels, num_clients, rng):
    return np.array_split(np.random.default_rng().permutation(len(labels)), num_clients)
"""


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model=odd.py:double", "has the parameter '1.weight' of type torch.float64, allowed: float32"),
        ("model=odd.py:lazy", "has the lazy parameter '1.weight', allowed: layers that know their sizes"),
        ("dataset=odd.py:flat", "has examples of shape (20, 8, 8) and labels of shape (20,)"),
        ("dataset=odd.py:labelled", "allowed: (N, C, H, W), and N labels from 0 to 1"),
        ("dataset=odd.py:grouped", "has 19 groups for 20 examples, allowed: one for each"),
        ("dataset=odd.py:even", "the deviation (0.0,), allowed: 1 numbers each, deviations above 0"),
        (
            "dataset=odd.py:tracked",
            "cannot be read as examples with labels: RuntimeError: Can't call numpy() on Tensor that requires",
        ),
        ("dataset=odd.py:entropy", "is another one each time that it is loaded, allowed: one that draws by the global"),
        (
            "model=odd.py:entropic",
            "is another network each time that it is made, allowed: one that draws by the global",
        ),
        ("partition=odd.py:unseeded", "deals other data each time, allowed: a function that draws by the generator"),
    ],
)
def test_what_cannot_be_used_as_it_is_is_one_line_before_the_start(fedprune, tmp_path, setting, says):
    write(tmp_path / "odd.py", ODD)
    model = () if setting.startswith("model") else ("model=mlp-small",)
    code, said = fedprune("check", "system=fedavg", "--clients", "2", setting, *model)
    assert (code, says in said, said.count("\n")) == (2, True, 1), said


def test_data_that_numpy_s_generator_shuffles_are_the_same_each_time(fedprune, tmp_path):
    write(tmp_path / "odd.py", ODD)
    code, said = fedprune("check", "system=fedavg", "--clients", "2", "dataset=odd.py:seeded", "model=mlp-small")
    assert code == 0, said


def test_what_three_generators_drew_for_a_network_is_the_same_in_the_exported_one(fedprune, tmp_path):
    write(tmp_path / "odd.py", ODD)
    more = ("system=fedavg", "num-server-rounds=2", "fraction-train=1.0", "partition=iid", "learning-rate=0.05")
    code, said = fedprune("run", "model=odd.py:drawn", *more, "--engine", "inprocess", "--clients", "2", "--out", "run")
    assert code == 0, said
    *_, last = map(json.loads, (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    code, said = fedprune("export", "run", "--global", "-o", "net.safetensors", "--plugin", "odd.py")
    assert code == 0, said
    scope = {}
    exec(ODD, scope)
    network = fedprune_app.load_model("net.safetensors", build=scope["drawn"])
    info, digits = read_export_info("net.safetensors"), load_dataset("digits")
    images = (torch.tensor(digits.test_images) / 255 - info.mean[0]) / info.std[0]
    accuracy = float((network(images).argmax(1).numpy() == digits.test_labels).mean())
    assert accuracy == pytest.approx(last["accuracy_global"], abs=0.02)
    assert accuracy > 0.5
    exec(ODD.replace("torch.relu(", "torch.tanh("), scope)  # the code has changed since
    with pytest.raises(ValueError, match=r"model 'odd.py:drawn' made anew computes something else than the run's own"):
        fedprune_app.load_model("net.safetensors", build=scope["drawn"])


def test_a_weight_that_layers_share_is_pruned_as_one(fedprune, tmp_path):
    write(tmp_path / "odd.py", ODD)
    code, said = fedprune("run", "model=odd.py:tied", "system=dispfl", "dispfl.neighbours=2", *QUICK, "--out", "run")
    assert code == 0, said
    assert fedprune("check", "model=odd.py:tied", "system=fedavg", "--clients", "2")[0] == 0


def test_a_private_run_takes_public_constants_in_place_of_measured_ones():
    names = {}
    exec(ODD, names)
    found = plugin_datasets.dataset(
        "odd", lambda _: names["made"](std=0.3, is_measured=True), "", Form(), public_scale=True
    )
    assert (found.mean, found.std, found.is_measured) == ((0.5,), (0.5,), False)
    own = plugin_datasets.dataset("odd", lambda _: names["made"](std=0.3), "", Form(), public_scale=True)
    assert (own.mean, own.std) == ((0.5,), (0.3,))


def test_square_images_of_floats_may_have_their_channels_last():
    images = np.random.default_rng(0).random((6, 8, 8, 3))
    found = plugin_datasets.dataset("x", lambda _: ((images, np.arange(6) % 2), None), "", NO_TEST, public_scale=False)
    assert found.image_shape == (3, 8, 8)
    assert np.array_equal(found.train_images, images.transpose(0, 3, 1, 2).astype(np.float32))


def test_a_client_that_cannot_be_made_is_one_line(fedprune, tmp_path):
    text = (
        "from fedprune_app.extend import FedAvg, FedAvgClient, register_system\n"
        "class Other(FedAvgClient):\n    def __init__(self, one):\n        pass\n"
        "register_system('other', strategy=FedAvg, client=Other, summary='x')\n"
    )
    write(tmp_path / "other.py", text)
    code, said = fedprune("check", "--plugin", "other.py", "system=other", "--clients", "2")
    assert (code, "Other.__init__()" in said, said.count("\n")) == (2, True, 1), said


@pytest.mark.full
def test_a_system_of_a_script_runs_in_the_scripts_own_process_alone(tmp_path):
    """Ray's workers do not run the script."""
    write(
        tmp_path / "script.py",
        "import fedprune_app\n"
        "from fedprune_app.extend import FedAvg, FedAvgClient, register_system\n"
        "register_system('mine', strategy=FedAvg, client=FedAvgClient, summary='x')\n"
        "quick = {'system': 'mine', 'num_server_rounds': 1, 'clients': 2, 'progress': False}\n"
        "print(fedprune_app.run(out='a', engine='inprocess', **quick).status)\n"
        "try:\n    fedprune_app.run(out='b', **quick)\n"
        "except fedprune_app.ConfigError as error:\n    print(error)\n",
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert first == "completed", done.stderr
    assert second.startswith("system is 'mine'")
