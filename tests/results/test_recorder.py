from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from fedprune_app.results import recorder as recorder_module
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.recorder import Recorder, git_hash, versions

CONFIG = {"system": "dispfl", "seed": 3, "learning-rate": 0.1}


def started(folder: Path, **kwargs) -> Recorder:
    recorder = Recorder(folder, **kwargs)
    recorder.start(CONFIG, 3)
    return recorder


def info(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def rows(folder: Path, name: str = "rounds") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_that_started_says_running_and_holds_everything_to_repeat_it(tmp_path):
    folder = tmp_path / "deep" / "run"
    recorder = Recorder(folder)
    partition = [{"partition": 0, "train": np.array([3, 1]), "validation": [1, 0], "test": [2, 2]}]
    recorder.start(CONFIG, 3, {"headline": "accuracy_global", "partition": partition, "note": folder})
    found = info(folder)
    assert found["status"] == "running"
    assert found["system"] == "dispfl"
    assert found["config"] == CONFIG
    assert found["seed"] == 3
    assert found["rounds_completed"] == 0
    assert found["final_sha256"] is None
    assert found["headline"] == "accuracy_global"
    assert found["partition"] == [{"partition": 0, "train": [3, 1], "validation": [1, 0], "test": [2, 2]}]
    assert found["note"] == str(folder)
    assert found["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["versions"].keys() >= {"fedprune", "flwr", "torch", "numpy", "python"}


def test_a_round_has_every_declared_field_and_keeps_the_others(tmp_path):
    recorder = started(tmp_path)
    recorder.round({"round": 1, "bytes_up": 10, "mood": "good"})
    recorder.clients([{"round": 1, "partition": 4, "epsilon": np.float32(0.5)}])
    (row,), (client,) = rows(tmp_path), rows(tmp_path, "clients")
    assert row.keys() == {*DECLARATIONS.round_fields, "mood"}
    assert (row["round"], row["bytes_up"], row["mood"], row["accuracy_global"]) == (1, 10, "good", None)
    assert client.keys() == {*DECLARATIONS.client_fields}
    assert (client["partition"], client["epsilon"], client["density"]) == (4, 0.5, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf"), torch.tensor(float("nan"))])
def test_a_number_that_is_none_is_null_so_that_the_file_is_json(tmp_path, value):
    recorder = started(tmp_path)
    recorder.round({"round": 1, "loss_mean": value, "density_by_layer": {"fc.weight": value, "b": torch.tensor(0.25)}})
    line = (tmp_path / "rounds.jsonl").read_text()
    row = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert row["loss_mean"] is None
    assert row["density_by_layer"] == {"fc.weight": None, "b": 0.25}


def test_rounds_are_counted(tmp_path):
    recorder = started(tmp_path)
    recorder.round({"round": 1})
    recorder.round({"round": 2})
    assert info(tmp_path)["rounds_completed"] == 2
    assert len(rows(tmp_path)) == 2


def test_a_finished_run_says_how_it_ended_and_takes_no_more_rounds(tmp_path):
    recorder = started(tmp_path)
    recorder.finish("completed", final_sha256="ab12")
    assert (info(tmp_path)["status"], info(tmp_path)["final_sha256"]) == ("completed", "ab12")
    with pytest.raises(ValueError, match="not open"):
        recorder.round({"round": 1})


def test_a_run_that_another_thread_closes_while_it_records_a_round_counts_this_round(tmp_path, monkeypatch):
    recorder = started(tmp_path / "run")
    closing = threading.Thread(target=recorder.finish, args=("interrupted",))
    append = recorder_module.append_lines

    def append_while_closing(path: Path, lines: bytes) -> None:
        append(path, lines)
        closing.start()
        closing.join(0.5)  # a signal's handler has the time to do whatever it can

    monkeypatch.setattr(recorder_module, "append_lines", append_while_closing)
    recorder.round({"round": 1})
    closing.join()
    assert not recorder.is_open
    found = info(tmp_path / "run")
    assert found["status"] == "interrupted"
    assert found["rounds_completed"] == found["records"]["rounds.jsonl"]["rows"] == len(rows(tmp_path / "run")) == 1


def test_a_failed_run_keeps_its_error(tmp_path):
    recorder = started(tmp_path)
    recorder.finish("failed", error="client 3 sent NaN")
    assert (info(tmp_path)["status"], info(tmp_path)["error"]) == ("failed", "client 3 sent NaN")


def test_results_are_never_overwritten(tmp_path):
    started(tmp_path).round({"round": 1})
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        started(tmp_path)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_resuming_drops_later_rounds_and_the_torn_line_and_keeps_the_rest_byte_for_byte(tmp_path):
    recorder = started(tmp_path)
    for number in (1, 2, 3):
        recorder.clients([{"round": number, "partition": p} for p in (0, 1)])
        recorder.round({"round": number, "loss_mean": 1 / number})
    kept = (tmp_path / "rounds.jsonl").read_bytes().splitlines(keepends=True)[:2]
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 4, "loss')  # killed while writing

    again = Recorder(tmp_path)
    again.resume(2)
    assert (tmp_path / "rounds.jsonl").read_bytes() == b"".join(kept)
    assert [row["round"] for row in rows(tmp_path, "clients")] == [1, 1, 2, 2]
    again.round({"round": 3})
    again.finish("completed")
    assert [row["round"] for row in rows(tmp_path)] == [1, 2, 3]
    assert info(tmp_path)["rounds_completed"] == 3
    assert info(tmp_path)["config"] == CONFIG


def test_a_resumed_run_adds_to_the_seconds_spent_before(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: now[0])
    recorder = started(tmp_path)
    now[0] += 7
    recorder.finish("interrupted")
    now[0] = 5000.0  # another process, another clock
    again = Recorder(tmp_path)
    again.resume(0)
    now[0] += 4
    again.finish("completed")
    assert info(tmp_path)["seconds"] == 11.0


def test_resuming_clears_the_old_error(tmp_path):
    recorder = started(tmp_path)
    recorder.finish("failed", error="power cut")
    Recorder(tmp_path).resume(0)
    assert (info(tmp_path)["status"], info(tmp_path)["error"]) == ("running", None)


def test_a_run_that_is_resumed_with_other_packages_says_so_once(tmp_path, monkeypatch):
    had = started(tmp_path).info["versions"]
    Recorder(tmp_path).resume(0)
    assert "versions_since" not in info(tmp_path), "nothing changed"
    for round, flower in ((0, "0.1.0"), (0, "0.1.0"), (0, "0.2.0"), (0, had["flwr"])):
        monkeypatch.setattr(recorder_module, "versions", lambda flower=flower: had | {"flwr": flower})
        Recorder(tmp_path).resume(round)
    assert [each["flwr"] for each in info(tmp_path)["versions_since"]] == ["0.1.0", "0.2.0", had["flwr"]]
    assert info(tmp_path)["versions_since"][0] == {"round": 0, "flwr": "0.1.0"}
    assert info(tmp_path)["versions"] == had


def test_a_run_that_goes_on_on_another_processor_says_so(tmp_path, monkeypatch, caplog):
    assert torch.backends.cpu.get_cpu_capability() in started(tmp_path).info["versions"]["processor"]
    monkeypatch.setattr(recorder_module, "processor", lambda: "another, AVX2")
    Recorder(tmp_path).resume(0)
    assert info(tmp_path)["versions_since"] == [{"round": 0, "processor": "another, AVX2"}]
    assert "the run goes on with processor another, AVX2" in caplog.text


PAIR = [[0.0, 0.25], [0.25, 0.0]]


def test_masks_belong_to_the_last_recorded_round_and_replace_those_before(tmp_path):
    recorder = started(tmp_path)
    for number in (1, 2):
        recorder.round({"round": number})
        recorder.masks(np.array([4, 7]), torch.tensor(PAIR) * number)
    found = json.loads((tmp_path / "masks.json").read_text())
    assert found == {"round": 2, "partitions": [4, 7], "distance": [[0, 0.5], [0.5, 0]]}


@pytest.mark.parametrize(
    ("partitions", "distance"),
    [
        ([0, 0], PAIR),
        ([0], PAIR),
        ([0, 1], [[0, 1.5], [1.5, 0]]),
        ([0, 1], [[0, float("nan")], [0.1, 0]]),
        ([0, 1], [[0, 0.1], [0.2, 0]]),
        ([0, 1], [[0, 0.1], [0.1, 0.5]]),
        ([], np.zeros((0, 0))),
        (range(1001), np.zeros((1001, 1001))),
    ],
)
def test_what_is_no_distance_between_clients_is_refused_before_anything_is_written(tmp_path, partitions, distance):
    recorder = started(tmp_path)
    allowed = r"allowed: numbers in \[0, 1\], symmetric"
    with pytest.raises(ValueError, match=rf"^'distance' has shape .*, {allowed}") as caught:
        recorder.masks(partitions, distance)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "masks.json").exists()


@pytest.mark.parametrize(("completed", "kept"), [(2, True), (1, False)])
def test_resuming_keeps_masks_of_the_rounds_that_it_keeps(tmp_path, completed, kept):
    recorder = started(tmp_path)
    for number in (1, 2):
        recorder.round({"round": number})
    recorder.masks([0, 1], PAIR)
    Recorder(tmp_path).resume(completed)
    assert (tmp_path / "masks.json").exists() == kept


@pytest.mark.parametrize("content", ["{", '{"round": 0}'])
def test_unreadable_masks_do_not_stop_a_run_from_being_resumed(tmp_path, content):
    started(tmp_path).round({"round": 1})
    (tmp_path / "masks.json").write_text(content)
    Recorder(tmp_path).resume(1)
    assert not (tmp_path / "masks.json").exists()


def test_a_new_run_does_not_inherit_masks(tmp_path):
    started(tmp_path).finish("failed")
    (tmp_path / "masks.json").write_text("{}")
    started(tmp_path)
    assert not (tmp_path / "masks.json").exists()


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        Recorder(tmp_path).resume(1)


def test_what_is_known_later_is_added_to_run_json(tmp_path):
    recorder = started(tmp_path)
    recorder.annotate(model={"name": "lenet5", "parameters": torch.tensor(7)})
    assert info(tmp_path)["model"] == {"name": "lenet5", "parameters": 7}


def test_a_killed_process_leaves_a_readable_folder(tmp_path):
    code = """if True:
        import os, sys
        from fedprune_app.results.recorder import Recorder
        recorder = Recorder(sys.argv[1])
        recorder.start({"system": "dispfl"}, 0)
        recorder.clients([{"round": 1, "partition": 0}])
        recorder.round({"round": 1})
        os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert info(tmp_path)["status"] == "running"
    assert info(tmp_path)["rounds_completed"] == len(rows(tmp_path)) == len(rows(tmp_path, "clients")) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "rounds.jsonl", "clients.jsonl"}


def test_tensorboard_gets_the_numbers_of_each_round(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorder = started(tmp_path, tracking="tensorboard")
    for number in (1, 2):
        layers = {"conv1": 0.1 * number}
        recorder.round({"round": number, "loss_mean": 0.5, "density_by_layer": layers, "accuracy_global": None})
    recorder.finish("completed")
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss_mean")] == [1, 2]
    assert [event.value for event in events.Scalars("density_by_layer/conv1")] == pytest.approx([0.1, 0.2])
    assert "accuracy_global" not in events.Tags()["scalars"]


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    def nothing(name: str) -> str:
        raise recorder_module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(recorder_module.importlib.metadata, "version", nothing)
    assert versions()["flwr"] is None
    assert versions()["python"] is not None


def test_the_commit_of_somebody_elses_checkout_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "__file__", str(tmp_path / "recorder.py"))
    (tmp_path / "recorder.py").write_text("")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def found() -> str | None:
        git_hash.cache_clear()
        return git_hash()

    assert found() is None
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    assert found() is None
    git("add", "recorder.py")
    git("commit", "-m", "ours")
    loaded = found()
    assert loaded == git("rev-parse", "HEAD")
    (tmp_path / "recorder.py").write_text("changed")
    git("commit", "-am", "while a sweep runs")
    assert git_hash() == loaded == git("rev-parse", "HEAD~1")
    (tmp_path / "recorder.py").write_text("changed again")
    assert found() == git("rev-parse", "HEAD") + "-dirty"
    git_hash.cache_clear()


def test_rows_are_on_disk_before_the_next_round_begins(tmp_path, monkeypatch):
    recorder = started(tmp_path)
    synced: list[int] = []
    real = recorder_module.os.fsync
    monkeypatch.setattr(recorder_module.os, "fsync", lambda file: synced.append(os.fstat(file).st_size) or real(file))
    recorder.clients([{"round": 1, "partition": 0}])
    recorder.round({"round": 1})
    sizes = [(tmp_path / name).stat().st_size for name in ("clients.jsonl", "rounds.jsonl", "run.json")]
    assert synced[:3] == sizes
    assert len(synced) == 4, "and the folder, in which run.json is new"
