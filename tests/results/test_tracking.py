"""Each tracker gets a run's settings, the numbers of each round, and how the run ended; its own library reads them."""

from __future__ import annotations

import json
import logging
import re
import socket

import pytest

from fedprune_app.results import tracking
from fedprune_app.results.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = {"system": "fedavg", "seed": 3, "learning-rate": 0.1, "data-dir": ""}


def record(folder, kind, rounds=(1, 2), resume=0, settings=CONFIG):
    recorder = Recorder(folder, tracking=kind)
    if resume:
        recorder.reopen()
        recorder.annotate(config=settings)
        recorder.resume(resume)
    else:
        recorder.start(CONFIG, 3, {"run_key": "0123456789abcdef"})
    for number in rounds:
        recorder.round({"round": number, "accuracy_global": number / 10, "seconds": 1.5})
    recorder.finish("completed", "0" * 64)


def test_tensorboard_has_the_numbers_and_the_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(each.step, round(each.value, 6)) for each in events.Scalars("accuracy_global")] == [(1, 0.1), (2, 0.2)]
    assert events.Scalars("final/accuracy_global")[0].value == pytest.approx(0.2)
    summary = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"learning-rate" in summary


def history(client, run):
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "accuracy_global")]


@pytest.mark.full
def test_mlflow_has_the_numbers_and_the_settings_and_goes_on_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    import mlflow

    record(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}")
    number = client.get_experiment_by_name("fedprune").experiment_id
    (run,) = client.search_runs([number])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"system": "fedavg", "seed": "3", "learning-rate": "0.1"}
    assert history(client, run) == [(1, 0.1), (2, 0.2)]
    record(tmp_path / "run", "mlflow", rounds=[3], resume=2, settings={**CONFIG, "learning-rate": 0.2})
    (again,) = client.search_runs([number])
    assert history(client, again) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert again.data.params == run.data.params


@pytest.mark.full
@pytest.mark.timeout(60)
def test_an_mlflow_server_that_never_answers_is_an_error_soon(tmp_path, monkeypatch):
    """MLflow's own default is to ask again for minutes, and its errors quote the address."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes the connection
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:secret@{address}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(Exception, match=r"Read timed out") as error:
            tracking.TRACKERS["mlflow"](tmp_path, {"config": {}, "system": "fedavg"})
    assert "secret" not in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize(
    "place",
    [
        "HTTPS://bob:s%65cret@127.0.0.1:1/m",
        "http://127.0.0.1:1/?token=s%65cret",
        "mariadb://bob:secret@127.0.0.1:1/m",
        "mariadb://bob:se/c?ret@127.0.0.1:1/m",
        "mariadb://127.0.0.1:1/m?token=secret@secret",
    ],
)
def test_no_error_of_mlflow_quotes_who_logs_in_and_how(tmp_path, monkeypatch, place):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(RuntimeError, match=r"\*\*\*") as error:
        tracking.TRACKERS["mlflow"](tmp_path, {"config": {}, "system": "fedavg"})
    assert not re.search("bob|s%65cret|secret|se/c|ret@", str(error.value))


def test_a_tracker_that_fails_stops_no_run_and_is_not_asked_again(tmp_path, caplog, monkeypatch):
    calls = []

    class Failing:
        def __init__(self, folder, info):
            pass

        def log(self, numbers, round):
            calls.append(round)
            raise OSError("the server\nis gone")

        def close(self, status, numbers):
            calls.append(status)

    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", Failing)
    with caplog.at_level(logging.WARNING, "flwr.fedprune"):
        record(tmp_path / "run", "tensorboard")
    assert calls == [1]
    assert "tracking stops: OSError: the server is gone" in caplog.text
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["status"], info["notes"]) == ("completed", ["tracking stops: OSError: the server is gone"])


def test_a_tracker_that_cannot_be_opened_stops_a_new_run_and_not_one_that_goes_on(tmp_path, monkeypatch):
    class Unreachable:
        def __init__(self, folder, info):
            raise OSError("nobody answers")

    record(tmp_path / "run", "none")
    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", Unreachable)
    with pytest.raises(OSError, match="nobody answers"):
        record(tmp_path / "new", "tensorboard")
    recorder = Recorder(tmp_path / "run", tracking="tensorboard")
    recorder.reopen()
    recorder.resume(2)
    assert recorder.info["notes"] == ["tracking stops: OSError: nobody answers"]
    recorder.finish("completed", final_sha256="ab" * 32)


@pytest.mark.parametrize(("kind", "extra"), [("tensorboard", "tracking"), ("mlflow", "mlflow")])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(fedprune, tmp_path, monkeypatch, kind, extra):
    find = tracking.importlib.util.find_spec
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None if name == kind else find(name))
    code, said = fedprune("run", f"tracking={kind}", "--engine", "inprocess", "--out", "run")
    assert code == 2
    assert f"which needs the package {kind}: install the extra fedprune[{extra}]" in " ".join(said.split())
    assert not (tmp_path / "run").exists()
