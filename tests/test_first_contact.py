"""What people type first does what they mean."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from fedprune_app import cli
from fedprune_app.config import OPTIONS
from fedprune_app.config.toml import shipped_configs
from fedprune_app.registry import SYSTEMS
from tests.examples import full

QUICK = ["--engine", "inprocess", "--clients", "3", "num-server-rounds=1", "local-epochs=1"]


def config_of(folder):
    return json.loads((folder / "run.json").read_text())["config"]


def test_two_plain_runs_get_numbers_and_a_link_leads_to_the_last_one(fedprune, tmp_path):
    runs = tmp_path / "runs"
    for number, system in enumerate(("fedavg", "standalone"), 1):
        code, said = fedprune("run", *QUICK, f"system={system}")
        assert code == 0, said
        assert f"results: runs/{number}" in said
        assert (runs / "latest").resolve() == runs / str(number)
        assert config_of(runs / str(number))["system"] == system
    code, said = fedprune("run", "--engine", "inprocess", "--resume", "num-server-rounds=2")
    assert code == 0, said
    assert json.loads((runs / "2" / "run.json").read_text())["rounds_completed"] == 2
    assert sorted(path.name for path in runs.iterdir()) == ["1", "2", "latest"]


def test_a_run_ends_with_what_it_reached_and_with_the_next_two_commands(fedprune):
    code, said = fedprune("run", *QUICK, "system=subfedavg")
    assert code == 0, said
    last = said.splitlines()[-3:]
    assert re.fullmatch(r"personal [\d.]+ %.*  density [\d.]+  [\d.]+ MB of training traffic", last[0]), last
    assert [line.split()[-4:] for line in last[1:]] == [
        ["report", "runs/1", "-o", "report.html"],
        ["--client", "0", "-o", "client-0.onnx"],
    ]


def test_a_system_is_listed_with_its_page_and_twelve_settings_the_common_ones_first(capsys):
    cli.app(["list", "dispfl"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "Decentralized" in said
    keys = re.findall(r"^([a-z-]+(?:\.[a-z-]+)?) = ", said, re.MULTILINE)[1:]  # after the heading
    assert len(keys) == 12
    assert {"density", "learning-rate", "local-epochs", "dataset"} <= set(keys[:7])
    assert all(key.startswith("dispfl.") for key in keys[7:])


def test_a_refused_run_takes_no_number_and_moves_no_link(fedprune, tmp_path):
    assert fedprune("run", *QUICK, "system=fedavg")[0] == 0
    assert fedprune("run", *QUICK, "system=fedavg", "partition=classes", "classes-per-client=11")[0] == 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["1", "latest"]


def test_what_is_called_latest_and_is_no_link_stays(fedprune, tmp_path):
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    (tmp_path / "runs" / "latest" / "notes.txt").write_text("mine")
    assert fedprune("run", *QUICK, "system=fedavg")[0] == 0
    assert (tmp_path / "runs" / "latest" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "runs" / "1" / "run.json").exists()


def test_a_private_system_without_privacy_says_that_it_protects_nobody(fedprune, tmp_path):
    line = "note: dp.enabled is false, so this run of system 'dpfed' protects nobody"
    assert line in fedprune("check", "system=dpfed", "--clients", "2")[1]
    assert line in fedprune("run", *QUICK, "system=dpfed", "--out", "a")[1]
    (tmp_path / "m.yaml").write_text("systems: [dpfed, fedavg]\nclients: 2\n")
    assert line in fedprune("sweep", "m.yaml", *QUICK[:2], *QUICK[4:], "--out", "b")[1]
    for told in (("system=dpfed", "dp.enabled=true", "dp.noise-multiplier=1"), ("system=fedavg",)):
        assert "protects nobody" not in fedprune("check", *told, "--clients", "2")[1]


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (["system=subfedavg", "local-epochs=1"], "local-epochs is 1, so no client prunes: "),
        full(
            ["system=fedavg", "dp.enabled=true", "dp.noise-multiplier=1", "dp.delta=0.01", "dp.second-delta=1e-5"],
            "dp.delta is 0.01, and client ",
        ),
        full(
            ["system=fedavg", "dp.enabled=true", "dp.target-epsilon=20", "dp.planned-rounds=4", "dp.epsilon-budget=19"],
            "dp.epsilon-budget is 19, less than dp.target-epsilon 20: ",
        ),
    ],
)
def test_a_run_that_is_less_than_it_seems_says_so_before_it_begins_and_in_its_record(
    fedprune, tmp_path, settings, note
):
    given = ["num-server-rounds=1", *settings]
    code, said = fedprune("check", *given, "--clients", "2")
    assert code == 0, said
    assert said.count(f"note: {note}") == 1
    code, said = fedprune("run", *given, "--engine", "inprocess", "--clients", "2", "--out", "a")
    assert code == 0, said
    assert said.count(f"note: {note}") == 1
    told = json.loads((tmp_path / "a" / "run.json").read_text())["notes"]
    assert sum(line.startswith(note) for line in told) == 1


UNEQUAL = ("partition=dirichlet-class", "dirichlet-alpha=0.5", "batch-size=225", "local-epochs=1", "--clients", "6")


def test_a_budget_is_refused_only_where_no_client_could_pay_for_a_round(fedprune):
    """Clients with at most a batch take one step a round, larger ones two: the largest does not spend the least."""
    private = ("system=fedavg", "dp.enabled=true", "dp.noise-multiplier=2", "dp.accuracies=open", "dp.delta=1e-3")
    code, said = fedprune("check", *private, *UNEQUAL, "dp.epsilon-budget=1")
    assert code == 2
    (least,) = re.findall(r"dp\.epsilon-budget is 1\.0,.* at least ([0-9.]+),", said)
    code, said = fedprune("check", *private, *UNEQUAL, f"dp.epsilon-budget={least}")
    assert code == 0, said


def test_a_check_knows_how_many_examples_each_client_has(fedprune):
    private = ("system=fedavg", "dp.enabled=true", "dp.noise-multiplier=2", "dp.delta=0.004")
    code, said = fedprune("check", *private, *UNEQUAL)
    assert code == 0, said
    (client, size, most) = re.findall(r"and client (\d+) has (\d+) examples: .* is below ([0-9.]+)", said)[0]
    assert int(client) > 0
    assert int(size) >= 250
    assert float(most) * int(size) < 1


def test_a_shipped_configuration_has_a_name_and_later_files_win(fedprune, tmp_path):
    (tmp_path / "mine.toml").write_text('seed = 7\nnum-server-rounds = 3\nsystem = "standalone"\n')
    code, said = fedprune("run", "-c", "quickstart", "-c", "mine.toml", *QUICK, "--out", "a")
    assert code == 0, said
    config = config_of(tmp_path / "a")
    assert (config["system"], config["seed"], config["num-server-rounds"]) == ("standalone", 7, 1)
    assert "note: without effect with system 'standalone': subfedavg.target-rate" in said
    code, said = fedprune("run", "-c", "sub-fedavg")
    assert code == 2
    assert "--config is 'sub-fedavg'" in said
    assert "did you mean 'subfedavg'?" in said


def test_every_system_has_a_shipped_configuration():
    assert {*SYSTEMS, "quickstart"} == set(shipped_configs())


def test_the_version_is_told(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedprune", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert capsys.readouterr().out == f"fedprune {version('fedprune')}\n"


def test_a_log_gets_a_line_for_each_round(fedprune):
    code, said = fedprune("run", "--engine", "inprocess", "--clients", "3", "num-server-rounds=2", "evaluate-every=1")
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("subfedavg: round ")]
    assert [line.split("  ")[0] for line in lines] == ["subfedavg: round 1 of 2", "subfedavg: round 2 of 2"]
    assert all("personal " in line and "density " in line and " MB" in line for line in lines)


def test_the_keys_of_a_system_are_those_with_an_effect(fedprune, monkeypatch):
    monkeypatch.setattr("sys.stdout", __import__("sys").stderr)
    monkeypatch.setenv("COLUMNS", "200")
    code, said = fedprune("list", "--keys", "fedprox")
    assert code == 0
    assert "fedprox.mu = 0.01" in said
    assert "dispfl." not in said
    assert "density = " not in said
    assert "learning-rate = " in said
    assert sum(f"{key} = " in said for key in OPTIONS) > 60
    assert fedprune("list", "--keys", "fedprocks")[0] == 2


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("a.onnx", "", "onnx"),
        ("a.safetensors", "", "safetensors"),
        ("a", "onnx", "onnx"),
    ],
)
def test_the_suffix_of_an_exported_file_says_its_format(name, format, expected):
    from fedprune_app.exports.formats import format_of

    assert format_of(Path(name), format) == expected


def test_a_suffix_that_contradicts_the_format_is_refused(fedprune):
    assert fedprune("run", *QUICK, "system=fedavg", "--out", "a")[0] == 0
    code, said = fedprune("export", "a", "--global", "-o", "model.onnx", "--format", "safetensors")
    assert code == 2
    assert "--output is 'model.onnx'" in said


def test_a_run_is_checked_without_being_started(fedprune, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.stdout", __import__("sys").stderr)
    code, said = fedprune("check", "system=dispfl", "--clients", "5", "dispfl.neighbours=2", "shards-per-client=3")
    assert code == 0, said
    for words in (
        "test examples of 1x8x8, 10 classes",
        "of which",
        "checked: a run can start",
    ):
        assert words in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["dataset=mnist", "data-dir=none"], "none"),
        (["density=0.1"], "density is 0.1"),
        (["partition=classes", "classes-per-client=11"], "classes-per-client is 11"),
        full(["system=subfedavg-hy", "model=cnn-small"], "BatchNorm"),
        full(["model=resnet18-gn"], ""),
    ],
)
def test_what_a_run_would_refuse_is_told_by_a_check(fedprune, tmp_path, settings, says):
    code, said = fedprune("check", *settings)
    assert code == (2 if says else 0), said
    assert says in said
    assert not list(tmp_path.iterdir())
