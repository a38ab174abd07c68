"""The functions for scripts and notebooks do what the command line does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fedprune_app

QUICK = {"clients": 3, "engine": "inprocess", "progress": False}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("api") / "run"
    return fedprune_app.run(
        system="dispfl",
        num_server_rounds=1,
        local_epochs=1,
        dispfl={"neighbours": 1},
        fraction_train=1.0,
        out=out,
        **QUICK,
    )


def test_a_run_is_returned_with_its_rounds_and_settings(finished):
    assert finished.status == "completed"
    assert finished.config["dispfl.neighbours"] == 1
    assert finished.config["local-epochs"] == 1
    assert [row["round"] for row in finished.rounds] == [1]
    assert {row["partition"] for row in finished.clients} == {0, 1, 2}
    assert fedprune_app.load_run(finished.folder).rounds == finished.rounds


def test_a_run_has_the_hash_of_the_same_run_on_the_command_line(finished, fedprune, tmp_path):
    where = ["--engine", "inprocess", "--clients", "3", "--out", "a"]
    code, said = fedprune(
        "run",
        "system=dispfl",
        "num-server-rounds=1",
        "local-epochs=1",
        "dispfl.neighbours=1",
        "fraction-train=1",
        *where,
    )
    assert code == 0, said
    assert fedprune_app.load_run(tmp_path / "a").info["final_sha256"] == finished.info["final_sha256"]


def test_a_run_is_resumed(tmp_path):
    settings = {"system": "standalone", "local-epochs": 1, "num-server-rounds": 1}
    first = fedprune_app.run(settings, out=tmp_path / "a", **QUICK)
    longer = fedprune_app.run(out=tmp_path / "a", resume=True, num_server_rounds=2, engine="inprocess", progress=False)
    assert (len(first.rounds), len(longer.rounds)) == (1, 2)
    assert len(longer.info["partition"]) == 3


def test_a_report_and_a_model_are_written(finished, tmp_path):
    page = fedprune_app.report(finished, tmp_path / "report.html")
    assert "dispfl" in page.read_text()
    assert fedprune_app.report([finished.folder], page) == page
    path = fedprune_app.export(finished, tmp_path / "client.safetensors", client=1)
    network = fedprune_app.load_model(path)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.1}, "^density is 0.1, which has no effect with system 'subfedavg'"),
        ({"lr": 0.1}, "^unknown key 'lr': did you mean 'learning-rate'"),
        ({"learning_rate": "fast"}, "^learning-rate is 'fast', allowed: a number"),
        ({"dispfl": {"topolgy": "ring"}}, "^unknown key 'dispfl.topolgy'"),
        ({"momentum": None}, "^momentum is None, allowed: a number"),
    ],
)
def test_errors_are_those_of_the_command_line(tmp_path, settings, message):
    with pytest.raises(fedprune_app.ConfigError, match=message):
        fedprune_app.run(**settings, out=tmp_path / "a", **QUICK)
    assert not (tmp_path / "a").exists()


def test_a_run_that_fails_raises(tmp_path):
    with pytest.raises(fedprune_app.LaunchError, match="diverged"):
        fedprune_app.run(
            "fedavg",
            dataset="digits",
            model="auto",
            shard_size=0,
            fraction_train=1.0,
            learning_rate=1e30,
            num_server_rounds=1,
            out=tmp_path / "a",
            **QUICK,
        )


def test_to_import_the_package_imports_nothing_heavy():
    heavy = "{'torch', 'flwr', 'ray'} & set(sys.modules)"
    code = f"import sys, fedprune_app; assert 'run' in dir(fedprune_app); assert not {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fedprune_app.nothing


def test_every_public_name_is_documented():
    for name in fedprune_app.__all__:
        assert getattr(fedprune_app, name).__doc__, name
