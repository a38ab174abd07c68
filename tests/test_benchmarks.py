"""The benchmark of a GPU runs where there is none, and loses nothing where something breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.docs.scripts import script

ROOT = Path(__file__).parents[1]


@pytest.mark.programs
def test_every_part_of_the_gpus_benchmark_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--threads", "1"], cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row for row in rows if "failed" in row or "no time" in row["what"]] == []
    whole = [row["part"] for row in rows if row["what"] == "whole part"]
    assert (whole[0], whole[-1], len(whole)) == ("facts", "launches", 11)


def bench(out, **options):
    given = {"device": "cpu", "tiny": True, "threads": torch.get_num_threads(), "data_dir": "", "seconds": 100.0}
    return script("_gpu").Bench(Namespace(out=out, **given | options))


def written(out):
    return json.loads((out / "results.json").read_text())


def test_a_part_that_fails_says_why_and_the_others_go_on(tmp_path):
    seen = []

    def fails(bench):
        bench.row("first", number=1)
        seen.extend(written(tmp_path))  # whole already
        raise RuntimeError("no such kernel")

    for _ in range(2):  # rows of an earlier run stay
        bench(tmp_path).run({"one": (fails, 1), "two": (lambda bench: bench.row("second"), 1)})
    assert seen[0]["number"] == 1
    rows = written(tmp_path)
    assert [row["what"] for row in rows[:4]] == ["first", "whole part", "second", "whole part"]
    assert rows[1]["failed"] == "RuntimeError: no such kernel"
    assert len(rows) == 2 * 5


def test_a_part_has_its_share_of_what_is_left(tmp_path):
    lefts = []
    bench(tmp_path).run({name: (lambda bench: lefts.append(bench.left), share) for name, share in (("a", 1), ("b", 3))})
    assert lefts[0] == pytest.approx(25, rel=0.2)
    assert lefts[1] == pytest.approx(100, rel=0.2)  # it gets what the first one leaves
    bench(tmp_path, seconds=0.0).run({"a": (lambda bench: lefts.append(0), 1)})
    assert len(lefts) == 2
    assert written(tmp_path)[-2]["what"] == "no time for whole part"


def test_after_a_lost_device_the_other_parts_go_on_in_a_new_process(tmp_path, monkeypatch):
    class Started(BaseException):
        pass

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def started(program, arguments):
        raise Started(arguments)

    running = bench(tmp_path)
    running.on_gpu = True
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(os, "execv", started)
    with pytest.raises(Started) as again:
        running.run({"one": (lambda bench: None, 1), "two": (lambda bench: None, 1)})
    assert again.value.args[0][-2:] == ["--parts", "two"]
    assert "lost" in written(tmp_path)[-1]["what"]


def test_the_zero_shot_tasks_are_those_of_the_script():
    zero_shot = script("zero_shot")
    files = zero_shot.files()
    assert {path.name: path.read_text(encoding="utf-8") for path in zero_shot.TASKS.iterdir()} == files
    for name in zero_shot.NAMES:
        questions = [json.loads(line) for line in files[f"{name}.jsonl"].splitlines()]
        answers = [each["answer"] for each in questions]
        assert len({each["question"] for each in questions}) == len(questions)
        assert all(len({*each["choices"]}) == len(each["choices"]) > each["answer"] for each in questions)
        assert max(answers.count(answer) for answer in answers) <= len(answers) / len({*answers}) * 1.2
