"""Code of a plug-in is found, loaded, and named where it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedprune_app import plugins, registry
from fedprune_app.config import PolicyError, parse_config, with_carrier
from fedprune_app.plugins import loading
from fedprune_app.preflight.inputs import RunInputs, inputs_in
from fedprune_app.preflight.node import read_policy
from fedprune_app.preflight.prepare import prepare
from tests.examples import full
from tests.plugins.conftest import FILES, QUICK, write
from tests.refusing import refuses

pytestmark = pytest.mark.usefixtures("no_plugins")


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


@pytest.mark.parametrize(
    ("server", "client", "said"),
    [
        (
            "2 // (2 - round.number)",
            "pass",
            "ZeroDivisionError: integer division or modulo by zero (faulty.py, line 5, in end)",
        ),
        full(
            "pass", "['x'][task.round - 1]", "IndexError: list index out of range (faulty.py, line 10, in local_update)"
        ),
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


@pytest.mark.full
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


@pytest.mark.full
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


def test_options_travel_through_flower_in_one_declared_key(files):
    plugins.load({"plugins": str(files / "my_prox.py")})
    run = parse_config({"system": "my-prox", "my-prox.mu": 0.7})
    carried = with_carrier(run)
    assert carried.keys() == parse_config({}).to_dict().keys()
    assert json.loads(carried["plugin-options"]) == {"my-prox.mu": 0.7}
    assert parse_config(carried) == run


TAGGED = """from dataclasses import dataclass
from fedprune_app.extend import FedAvg, FedAvgClient, Table, option, register_system

@dataclass(frozen=True)
class Options(Table):
    tag: str = option("", "A text.")

register_system("tagged", strategy=FedAvg, client=FedAvgClient, summary="FedAvg with a tag", options=Options)
"""


@pytest.mark.parametrize("tag", ["2024_01", "1.10", "2024-01-01", "[1]"])
def test_a_text_for_a_plugin_stays_as_it_was_typed(tmp_path, tag):
    given = [f"tagged.tag={tag}", "system=tagged", f"plugins={write(tmp_path / 'tagged.py', TAGGED)}"]
    assert prepare(inputs_in(None, given)).config.to_dict()["tagged.tag"] == tag


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
