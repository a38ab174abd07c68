"""Plug-ins as docs/extend.md has them: its files run, are swept, searched, resumed and exported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

import fedprune_app
from fedprune_app.testing import check_system
from tests.examples import full
from tests.plugins.conftest import FILES, QUICK, write

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.mark.parametrize("system", ["subfedavg", full("dispfl"), full("fedp3"), full("fedavg")])
def test_a_network_of_ones_own_runs_with_every_kind_of_system(fedprune, files, system):
    code, said = fedprune("run", "model=mine.py:net", f"system={system}", *QUICK, "--out", "run")
    assert code == 0, said
    info = json.loads((files / "run" / "run.json").read_text())
    assert info["model"]["name"] == f"{files / 'mine.py'}:net"
    assert list(info["plugins"]) == [str(files / "mine.py")]
    assert info["plugins"][str(files / "mine.py")].startswith("sha256 ")


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
    assert (code, said.count("finished before"), "is not the code" in said) == (0, 2, False), said
    (files / "my_prox.py").write_text((files / "my_prox.py").read_text() + "\n# changed\n")
    code, said = fedprune("sweep", "matrix.yaml", *given, "--resume")
    assert (code, " ".join(said.split()).count("is not the code that the run began with")) == (0, 2), said


@pytest.mark.full
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
