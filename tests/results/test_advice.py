"""Advice says yes or no where three seeds tell it, and that they cannot tell it where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedprune_app.results.advice import Advice, federate, is_ahead, privacy, private, prune, write_advice
from fedprune_app.results.differences import difference
from fedprune_app.results.groups import Group
from fedprune_app.results.reader import Run

SITES = ("north", "coast", "city")


def method(system, accuracies, spread=0.001, seeds=(1, 2, 3), **columns):
    """Runs whose sites have these accuracies, a little more or less by seed."""
    runs = []
    for place, seed in enumerate(seeds):
        values = np.array(accuracies) + spread * (place - 1)
        clients = tuple({"round": 1, "partition": k, "accuracy_personal": v} for k, v in enumerate(values))
        info = {"system": system, "status": "completed", "seed": seed, "config": {}, "seconds": 60.0}
        runs.append(Run(Path(system), info, ({"round": 1, "bytes_up": 0.0, "bytes_down": 0.0, **columns},), clients))
    return Group(system, system, {}, tuple(runs))


ALONE = method("standalone", [0.5, 0.6, 0.7])


def test_sites_that_gain_should_federate_and_the_one_that_loses_is_named():
    gains = method("fedavg-ft", [0.6, 0.7, 0.65], spread=0.002)
    answer = federate({"standalone": ALONE, "fedavg-ft": gains}, SITES)
    assert answer.answer.startswith("yes: +5.0 points (+4.8 to +5.2)")
    assert "north gains most" in answer.details[0]
    assert "clearly worse off: city" in answer.details[0]


def test_what_seeds_disagree_on_cannot_be_told():
    unclear = method("fedavg-ft", [0.51, 0.61, 0.71], spread=0.05)
    answer = federate({"standalone": ALONE, "fedavg-ft": unclear}, SITES)
    assert answer.answer.startswith("cannot be told with 3 seeds: +1.0 points (")
    one_seed = method("fedavg-ft", [0.9, 0.9, 0.9], seeds=(1,))
    assert "cannot be told with 1 seed:" in federate({"standalone": ALONE, "fedavg-ft": one_seed}, SITES).answer
    assert "failed" in federate({"standalone": ALONE}, SITES).answer


def test_a_sparse_method_is_taken_where_it_is_shown_to_be_at_most_a_point_behind():
    dense = method("fedavg-ft", [0.6, 0.7, 0.8], bytes_up=100.0, bytes_down=100.0)
    near = method("feddst", [0.598, 0.698, 0.798], bytes_up=50.0, bytes_down=50.0, density_mean=0.5)
    far = method("dispfl", [0.5, 0.6, 0.7])
    methods = {"standalone": ALONE, "fedavg-ft": dense, "feddst": near, "dispfl": far}
    answer = prune(methods, ["feddst", "dispfl"], {"feddst": "; ONNX file: 100% of the bytes"})
    assert answer.answer.startswith("yes, with feddst: at most a point behind, -0.2 points")
    assert "50% of the weights, 50% of the traffic; ONNX file: 100% of the bytes" in answer.answer
    assert "dispfl: more than a point behind" in answer.details[0]
    assert prune({**methods, "feddst": far}, ["dispfl"], {}).answer.startswith("no: ")
    ahead = method("feddst", [0.65, 0.75, 0.85])
    assert prune({**methods, "feddst": ahead}, ["feddst"], {}).answer.startswith("yes, with feddst: ahead, +5.0 points")
    unclear = method("feddst", [0.6, 0.7, 0.8], spread=0.03)
    assert prune({**methods, "feddst": unclear}, ["feddst"], {}).answer.startswith("cannot be told")


def test_privacy_that_leaves_less_than_training_alone_is_not_worth_it():
    noisy = method("fedavg", [0.4, 0.5, 0.6], spread=0.002)
    methods = {"standalone": ALONE, "fedavg": method("fedavg", [0.55, 0.65, 0.75]), private("fedavg"): noisy}
    answer = privacy(methods, 8)
    assert answer.answer.startswith("not worth it")
    assert answer.details == ("ε 8 with fedavg: -15.0 points (-15.2 to -14.8) against the same without privacy",)
    assert "not asked" in privacy(methods, 0).answer


def test_privacy_that_seems_to_help_says_that_the_runs_do_not_suit():
    noisy = method("fedavg", [0.7, 0.8, 0.9], spread=0.002)
    methods = {"standalone": ALONE, "fedavg": method("fedavg", [0.55, 0.65, 0.75]), private("fedavg"): noisy}
    assert privacy(methods, 8).answer == (
        "cannot be told: FedAvg is more accurate with noise than without, so its learning rate or its rounds do not "
        "suit these data; give more minutes"
    )


@pytest.mark.parametrize(("values", "margin", "told"), [((0.02, 0.021, 0.019), 0, True), ((-0.005,) * 3, 0.01, True)])
def test_a_margin_is_how_far_behind_counts_as_level(values, margin, told):
    pairs = {(seed, k): value for seed, value in enumerate(values) for k in range(2)}
    found = difference(pairs, dict.fromkeys(pairs, 0.0), of_other_seeds=True)
    assert is_ahead(found, margin) is told
    assert is_ahead(difference(dict.fromkeys(pairs, 0.0), pairs, of_other_seeds=True)) is False or margin


def test_the_page_of_advice_is_small_and_says_what_each_method_is(tmp_path):
    methods = {"standalone": ALONE, "fedavg-ft": method("fedavg-ft", [0.6, 0.7, 0.65])}
    methods = {name: with_config(group) for name, group in methods.items()}
    summaries = {"standalone": "every client trains alone", "fedavg-ft": "FedAvg's model, fine-tuned by every client"}
    models = [("north", tmp_path / "models" / "north.onnx")]
    advice = Advice(methods, summaries, SITES, 0.0, [], {}, models, ["a note"], tmp_path / "runs.yaml")
    page = write_advice(advice, tmp_path / "advice.html").read_text()
    for text in ("3 sites", "3 rounds with 3 seeds", "These are few rounds", "fine-tuned by every client", "a note"):
        assert text in page
    advice = replace(advice, notes=["no time was left to choose learning rates"])
    assert "which may change any answer" in write_advice(advice, tmp_path / "advice.html").read_text()
    assert len(page) < 20_000
    assert str(tmp_path) not in page


def with_config(group):
    config = {"num-server-rounds": 3, "dataset": "table"}
    runs = (replace(run, info={**run.info, "config": config, "final_sha256": "0" * 64}) for run in group.runs)
    return replace(group, runs=tuple(runs))
