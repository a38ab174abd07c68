"""Tables and report of runs that are judged by perplexity."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedprune_app.results.figures import figures
from fedprune_app.results.groups import group_runs
from fedprune_app.results.reader import load_run
from fedprune_app.results.recorder import Recorder
from fedprune_app.results.report import write_report
from fedprune_app.results.tables import final_rows, perplexity_rows, table_text, write_tables


def language_run(folder, density, seed=0, value=7.5, rounds=1, more=""):
    recorder = Recorder(folder)
    config = {"system": "fedspallm", "dataset": "stdlib", "partition": "shards", "density": density, "seed": seed}
    config |= {"num-server-rounds": rounds, "fedspallm.evaluation-texts": more}
    partition = [{"partition": i, "segments": 32, "documents": ["json"]} for i in range(3)]
    recorder.start(config, seed, {"headline": "perplexity_global", "partition": partition, "model": {"name": "tiny"}})
    text = {
        "dense": 5.0,
        "global": value,
        "personal_mean": value + 1,
        "personal_std": 0.1,
        "window": 256,
        "windows": 9,
        "tokens": 2304,
    }
    layer = {"weights": 100, "kept_before_expansion": 70, "kept": 50, "mask_distance": 0.125, "pruners": 3}
    row = {
        "round": 1,
        "replies": 6,
        "bytes_up": 1000,
        "bytes_down": 10,
        "perplexity_global": value,
        "perplexity_personal_mean": value + 1,
        "perplexity_by_text": {"stdlib": text, "ptb": {**text, "windows": 4}},
        "density_global": density,
        "density_before_expansion": density + 0.2,
        "layers": {"0": layer, "1": {**layer, "mask_distance": None}},
    }
    for number in range(1, rounds + 1):
        recorder.clients({"round": number, "partition": i, "perplexity_personal": value + i} for i in range(3))
        recorder.round({**row, "round": number})
    recorder.masks([0, 1, 2], np.array([[0, 0.1, 0.2], [0.1, 0, 0.3], [0.2, 0.3, 0]]))
    recorder.finish("completed", final_sha256="ab" * 32)
    return folder


@pytest.fixture
def runs(tmp_path):
    places = [(0.5, 0, 7.5), (0.5, 1, 8.5), (0.2, 0, 90.0), (0.2, 1, 110.0)]
    return [language_run(tmp_path / f"{d}-{s}", d, s, value) for d, s, value in places]


def test_the_table_has_perplexities_and_no_accuracy(runs):
    groups = group_runs([load_run(each) for each in runs])
    header, _, *rows = table_text(".md", *final_rows(groups)).splitlines()[:4]
    assert "Perplexity, global model" in header
    assert "ccuracy" not in header
    assert "8.00 ± 0.71" in rows[0]
    assert "9.00 ± 0.71" in rows[0]
    assert "100.00 ± 14.14" in rows[1]


def test_the_report_shows_each_text_with_its_windows_and_each_layer(runs, tmp_path):
    drawn = {figure.key: figure for figure in figures(group_runs([load_run(each) for each in runs]))}
    views = {variant.name: variant for variant in drawn["perplexity"].variants}
    assert views.keys() == {"ptb: 4 × 256 tokens", "stdlib: 9 × 256 tokens"}
    points = [(trace["x"], trace["y"]) for trace in views["stdlib: 9 × 256 tokens"].traces]
    curves = [([0.0, 0.5, 0.8], [5.0, 9.0, 101.0]), ([0.0, 0.5, 0.8], [5.0, 8.0, 100.0])]
    assert points == [*curves, ([0.5], [9.0]), ([0.5], [8.0]), ([0.8], [101.0]), ([0.8], [100.0])]
    layers = {variant.name: variant for variant in drawn["decoder-layers"].variants}
    assert [trace["y"] for trace in layers["Agreement of masks"].traces] == [[0.875], [0.875]]
    assert [trace["y"] for trace in layers["Density before expansion"].traces] == [[0.7, 0.7], [0.7, 0.7]]
    assert [trace["y"] for trace in layers["after"].traces] == [[0.5, 0.5], [0.5, 0.5]]
    page = write_report(runs, tmp_path / "report.html").read_text()
    card = re.search(r'<p class="number">(.*?)</p>\s*<p class="muted small">(.*?)</p>', page)
    assert card is not None
    assert "%" not in card.group(1)
    assert card.group(2) == "perplexity, global model; stdlib: 9 × 256 tokens"
    assert "<dt>Dense model</dt><dd>5.00</dd>" in page
    assert "<dt>Density, pruned matrices</dt><dd>0.50</dd>" in page
    assert "worst decile" not in page.split("</dl>")[0]
    assert "partition shards" not in page


def test_the_page_has_a_table_of_every_text_before_pruning_alone_and_together(runs, tmp_path):
    header, rows = perplexity_rows(group_runs([load_run(each) for each in runs]))
    assert header[0] == "System"
    assert header[1:4] == [
        f"stdlib: 9 × 256 tokens, {whose}" for whose in ("dense model", "standalone", "global model")
    ]
    assert [row[1:4] for row in rows] == [
        ["5.00 ± 0.00", "9.00 ± 0.71", "8.00 ± 0.71"],
        ["5.00 ± 0.00", "101.00 ± 14.14", "100.00 ± 14.14"],
    ]
    assert len(header) == 7
    (path,) = [path for path in write_tables([load_run(each) for each in runs], tmp_path) if path.stem == "perplexity"]
    assert "| 101.00 ± 14.14 | 100.00 ± 14.14 |" in path.read_text()
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "ptb: 4 × 256 tokens, global model</th>" in page


def test_clients_own_models_are_standalone_after_one_round_alone(tmp_path):
    one, two = language_run(tmp_path / "one", 0.5, value=7.5), language_run(tmp_path / "two", 0.5, value=6.5, rounds=2)
    groups = group_runs([load_run(one), load_run(two)])
    header, rows = final_rows(groups)
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    assert [each["Perplexity, clients' own models"] for each in cells] == ["8.50", "7.50"]
    header, rows = perplexity_rows(groups)
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    text = "stdlib: 9 × 256 tokens"
    assert [[each[f"{text}, {who}"] for who in ("standalone", "clients' own", "global model")] for each in cells] == [
        ["8.50", "–", "7.50"],
        ["–", "7.50", "6.50"],
    ]
    drawn = {figure.key: figure for figure in figures(groups)}
    names = [trace["name"] for trace in drawn["perplexity"].variants[0].traces if "name" in trace]
    assert [name.rpartition(", ")[2] for name in names if "global" not in name] == ["standalone", "clients' own"]
    page = write_report([two], tmp_path / "report.html").read_text()
    assert "<dd>7.50</dd>" in re.sub(r"\s+", "", page), "the card has the mean of the clients' own"


def test_the_clients_masks_are_compared_by_the_names_of_their_documents(runs):
    drawn = {figure.key: figure for figure in figures(group_runs([load_run(each) for each in runs]))}
    view, *others = drawn["agreement"].variants
    assert len(others) == 3
    assert view.traces[0]["x"] == ["0 json", "1 json", "2 json"]
    assert view.traces[0]["z"] == [[None, 0.9, 0.8], [0.9, None, 0.7], [0.8, 0.7, None]]
    assert "masks" not in drawn
