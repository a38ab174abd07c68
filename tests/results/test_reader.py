from __future__ import annotations

import json

import pytest

from fedprune_app.results.reader import load_run
from fedprune_app.results.recorder import write_info

INFO = {
    "system": "dispfl",
    "config": {},
    "seed": 0,
    "seconds": 1.5,
    "rounds_completed": 0,
    "status": "completed",
    "headline": "accuracy_personal_mean",
}
MASKS = {"round": 3, "partitions": [2, 5], "distance": [[0, 0.25], [0.25, 0]]}


@pytest.fixture
def folder(tmp_path):
    write_info(tmp_path, INFO)
    (tmp_path / "rounds.jsonl").write_text('{"round": 1, "loss_mean": 0.5}\n')
    return tmp_path


def test_a_recorded_run_reads_back_as_it_was_written(make_run):
    run = load_run(make_run("run", "fedp3", 4, rounds=6, clients=5))
    assert (run.system, run.seed, run.status, run.headline) == ("fedp3", 4, "completed", "accuracy_personal_mean")
    assert [row["round"] for row in run.rounds] == [1, 2, 3, 4, 5, 6]
    assert {row["partition"] for row in run.clients if row["round"] == 6} == {0, 1, 2, 3, 4}


def test_a_line_cut_short_by_a_crash_is_left_out(folder):
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "loss_')
    assert [row["round"] for row in load_run(folder).rounds] == [1]


def test_a_folder_whose_run_wrote_no_round_yet_is_a_run(folder):
    (folder / "rounds.jsonl").unlink()
    assert load_run(folder).rounds == ()


def test_a_folder_that_is_no_run_is_one_line_naming_it(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no run\.json") as caught:
        load_run(tmp_path / "nowhere")
    assert "nowhere" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        b'{"round": 2,}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"7",
        b'{"round": ' + b"9" * 5000 + b"}",
        b'{"loss_mean": 1}',
        b'{"round": true}',
        b'{"round": 2, "evaluated": "two"}',
        b'{"round": 2, "loss_mean": [1]}',
        b'{"round": 1' + b"0" * 400 + b"}",
    ],
)
def test_a_malformed_line_is_one_short_line_naming_file_and_line(folder, line):
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"rounds\.jsonl line 2: ") as caught:
        load_run(folder)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_run_json_without_its_digest_is_damaged(folder):
    (folder / "run.json").write_text(json.dumps(INFO))
    with pytest.raises(ValueError, match=r"run\.json is damaged: it has no digest$"):
        load_run(folder)


def test_masks_read_back_as_they_were_written(folder):
    assert load_run(folder).masks is None
    (folder / "masks.json").write_text(json.dumps(MASKS))
    masks = load_run(folder).masks
    assert (masks.round, masks.clients, masks.distance.tolist()) == (3, (2, 5), [[0, 0.25], [0.25, 0]])


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": 2},
        {"partitions": [2, 2]},
        {"distance": None},
        {"distance": [[0, 0.25]]},
        {"distance": [[0, 0.25], [0.25]]},
        {"distance": [0, 0.25]},
        {"distance": [[0, float("nan")], [float("nan"), 0]]},
        {"distance": [[0, -0.25], [-0.25, 0]]},
        {"distance": [[0, 0.25], [0.5, 0]]},
        {"distance": [[0.5, 0.25], [0.25, 0]]},
    ],
)
def test_masks_json_with_what_is_no_distance_is_one_short_line_naming_it(folder, change):
    (folder / "masks.json").write_text(json.dumps(MASKS | change))
    with pytest.raises(ValueError, match=r"masks\.json is damaged: ") as caught:
        load_run(folder)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_total_with_a_round_missing_is_not_measured(folder):
    (folder / "rounds.jsonl").write_text('{"round": 1, "bytes_up": 5}\n{"round": 2, "bytes_up": null}\n')
    run = load_run(folder)
    assert run.total("bytes_up") is run.mean("bytes_up") is None
    assert run.total("bytes_down") is None
    assert run.last("bytes_up") == 5
    assert run.series("bytes_up") == [(1, 5)]
    (folder / "rounds.jsonl").write_text('{"round": 1, "bytes_up": 5}\n{"round": 3, "bytes_up": 5}\n')
    assert load_run(folder).total("bytes_up") is None  # the record of a round was lost
