"""Differences between systems are paired by client, and their intervals hold the truth as often as they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedprune_app.config.common import DEALT_BY, PUBLISHED
from fedprune_app.data.names import DATASETS, LOADERS, TEXTS
from fedprune_app.data.splits import DataConfig
from fedprune_app.results.differences import (
    accuracies,
    difference,
    difference_tables,
    from_best,
    of_the_same_data,
)
from fedprune_app.results.groups import Group, group_runs
from fedprune_app.results.reader import Run, load_run


def group_of(label, accuracies):
    rows = tuple({"round": 1, "partition": k, "accuracy_personal": value} for k, value in accuracies.items())
    info = {"system": label, "status": "completed", "seed": 0, "config": {}}
    return Group(label, label, {}, (Run(Path(label), info, (), rows),))


def paired(values):
    return {(0, client): value for client, value in enumerate(values)}


def test_a_difference_is_paired_by_client():
    easy = np.linspace(0.2, 0.9, 40)  # clients differ by far more than the systems do
    found = difference(paired(easy + 0.01), paired(easy))
    assert found.mean == pytest.approx(0.01)
    assert not found.doubt
    assert found.ahead == 1.0
    assert found.pairs == 40
    back = difference(paired(easy), paired(easy + 0.01))
    assert (back.mean, back.low, back.high) == pytest.approx((-found.mean, -found.high, -found.low))


def test_only_pairs_of_both_count_and_one_is_too_few():
    assert difference({(0, 0): 0.5, (0, 1): 0.6}, {(0, 1): 0.5, (1, 0): 0.5}) is None
    found = difference({(0, 0): 0.5, (0, 1): 0.6, (1, 0): 0.9}, {(0, 0): 0.5, (0, 1): 0.4, (2, 0): 0.1})
    assert found.pairs == 2
    assert found.mean == pytest.approx(0.1)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        apart = rng.normal(0.02, 0.05, 30)
        found = difference(paired(apart), paired(np.zeros(30)))
        held += found.low <= 0.02 <= found.high
    assert 0.88 <= held / 200 <= 0.99


def of_seeds(means, rng, spread=0.05, clients=30):
    return {
        (seed, k): value for seed, mean in enumerate(means) for k, value in enumerate(rng.normal(mean, spread, clients))
    }


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_an_interval_of_other_seeds_holds_the_truth_as_often_as_it_says(seeds, spread):
    """However few the seeds are, and whether they differ more than their clients do or not at all."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        first = of_seeds(rng.normal(0.02, spread, seeds), rng)
        found = difference(first, dict.fromkeys(first, 0.0), of_other_seeds=True)
        held += found.low <= 0.02 <= found.high
    assert 0.92 <= held / 400 <= 0.98


@pytest.mark.full
def test_an_interval_of_these_seeds_is_too_narrow_for_others():
    rng, held = np.random.default_rng(0), 0
    for _ in range(100):
        first = of_seeds(rng.normal(0.02, 0.05, 5), rng)
        found = difference(first, dict.fromkeys(first, 0.0))
        held += found.low <= 0.02 <= found.high
    assert held <= 60


def test_few_clients_and_seeds_that_disagree_leave_a_doubt():
    three = {(0, 0): 0.1, (0, 1): 0.2, (0, 2): 0.3}
    assert difference(three, dict.fromkeys(three, 0.0)).doubt == "fewer than 10 clients"
    people = {(seed, client): 0.1 + 0.01 * seed for seed in (0, 1, 2) for client in range(5)}
    assert not difference(people, dict.fromkeys(people, 0.0), of_other_seeds=True).doubt, (
        "Student's t needs no ten clients"
    )
    rng = np.random.default_rng(0)
    apart = of_seeds([0.5, 0.4, -0.1], rng, spread=0.01)
    assert difference(apart, dict.fromkeys(apart, 0.0)).doubt == "seeds disagree"
    assert difference(apart, dict.fromkeys(apart, 0.0), of_other_seeds=True).doubt == "the interval holds 0"
    noise = of_seeds([0.0, 0.0, 0.0], rng)
    assert difference(noise, dict.fromkeys(noise, 0.0), of_other_seeds=True).doubt == "the interval holds 0"


@pytest.mark.full
def test_many_pairs_take_little_memory_and_give_the_same_interval_each_time():
    values = np.random.default_rng(1).normal(0, 1, 20_000)
    first, again = (difference(paired(values), paired(np.zeros(20_000))) for _ in range(2))
    assert first == again
    assert first.high - first.low == pytest.approx(2 * 1.96 / np.sqrt(20_000), rel=0.1)


def test_a_report_compares_each_system_with_the_best_on_the_same_data(make_run):
    folders = [make_run(f"{name}{seed}", name, seed, clients=12) for name in ("fedavg", "dispfl") for seed in (0, 1)]
    groups = group_runs([load_run(folder) for folder in folders])
    best, others = from_best(groups)
    means = {group.label: np.mean(list(accuracies(group).values())) for group in groups}
    assert best == max(means, key=means.get)
    ((group, apart),) = others
    assert apart.pairs == 24
    assert apart.mean == pytest.approx(means[best] - means[group.label])
    ((_, label, rows),) = difference_tables(groups)
    assert label == best
    assert float(rows[0][1]) == pytest.approx(-100 * apart.mean, abs=0.005)


def test_a_clear_difference_of_one_seed_says_so(make_run):
    def rows_of(seeds):
        runs = [
            make_run(f"{name}{seed}-{len(seeds)}", name, seed, clients=12, plateau=plateau)
            for seed in seeds
            for name, plateau in (("fedavg", 0.9), ("dispfl", 0.3))
        ]
        ((_, _, ((*_, said),)),) = difference_tables(group_runs([load_run(folder) for folder in runs]))
        return said

    assert rows_of([0]) == "yes, for this seed"
    assert rows_of([0, 1, 2]) == "yes"


def test_runs_whose_plugin_has_changed_are_no_seeds_of_one_setting(make_run):
    code = {0: "sha256 " + "a" * 64, 1: "sha256 " + "b" * 64, 2: "sha256 " + "b" * 64}
    folders = [make_run(f"n{seed}", "mine", seed, extra={"plugins": {"mine.py": code[seed]}}) for seed in code]
    assert sorted(len(group.runs) for group in group_runs([load_run(folder) for folder in folders])) == [1, 2]
    released = [
        make_run(f"v{seed}", "mine", seed, extra={"plugins": {"mine": f"plugin-of-mine {seed}.0"}}) for seed in (1, 2)
    ]
    assert len(group_runs([load_run(folder) for folder in released])) == 2


def test_a_run_that_did_not_end_is_compared_with_nothing(make_run):
    folders = [make_run(name, name, 0, clients=12) for name in ("fedavg", "dispfl")]
    folders.append(make_run("ditto", "ditto", 0, clients=12, plateau=0.99, status="interrupted"))
    ((_, best, rows),) = difference_tables(group_runs([load_run(folder) for folder in folders]))
    assert {best, rows[0][0]} == {"fedavg", "dispfl"}
    assert len(rows) == 1


def test_systems_that_are_all_judged_by_their_global_model_are_compared_by_it(make_run):
    """Fine-tuning hides which global model is better: here its clients' own models are in the other order."""
    folders = [make_run(name, name, 0, clients=12, headline="accuracy_global") for name in ("fedavg", "fedprox")]
    runs = [load_run(folder) for folder in folders]
    for run, (own, of_global) in zip(runs, [(0.9, 0.5), (0.8, 0.7)], strict=True):
        for row in run.clients:
            row |= {"accuracy_personal": own, "accuracy_global": of_global}
    groups = group_runs(runs)
    ((measure, best, ((label, points, *_),)),) = difference_tables(groups)
    assert (measure, best, label, points) == ("accuracy_global", "fedprox", "fedavg", "-20.00")
    runs[0].info["headline"] = "accuracy_personal_mean"
    assert difference_tables(groups)[0][:2] == ("accuracy_personal_mean", "fedavg")


def test_a_single_system_is_compared_with_nothing(make_run):
    assert difference_tables(group_runs([load_run(make_run("a", "fedavg", 0))])) == []


def test_a_system_that_lacks_a_seed_of_the_other_is_not_compared_with_it(make_run):
    """The means that stand beside the difference are of all seeds."""
    folders = [make_run(f"fedavg{seed}", "fedavg", seed, clients=12) for seed in (0, 1)]
    folders.append(make_run("dispfl0", "dispfl", 0, clients=12))
    assert difference_tables(group_runs([load_run(folder) for folder in folders])) == []


def test_systems_on_other_data_are_compared_among_themselves(make_run):
    folders = [
        make_run(f"{place}-{system}-", system, 0, clients=12, config={"dataset": place})
        for place in ("digits", "mnist")
        for system in ("fedavg", "dispfl")
    ]
    tables = difference_tables(group_runs([load_run(folder) for folder in folders]))
    assert [len(rows) for _, _, rows in tables] == [1, 1]


@pytest.mark.parametrize(
    ("key", "values"), [("dirichlet-alpha", (0.1, 1.0)), ("shards-per-client", (2, 5)), ("test-fraction", (0.3, 0.4))]
)
def test_private_runs_whose_data_are_dealt_otherwise_are_not_compared(make_run, key, values):
    """A private run withholds its label counts, so they cannot tell that its data are others."""
    withheld = {"partition": [{"partition": k, "train": [], "validation": [], "test": []} for k in range(12)]}
    folders = [
        make_run(f"{system}{value}", system, 0, clients=12, config={key: value}, extra=withheld)
        for system, value in zip(("fedavg", "dispfl"), values, strict=True)
    ]
    assert difference_tables(group_runs([load_run(folder) for folder in folders])) == []
    alike = make_run("alike", "ditto", 0, clients=12, config={key: values[0]}, extra=withheld)
    ((_, _, rows),) = difference_tables(group_runs([load_run(folder) for folder in (*folders, alike)]))
    assert len(rows) == 1


def test_a_private_run_that_takes_a_public_part_is_not_compared_with_one_that_does_not(make_run):
    withheld = {"partition": [{"partition": k, "train": [], "validation": [], "test": []} for k in range(12)]}
    settings = {"dpfed": {}, "fedltp": {"fedltp.tickets": 3}, "fedspa": {"public-fraction": 0.2}}
    folders = [make_run(s, s, 0, clients=12, config=more, extra=withheld) for s, more in settings.items()]
    groups = group_runs([load_run(folder) for folder in folders])
    assert [sorted(g.system for g in alike) for alike in of_the_same_data(groups)] == [["dpfed"], ["fedltp", "fedspa"]]


def test_a_servers_public_folder_is_no_data_of_clients(make_run):
    public = {"fedltp.public-dataset": "image-folder", "fedltp.public-data-dir": "/public"}
    folders = [make_run("a", "fedltp", 0, clients=12, config=public), make_run("b", "dpfed", 0, clients=12)]
    assert len(difference_tables(group_runs([load_run(folder) for folder in folders]))) == 1


def test_runs_on_other_folders_are_not_compared(make_run):
    folders = [
        make_run(f"{system}-{place}", system, 0, clients=12, config={"dataset": "table", "data-dir": f"/{place}"})
        for system, place in (("fedavg", "a"), ("dispfl", "b"))
    ]
    assert difference_tables(group_runs([load_run(folder) for folder in folders])) == []


def test_the_keys_that_deal_the_data_are_those_of_its_configuration():
    fields = {name.replace("_", "-") for name in DataConfig.__dataclass_fields__}
    derived = {"by-group", "is-own", "private", "split-secret", "public-share"}
    assert {*DEALT_BY} - {"public-fraction"} == fields - derived - {"data-dir", "download"}
    assert {*DATASETS, *TEXTS} - PUBLISHED - {*LOADERS} == {"image-folder", "table", "huggingface", "text"}


def test_the_best_system_is_that_of_the_clients_which_all_have():
    """A system that lost its hardest client is not better for that."""
    whole = {client: 0.5 + client / 100 for client in range(20)}
    groups = [group_of("whole", whole), group_of("lost", {k: v - 0.01 for k, v in whole.items() if k > 5})]
    assert from_best(groups)[0] == "whole"
