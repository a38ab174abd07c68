"""A search draws settings, goes by validation data alone, and goes on where it was stopped."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import math
import shutil

import pytest
import yaml

import fedprune_app
from fedprune_app.config import ConfigError, read_toml
from fedprune_app.engine.store import exclusive
from fedprune_app.preflight.given import Given
from fedprune_app.sweeps import search as searching
from fedprune_app.sweeps.matrix import matrix_of, read_matrix, to_yaml
from fedprune_app.sweeps.search import Found, best_matrix, best_settings

pytestmark = pytest.mark.filterwarnings("ignore")
SPACE = {
    "learning-rate": {"low": 0.001, "high": 0.3, "log": True},
    "local-epochs": {"low": 1, "high": 3},
    "fedprox.mu": [0.0, 0.1],
}
DOCUMENT = {
    "clients": 3,
    "common": {"system": "fedprox", "num-server-rounds": 1, "evaluate-every": 1},
    "search": {"trials": 4, "space": SPACE},
}
QUICK = {"engine": "inprocess", "progress": False}


def rows(folder, name="search.csv"):
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def test_a_search_tries_settings_of_its_space_and_says_what_was_best(fedprune, tmp_path):
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(DOCUMENT))
    code, said = fedprune("sweep", "search.yaml", "--engine", "inprocess", "--out", "found")
    assert code == 0, said
    found = rows(tmp_path / "found")
    assert len(found) == 4
    for row in found:
        assert row["state"] == "complete"
        assert 0.001 <= float(row["learning-rate"]) <= 0.3
        assert row["local-epochs"] in ("1", "2", "3")
        folder = tmp_path / "found" / f"trial{int(row['trial']):03d}-seed0"
        info = json.loads((folder / "run.json").read_text())
        assert info["config"]["learning-rate"] == float(row["learning-rate"])
        last = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
        assert float(row["accuracy_validation_mean"]) == last["accuracy_validation_mean"]
    assert len({row["learning-rate"] for row in found}) == 4
    best = max(found, key=lambda row: float(row["accuracy_validation_mean"]))
    assert f"learning-rate={best['learning-rate']}" in " ".join(said.partition("best: ")[2].split())


def test_a_private_search_says_that_epsilon_is_of_the_chosen_run_alone(fedprune, tmp_path):
    private = {"dp.enabled": True, "dp.noise-multiplier": 2.0, "local-epochs": 1, "fraction-train": 1.0}
    space = {"learning-rate": [0.1, 0.01]}
    document = {**DOCUMENT, "common": {**DOCUMENT["common"], **private}, "search": {"trials": 1, "space": space}}
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(document))
    code, said = fedprune("sweep", "search.yaml", "--engine", "inprocess", "--out", "found")
    assert code == 0, said
    assert "note: the ε of the chosen run does not cover the other trials" in said


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_that_was_stopped_goes_on_to_the_same_trials(tmp_path, monkeypatch, sampler):
    document = {**DOCUMENT, "search": {**DOCUMENT["search"], "sampler": sampler}}
    fedprune_app.sweep(document, out=tmp_path / "whole", **QUICK)
    real, count = searching._value_of, []

    def stopped(*given):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(searching, "_value_of", stopped)
    with pytest.raises(KeyboardInterrupt):
        fedprune_app.sweep(document, out=tmp_path / "stopped", **QUICK)
    runs = fedprune_app.sweep(document, out=tmp_path / "stopped", resume=True, **QUICK)
    assert len(runs) == 4
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    (tmp_path / "stopped" / "search.csv").unlink()
    fedprune_app.sweep(document, out=tmp_path / "stopped", resume=True, **QUICK)
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")


def test_settings_that_are_drawn_again_are_not_run_again_and_count_once(tmp_path):
    search = {"trials": 5, "sampler": "random", "space": {"momentum": [0.0, 0.9]}}
    runs = fedprune_app.sweep({**DOCUMENT, "search": search}, out=tmp_path / "s", **QUICK)
    found = rows(tmp_path / "s")
    assert [row["state"] for row in found] == ["complete"] * 5
    values = {row["momentum"]: row["accuracy_validation_mean"] for row in found}
    assert [row["accuracy_validation_mean"] for row in found] == [values[row["momentum"]] for row in found]
    firsts = sorted(min(int(row["trial"]) for row in found if row["momentum"] == value) for value in values)
    assert [run.folder.name for run in runs] == [f"trial{first:03d}-seed0" for first in firsts]
    assert [path.name for path in sorted((tmp_path / "s").glob("trial*"))] == [run.folder.name for run in runs]


def test_a_trial_that_fails_stops_no_other(tmp_path, monkeypatch):
    real, count = searching._value_of, []

    def failing(*given):
        count.append(1)
        if len(count) == 2:
            raise fedprune_app.LaunchError("training diverged")
        return real(*given)

    monkeypatch.setattr(searching, "_value_of", failing)
    runs = fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", **QUICK)
    assert [row["state"] for row in rows(tmp_path / "s")] == ["complete", "fail", "complete", "complete"]
    assert len(runs) == 3


def test_a_search_does_not_go_on_with_other_settings(tmp_path):
    fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", **QUICK)
    with pytest.raises(ConfigError, match="has a search with other settings, allowed: the same, or a new folder"):
        fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", resume=True, momentum=0.9, **QUICK)
    with pytest.raises(ConfigError, match="learning-rate is given in the call, allowed"):
        fedprune_app.sweep(DOCUMENT, out=tmp_path / "t", learning_rate=0.1, **QUICK)


def test_a_search_goes_on_with_the_number_of_clients_that_it_began_with(tmp_path):
    def search(trials, **more):
        document = {**DOCUMENT, "clients": 4, "search": {**DOCUMENT["search"], "trials": trials}}
        return fedprune_app.sweep(document, out=tmp_path / "s", **QUICK, **more)

    search(1, clients=2)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"^clients is 3, allowed when resuming the search in .*: 2, as it began"):
        search(2, clients=3, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()} == before
    runs = search(2, resume=True)
    assert [len(run.info["partition"]) for run in runs] == [2, 2]


def test_a_search_whose_runs_are_gone_still_knows_its_number_of_clients(tmp_path):
    fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", **QUICK)
    for folder in (tmp_path / "s").glob("trial*"):
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"^clients is 2, allowed when resuming the search in .*: 3, as it began"):
        fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", clients=2, resume=True, **QUICK)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"objective": "accuracy_personal_mean"}, "nothing may be decided by test data"),
        ({"sampler": "grid"}, "sampler is 'grid', allowed: tpe, random"),
        ({"trials": 0}, "trials is 0, allowed: a whole number, at least 1"),
        ({"space": {}}, "space is {}, allowed: a range or choices for each key"),
        ({"space": {"lr": [1]}}, "unknown key 'lr': did you mean 'learning-rate'"),
        ({"space": {"num-server-rounds": [1, 2]}}, "num-server-rounds is in common and in space, allowed: in one of"),
        ({"space": {"momentum": [0.5, 0.9, 0.5]}}, "momentum in space has the choice 0.5 twice, allowed: once"),
        ({"space": {"density": {"low": 1, "high": 0}}}, "density in space is .*, allowed: a list of choices, or"),
        ({"space": {"density": 0.5}}, "density in space is 0.5, allowed: a list of choices, or"),
        ({"space": {"learning-rate": {"low": -1.0, "high": 1.0}}}, "learning-rate is -1.0, allowed: above 0"),
        ({"space": {"density": [0.1, 0.2]}}, "density .* has no effect with system 'fedprox'"),
        ({"space": {"density": {"low": 0, "high": 0.9, "log": True}}}, "allowed: with log a low above 0"),
        ({"space": {"local-epochs": {"low": 0, "high": 9, "log": True}}}, "allowed: with log a low above 0"),
        (
            {"space": {"momentum": {"low": 0.1, "high": 0.9, "log": True, "step": 0.1}}},
            "allowed: log or step, not both",
        ),
        ({"space": {"momentum": {"low": 0.1, "high": 0.9, "log": "no"}}}, "allowed: log: true or false"),
        ({"space": {"momentum": {"low": 0.1, "high": 0.9, "step": 0}}}, "allowed: a step above 0 that is not larger"),
        ({"space": {"momentum": {"low": 0.1, "high": 0.9, "step": "x"}}}, "allowed: a step above 0 that is not larger"),
        ({"space": {"momentum": {"low": 0.1, "high": 0.9, "step": 1}}}, "allowed: a step above 0 that is not larger"),
        ({"space": {"momentum": {"low": False, "high": 0.9}}}, "momentum in space is .*, allowed: a list of choices"),
        ({"space": {"learning-rate": {"low": 0.1, "high": math.inf}}}, "learning-rate in space is .*, allowed: a list"),
        (
            {"space": {"local-epochs": {"low": 1, "high": 3, "step": 0.5}}},
            "local-epochs is 1.5, allowed: a whole number",
        ),
        (
            {"space": {"validation-fraction": [0.1, 0.0]}},
            "validation-fraction is 0.0, allowed with objective .*: above 0",
        ),
        ({"speed": 3}, "search has unknown entry 'speed', allowed: trials, sampler, objective, space"),
        ({"objective": ["loss_mean"]}, r"objective is \['loss_mean'\], allowed: accuracy_validation_mean, loss_mean"),
        ({"space": {5: [1, 2]}}, "space has the key 5, allowed: names of settings"),
        ({"space": {"seed": [1, 2]}}, "space has the key 'seed', allowed: in seeds"),
        ({"space": {"out-dir": ["a", "b"]}}, "out-dir is 'a', allowed here: out DIR"),
        ({"space": {"momentum": {"low": 0.1, "high": 0.9, "step": [1]}}}, "allowed: a step above 0"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_anything_is_written(tmp_path, change, said):
    document = {**DOCUMENT, "search": {**DOCUMENT["search"], **change}}
    with pytest.raises(ConfigError, match=f"^matrix 'in memory'.*{said}"):
        fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"common": {**DOCUMENT["common"], "seed": 1}}, "common sets 'seed', allowed: in seeds"),
        ({"common": {**DOCUMENT["common"], "foo": 1}}, "unknown key 'foo'"),
        (
            {"common": {**DOCUMENT["common"], "density": 0.5}},
            "density is 0.5, which has no effect with system 'fedprox'",
        ),
        ({"common": {**DOCUMENT["common"], "resume-from": "q"}}, "resume-from is 'q', allowed here: out DIR"),
        ({"seeds": [0, 0]}, r"seeds is \[0, 0\], allowed: each whole number once"),
        ({"seeds": [0, -1]}, "seed is -1, allowed: at least 0"),
    ],
)
def test_a_search_with_a_wrong_entry_beside_it_is_refused_before_anything_is_written(tmp_path, change, said):
    with pytest.raises(ConfigError, match=f"^matrix 'in memory': {said}"):
        fedprune_app.sweep({**DOCUMENT, **change}, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("objective", "common", "said"),
    [
        (
            "accuracy_validation_mean",
            {"validation-fraction": 0},
            "validation-fraction is 0.0, allowed with .*: above 0",
        ),
        (
            "accuracy_validation_mean",
            {"samples-per-client": 1, "partition": "iid"},
            "validation-fraction is 0.1, .* and these data",
        ),
        ("accuracy_validation_mean", {"system": "fedspallm"}, "system is 'fedspallm', allowed .* learns from images"),
        (
            "accuracy_validation_mean",
            {"dp.enabled": True, "dp.noise-multiplier": 1, "dp.accuracies": "none"},
            "dp.accuracies is 'none', allowed with objective .*: noised, open",
        ),
        ("loss_mean", {"dp.enabled": True, "dp.noise-multiplier": 1}, "dp.enabled is True, allowed with .*: false"),
        (
            "loss_mean",
            {"system": "fedspallm", "fedspallm.merge": "hessians"},
            "fedspallm.merge is 'hessians', allowed with objective 'loss_mean': mean",
        ),
    ],
)
def test_a_search_by_what_no_run_measures_is_refused_before_anything_is_written(tmp_path, objective, common, said):
    is_of_text = common.get("system") == "fedspallm"
    space = {"density": [0.4, 0.5]} if is_of_text else {"learning-rate": [0.1, 0.2]}
    shared = {"system": "fedavg", "num-server-rounds": 1, **({"dataset": "stdlib"} if is_of_text else {})}
    document = {**DOCUMENT, "common": {**shared, **common}, "search": {"objective": objective, "space": space}}
    with pytest.raises(ConfigError, match=said):
        fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


def test_a_search_by_the_loss_needs_no_validation_data(tmp_path):
    search = {"trials": 1, "objective": "loss_mean", "space": {"momentum": {"low": 0, "high": 0.9, "step": 0.45}}}
    common = {**DOCUMENT["common"], "validation-fraction": 0}
    runs = fedprune_app.sweep({**DOCUMENT, "common": common, "search": search}, out=tmp_path / "s", **QUICK)
    assert runs[0].config["momentum"] in (0, 0.45, 0.9)


@pytest.mark.parametrize(
    "document", [DOCUMENT, {"systems": ["fedavg"], "clients": 3, "common": {"num-server-rounds": 1}}]
)
def test_two_sweeps_are_not_at_work_in_one_folder(tmp_path, document):
    fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    with exclusive(tmp_path / "s"):
        with pytest.raises(
            ConfigError, match="is in use by another process, allowed: a new folder, or resume=True later"
        ):
            fedprune_app.sweep(document, out=tmp_path / "s", resume=True, **QUICK)
        assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()} == before
    fedprune_app.sweep(document, out=tmp_path / "s", resume=True, **QUICK)


def test_a_folder_of_a_search_without_a_trial_takes_other_settings(tmp_path, monkeypatch):
    def stopped(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(searching, "_next_trial", stopped)
        with pytest.raises(KeyboardInterrupt):
            fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", **QUICK)
    search = {**DOCUMENT["search"], "trials": 1, "sampler": "random"}
    assert len(fedprune_app.sweep({**DOCUMENT, "search": search}, out=tmp_path / "s", resume=True, **QUICK)) == 1


SEVERAL = {
    "clients": 3,
    "common": {"num-server-rounds": 1, "evaluate-every": 1},
    "seeds": [0, 4],
    "systems": ["fedavg", {"system": "fedprox", "local-epochs": 1, "space": {"fedprox.mu": [0.0, 0.1]}}],
    "search": {"trials": 2, "space": {"local-epochs": [1, 2], "momentum": {"low": 0.0, "high": 0.9}}},
}


def test_several_systems_are_searched_and_compared_with_seeds_that_no_search_used(fedprune, tmp_path):
    (tmp_path / "data").mkdir()
    lines = [f"{number % 7},{number % 2}" for number in range(120)]
    for part in ("train", "test"):
        (tmp_path / "data" / f"{part}.csv").write_text("\n".join(["size,label", *lines]))
    table = {"dataset": "table", "data-dir": "data", "model": "mlp-small", "partition": "iid"}
    common = {**SEVERAL["common"], **table}
    (tmp_path / "search.yaml").write_text(yaml.safe_dump({**SEVERAL, "common": common}))
    code, said = fedprune("sweep", "search.yaml", "--engine", "inprocess", "--out", "found")
    assert code == 0, said
    folder = tmp_path / "found"
    names = {"fedavg": ["local-epochs", "momentum"], "fedprox-local-epochs1": ["momentum", "fedprox.mu"]}
    for name, keys in names.items():
        table = rows(folder, f"search-{name}.csv")
        assert list(table[0]) == ["trial", *keys, "accuracy_validation_mean", "state"]
        best = max(table, key=lambda row: float(row["accuracy_validation_mean"]))
        kept = read_toml(folder / f"best-{name}.toml")
        assert {key: str(kept[key]) for key in keys} == {key: best[key] for key in keys}
        assert f"{name} best: " in said
        for number, seed in itertools.product(("001", "002"), (0, 4)):
            assert (folder / f"{name}-trial{number}-seed{seed}" / "run.json").exists()
    document = yaml.safe_load((folder / "best.yaml").read_text())
    assert document["seeds"] == [5, 6]
    assert document["common"]["data-dir"] == str(tmp_path / "data")
    assert [entry["system"] for entry in document["systems"]] == ["fedavg", "fedprox"]
    before = (folder / "best.yaml").read_bytes()
    code, said = fedprune("sweep", "search.yaml", "--engine", "inprocess", "--out", "found", "--resume")
    assert (code, (folder / "best.yaml").read_bytes()) == (0, before), said
    code, said = fedprune("sweep", "found/best.yaml", "--engine", "inprocess", "--out", "compared")
    assert code == 0, said
    compared = fedprune_app.load_run(next((tmp_path / "compared").glob("fedprox-*-seed5")))
    kept = read_toml(folder / "best-fedprox-local-epochs1.toml")
    assert all(compared.config[key] == value for key, value in kept.items())
    assert len(compared.info["partition"]) == 3


def test_what_two_searches_found_alike_is_compared_once(tmp_path):
    systems = [{"system": "fedavg", "momentum": 0.5}, {"system": "fedavg", "space": {"momentum": [0.5, 0.9]}}]
    document = {**SEVERAL, "systems": systems, "search": {"space": {"learning-rate": [0.1, 0.01]}}}
    several = [
        (
            search,
            Found(
                {"learning-rate": 0.1, **({} if "momentum" in search.common else {"momentum": 0.5})}, 0.5, (), tmp_path
            ),
        )
        for search in matrix_of(document, "x").each
    ]
    (name,) = {name.partition("-digits")[0] for name, _ in matrix_of(best_matrix(several, 3), "x").settings}
    assert name == "fedavg-learning-rate0.1"


def test_a_folder_of_searches_is_not_taken_for_others(tmp_path):
    document = {**SEVERAL, "seeds": [0], "search": {**SEVERAL["search"], "trials": 1}}
    fedprune_app.sweep({**document, "systems": ["fedavg"]}, out=tmp_path / "s", **QUICK)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    for other in ({"systems": ["standalone"]}, {"common": {**SEVERAL["common"], "system": "fedavg"}}):
        asked = {key: value for key, value in {**document, **other}.items() if key != "systems" or key in other}
        with pytest.raises(
            ConfigError, match="has trials of another search, 'fedavg', allowed: the systems that it has"
        ):
            fedprune_app.sweep(asked, out=tmp_path / "s", resume=True, **QUICK)
        assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()} == before
    more = fedprune_app.sweep(
        {**document, "systems": ["fedavg", "standalone"]}, out=tmp_path / "s", resume=True, **QUICK
    )
    assert [run.system for run in more] == ["fedavg", "standalone"]


def test_a_search_in_which_no_trial_succeeds_stops_no_other(tmp_path):
    broken = {"system": "standalone", "learning-rate": 1e30}
    document = {**SEVERAL, "seeds": [0], "systems": [broken, "fedavg"]}
    with pytest.raises(
        fedprune_app.RunsFailed, match=r"1 of 2 searches failed: standalone.*: none of 2 trials"
    ) as error:
        fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    assert {run.system for run in error.value.runs} == {"fedavg"}
    again = copy.copy(error.value)  # made anew, as by a pool of processes
    assert (str(again), again.failed) == (str(error.value), error.value.failed)
    assert [run.folder for run in again.runs] == [run.folder for run in error.value.runs]
    document = yaml.safe_load((tmp_path / "s" / "best.yaml").read_text())
    assert [entry["system"] for entry in document["systems"]] == ["fedavg"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"datasets": ["digits"]}, "has datasets beside search, allowed: common, systems, seeds, clients and search"),
        ({"common": {"system": "fedavg"}}, "common sets 'system', allowed: in systems"),
        ({"systems": None}, "systems is None, allowed: a list of settings"),
        ({"systems": []}, r"systems is \[\], allowed: a list of settings"),
        ({"systems": ["fedavg", "fedavg"]}, "has two systems named 'fedavg', allowed: distinct settings"),
        ({"systems": ["fedavgg"]}, ".*did you mean 'fedavg'"),
        ({"systems": [{"system": "fedavg", "seed": 7}]}, "an entry of systems sets 'seed', allowed: in seeds"),
        (
            {"systems": [{"system": "fedavg", "momentum": 0.5}, {"system": "standalone", "momentum": 0.9}]},
            "momentum is in space and in each entry of systems, allowed: in one of them",
        ),
        ({"systems": [{"system": "fedavg", "space": 3}]}, ": 'fedavg' in systems: space is 3, allowed: a range or"),
        ({"systems": [{"system": "fedavg", "space": {"density": [0.5]}}]}, ".*no effect with system 'fedavg'"),
        (
            {"systems": [{"system": "fedavg", "lr-decay": 0.9, "space": {"lr-decay": [0.9]}}]},
            ": 'fedavg-lr-decay0.9' in systems: lr-decay is in the entry and in space, allowed: in one of them",
        ),
        (
            {"systems": [{"system": "fedavg", "momentum": 0.5, "local-epochs": 1}]},
            ": 'fedavg-momentum0.5-local-epochs1' in systems has nothing to draw, allowed: a space in search or in",
        ),
        ({"search": {"trials": 1}}, ": 'fedavg' in systems has nothing to draw"),
    ],
)
def test_searches_that_cannot_be_are_refused_before_anything_is_written(tmp_path, change, said):
    with pytest.raises(ConfigError, match=f"^matrix 'in memory'.*{said}"):
        fedprune_app.sweep({**SEVERAL, **change}, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


def test_a_setting_is_drawn_that_has_an_effect_with_some_choice_of_another_one_alone(tmp_path):
    space = {"dispfl.topology": ["ring", "random"], "dispfl.neighbours": [1, 2, 3]}
    common = {"system": "dispfl", "num-server-rounds": 1, "evaluate-every": 1, "local-epochs": 1}
    document = {"clients": 4, "common": common, "search": {"trials": 3, "sampler": "random", "space": space}}
    runs = fedprune_app.sweep(
        {**document, "search": {"trials": 12, "sampler": "random", "space": space}}, out=tmp_path / "s", **QUICK
    )
    drawn = [(row["dispfl.topology"], row["dispfl.neighbours"]) for row in rows(tmp_path / "s")]
    assert {topology for topology, _ in drawn} == {"ring", "random"}
    assert len(runs) == len({(topology, topology == "random" and count) for topology, count in drawn}) < len(set(drawn))
    (search,) = matrix_of(document, "x").each
    for topology in ("ring", "random"):
        found = Found({"dispfl.topology": topology, "dispfl.neighbours": 2}, 0.5, (), tmp_path)
        kept = best_settings(search, found)
        assert kept == {**common, "dispfl.topology": topology} | (
            {"dispfl.neighbours": 2} if topology == "random" else {}
        )
        matrix_of(best_matrix([(search, found)], 4), "x").cells(Given(out=tmp_path))
    (search,) = matrix_of({**document, "search": {"space": {**space, "dispfl.topology": ["ring"]}}}, "x").each
    with pytest.raises(ConfigError, match=r"dispfl.neighbours is 3, which has no effect with dispfl.topology 'ring'"):
        search.check()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("momentum", "momentum is given in the call, allowed: what the search does not draw"),
        ("fedprox.mu", "fedprox.mu is given in the call, allowed: what the search does not draw"),
        ("local-epochs", "local-epochs is given in the call, allowed: what the search does not draw"),
        ("system", "system is given in the call, allowed: what the entry 'fedavg' does not set"),
        ("density", "density is 1.0, which has no effect with system 'fedavg'; density needs .*"),
    ],
)
def test_what_searches_draw_or_set_for_one_system_is_not_given_for_all(tmp_path, key, said):
    with pytest.raises(ConfigError, match=f"^{said}$"):
        fedprune_app.sweep(SEVERAL, out=tmp_path / "s", **{key: 1}, **QUICK)
    assert not (tmp_path / "s").exists()


def test_a_search_alone_has_one_system(tmp_path):
    with pytest.raises(
        ConfigError, match="common has no system, allowed with search: one system, or the entry systems"
    ):
        matrix_of({"search": DOCUMENT["search"]}, "x")
    with pytest.raises(ConfigError, match="an entry of systems has a space, allowed: beside the entry search"):
        matrix_of({"systems": [{"system": "fedavg", "space": {"momentum": [0.1]}}]}, "x")


TEXTS = [
    "1e5",
    "010",
    "1:30",
    "yes",
    "null",
    "~",
    "2024-01-01",
    "a: b",
    "",
    ".5",
    "1_000",
    "# no",
    "'",
    "é\n",
    "=",
    ".inf",
]


@pytest.mark.parametrize("value", [*TEXTS, 1e-5, 0.1, 3, -2.5e300, True, False, math.inf, 2**62])
def test_a_matrix_that_is_written_is_read_as_it_was(tmp_path, value):
    document = {"systems": [{"system": "fedavg", "data-dir": value}], "seeds": [3]}
    (tmp_path / "matrix.yaml").write_text(to_yaml(document), encoding="utf-8")
    ((_, settings),) = read_matrix(tmp_path / "matrix.yaml").settings
    assert (settings["data-dir"], type(settings["data-dir"])) == (value, type(value))
    assert yaml.safe_load(to_yaml(document)) == document
