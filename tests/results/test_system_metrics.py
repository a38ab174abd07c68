"""Numbers that a plug-in's system reports are checked, recorded and shown like fedprune's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedprune_app
from fedprune_app import cli
from fedprune_app.config import ConfigError
from fedprune_app.registry import SYSTEMS
from fedprune_app.results import system_metrics
from fedprune_app.results.figures import figures
from fedprune_app.results.groups import group_runs
from fedprune_app.results.reader import load_run
from fedprune_app.results.report import write_report
from fedprune_app.results.system_metrics import SystemMetric
from fedprune_app.results.tables import comma_separated, final_rows, table_text
from fedprune_app.testing import BrokenLawError, check_system
from tests.conftest import tampered_app
from tests.examples import full
from tests.refusing import refuses

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
DRIFT = re.search(r"```python\n# drift\.py\n(.*?)```", PAGE, re.DOTALL).group(1)
PRIVATE = """
    @classmethod
    def why_not_private(cls, config):
        return ""

"""
pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of the page's system, or of another text, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def start(out="run", text=DRIFT, **settings):
        Path("drift.py").write_text(text)
        given = {"plugins": "drift.py", "num_server_rounds": 2, "evaluate_every": 2, **settings}
        return fedprune_app.run(system="fedavg-drift", clients=5, engine="inprocess", out=out, progress=False, **given)

    return start


@pytest.mark.full
def test_numbers_of_ones_own_are_recorded_and_shown_where_the_plug_in_is_not(run, tmp_path):
    drifted = run(fraction_train=0.6)
    first, last = drifted.rounds
    clients = {row["partition"]: row for row in drifted.clients if row["round"] == 2}
    trained = [row["drift"] for row in clients.values() if "drift" in row]
    assert len(trained) == 3
    assert last["drift_mean"] == pytest.approx(sum(trained) / 3)
    gains = [row["accuracy_personal"] - row["accuracy_received"] for row in clients.values()]
    assert [row["gain"] for row in clients.values()] == pytest.approx(gains)
    assert last["gain_mean"] == pytest.approx(sum(gains) / 5)
    assert "gain_mean" not in first
    assert first["server_step"] > 0
    del SYSTEMS["fedavg-drift"]
    groups = group_runs([load_run(tmp_path / "run")])
    header, (cells,) = final_rows(groups)
    shown = dict(zip(header, cells, strict=True))
    assert shown["Distance from the received model"] == f"{last['drift_mean']:.3f}"
    assert shown["Gain of local training (%)"] == f"{100 * last['gain_mean']:.2f}"
    assert shown["Step of the server"] == f"{last['server_step']:.2f}"
    assert ",gain_mean,gain_std," in comma_separated(groups)
    drawn = {figure.key: figure for figure in figures(groups)}
    assert drawn["own-drift"].variants[0].traces[0]["y"] == [first["drift_mean"], last["drift_mean"]]
    assert "own-gain" not in drawn  # one evaluation has no curve
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "Distance from the received model by round</h3>" in page


@pytest.mark.full
def test_one_name_of_two_meanings_stands_in_two_columns(run):
    mine = run("mine")
    other = run("other", DRIFT.replace('"Distance from the received model"', '"A | <i>drift</i> in &", percent=True'))
    groups = group_runs([mine, other, run("fedavg-alone", DRIFT)])
    header, rows = final_rows(groups)
    columns = [header.index("Distance from the received model"), header.index("A | <i>drift</i> in & (%)")]
    shown = [[row[column] for column in columns] for row in rows]
    assert [cells.count("–") for cells in shown] == [1] * len(rows)
    assert ",drift_2_mean," in comma_separated(groups)
    assert "A \\| \\<i\\>drift\\</i\\> in & (%)" in table_text(".md", *final_rows(groups), num_texts=3)
    assert {"own-drift", "own-drift_2"} <= {figure.key for figure in figures(groups)}


@pytest.mark.full
def test_a_private_client_keeps_what_may_tell_of_its_data(run):
    text = DRIFT.replace("class DriftClient(FedAvgClient):\n", f"class DriftClient(FedAvgClient):{PRIVATE}")
    dp = {"enabled": True, "noise_multiplier": 1.0, "delta": 0.001}
    (row, *_) = run("secret", text, num_server_rounds=1, dp=dp).rounds
    assert row["drift_mean"] is None
    assert row["server_step"] > 0  # of what the server knows
    public = text.replace("least=0, decimals=3", "least=0, public=True")
    (row, *_) = run("public", public, num_server_rounds=1, dp=dp).rounds
    assert row["drift_mean"] > 0


@pytest.mark.full
def test_the_numbers_of_the_page_keep_the_laws(run, tmp_path):
    Path("drift.py").write_text(DRIFT)
    check_system("fedavg-drift", plugins="drift.py")


def test_they_are_listed(run, capsys):
    Path("drift.py").write_text(DRIFT)
    cli.app(["list", "--plugin", "drift.py"], standalone_mode=False)
    assert "own numbers: drift, gain, server_step" in capsys.readouterr().out
    cli.app(["list", "--plugin", "drift.py", "--json"], standalone_mode=False)
    listed = json.loads(capsys.readouterr().out)["measures"]
    assert [each["title"] for each in listed["fedavg-drift"]][2] == "Step of the server"
    assert listed.keys() == {"fedavg-drift"}


def test_a_number_that_nobody_tells_breaks_a_law(run):
    Path("drift.py").write_text(DRIFT.replace('"drift": drift}', '"drift": None}'))
    with pytest.raises(BrokenLawError, match="every number that the system declares is recorded: drift is not"):
        check_system("fedavg-drift", plugins="drift.py")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"drift": drift}', '"drift": -1}', "DriftClient tells that 'drift' is -1, allowed: 0 to 1e+100"),
        full('"drift": drift}', '"drift": "far"}', "DriftClient tells that 'drift' is 'far', allowed: a number"),
        full('"drift": drift}', '"drift": drift * float("nan")}', "DriftClient tells that 'drift' is nan"),
        full('"drift": drift}', '"drifts": drift}', "field 'drifts' is in a reply, allowed in training"),
        full(
            '"server_step", d', '"step", d', "record() has 'step', allowed: the system's metrics with source='server'"
        ),
        full('"server_step", d', '"server_step", -d', "Drift tells that 'server_step' is -"),
    ],
)
def test_a_number_that_cannot_be_is_an_error_with_its_name(run, old, new, said):
    assert DRIFT.count(old) == 1
    with pytest.raises((RuntimeError, ConfigError), match=re.escape(said)):  # the start tries a round of few examples
        run(text=DRIFT.replace(old, new))


def test_the_server_checks_what_a_client_says(federate):
    """Another program may answer in place of our client."""
    metrics = (SystemMetric("mood", "Mood", least=0, most=1),)
    SYSTEMS["fedavg"] = replace(SYSTEMS["fedavg"], metrics=metrics)

    def says(request, reply, partition):
        reply.content["fields"]["mood"] = 7.0 if partition == 1 else 0.5
        return reply

    (row,) = federate(system="fedavg", app=tampered_app(train=says), fraction_train=1.0, num_server_rounds=1).rounds
    assert row["failure_reasons"] == ["client 1: field 'mood' is 7.0, allowed: 0 to 1"]
    assert row["mood_mean"] == 0.5


@pytest.mark.parametrize("value", [torch.tensor(0.25), torch.tensor(0.25).numpy(), 0.25])
def test_a_tensor_of_one_number_is_a_number(value):
    found = SystemMetric("share", "Share", most=1).number(value, "it")
    assert type(found) is float
    assert found == 0.25
    with pytest.raises(ValueError, match="it 'share' is tensor"):
        SystemMetric("share", "Share").number(torch.ones(2), "it")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"name": "Drift"}, "name"),
        ({"name": "density"}, "name"),
        ({"name": "loss"}, "name"),
        ({"name": "density_mean", "source": "server"}, "name"),
        ({"source": "always"}, "source"),
        ({"least": 1, "most": 1}, "least"),
        ({"source": "evaluation", "over_rounds": "total"}, "over_rounds"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(given, key):
    with refuses(key, given[key], where=f"measure {given.get('name', 'drift')!r}"):
        SystemMetric(**{"name": "drift", "title": "Drift", **given})


def test_a_name_that_is_given_twice_is_refused():
    with refuses("metrics", "a_mean", where="system 'x'"):
        system_metrics.checked("x", [SystemMetric("a", "A"), SystemMetric("a_mean", "B", source="server")])


def test_a_field_of_the_client_is_no_name_for_a_number(run):
    declares = "declares = ReplyFields(training=frozenset({'drift'}))"
    text = DRIFT.replace("FedAvg, FedAvgClient", "FedAvg, FedAvgClient, ReplyFields")
    text = text.replace("class DriftClient(FedAvgClient):\n", f"class DriftClient(FedAvgClient):\n    {declares}\n\n")
    with refuses("measure", "drift", where="system 'fedavg-drift'", which="DriftClient"):
        run(text=text)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([{"name": "drift"}], "'measures': SystemMetric.__init__() missing"),
        ([{"name": "density", "title": "D"}], "'measures': measure 'density': name is 'density'"),
    ],
)
def test_a_run_json_with_wrong_declarations_is_refused(make_run, metrics, said):
    folder = make_run("run", rounds=1)
    info = json.loads((folder / "run.json").read_text())
    with pytest.raises(ValueError, match=re.escape(said)):
        system_metrics.from_info({**info, "measures": metrics}, "run.json")
