"""A search draws settings, goes by validation data alone, and goes on where it was stopped."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import math

import pytest
import yaml

import fedprune_app
from fedprune_app.config import read_toml
from fedprune_app.engine.store import exclusive
from fedprune_app.plugins import loading
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.sweeps import sweep as searching
from fedprune_app.sweeps.matrix import matrix_of, read_matrix, to_yaml
from fedprune_app.sweeps.sweep import best_matrix, effective
from tests.refusing import refuses

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


@pytest.mark.full
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


@pytest.mark.full
def test_a_private_search_says_that_epsilon_is_of_the_chosen_run_alone(fedprune, tmp_path):
    private = {"dp.enabled": True, "dp.noise-multiplier": 2.0, "local-epochs": 1, "fraction-train": 1.0}
    space = {"learning-rate": [0.1, 0.01]}
    document = {**DOCUMENT, "common": {**DOCUMENT["common"], **private}, "search": {"trials": 1, "space": space}}
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(document))
    code, said = fedprune("sweep", "search.yaml", "--engine", "inprocess", "--out", "found")
    assert code == 0, said
    assert "note: the ε of the chosen run does not cover the other trials" in said


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
def test_a_trial_that_fails_stops_no_other_and_is_repeated_by_a_resumed_search(tmp_path, monkeypatch):
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
    runs = fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", **QUICK, resume=True)
    assert [row["state"] for row in rows(tmp_path / "s")] == ["complete"] * 4
    assert len(runs) == 4


@pytest.mark.full
def test_a_search_does_not_go_on_with_other_settings(tmp_path):
    fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", **QUICK)
    with refuses("out", which="began with other settings, clients or plug-ins"):
        fedprune_app.sweep(DOCUMENT, out=tmp_path / "s", resume=True, momentum=0.9, **QUICK)
    with refuses("learning-rate", 0.1):
        fedprune_app.sweep(DOCUMENT, out=tmp_path / "t", learning_rate=0.1, **QUICK)


@pytest.mark.full
def test_a_search_does_not_go_on_with_another_network_of_the_same_name(tmp_path, no_plugins):
    file, network = tmp_path / "mine.py", "nn.Sequential(nn.Flatten(), nn.Linear(64, n))"
    text = f"from torch import nn\ndef net(shape, n): return {network}"
    common = {**DOCUMENT["common"], "model": f"{file}:net"}
    file.write_text(text)

    def search(trials, **more):
        document = {**DOCUMENT, "common": common, "search": {**DOCUMENT["search"], "trials": trials}}
        return fedprune_app.sweep(document, out=tmp_path / "s", **QUICK, **more)

    search(1)
    assert len(search(2, resume=True)) == 2
    file.write_text(text.replace("nn.Linear(64, n)", "nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, n)"))
    loading._files.clear()  # as another process has it
    with refuses("out", which="began with other settings, clients or plug-ins"):
        search(3, resume=True)


@pytest.mark.full
def test_a_search_goes_on_with_the_number_of_clients_that_it_began_with(tmp_path, capsys):
    def search(trials, **more):
        document = {**DOCUMENT, "clients": 4, "search": {**DOCUMENT["search"], "trials": trials}}
        return fedprune_app.sweep(document, out=tmp_path / "s", **QUICK | more)

    search(1, clients=2)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    with refuses("out", which="began with other settings, clients or plug-ins"):
        search(2, clients=3, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()} == before
    capsys.readouterr()
    runs = search(2, resume=True, progress=True)
    assert [len(run.info["partition"]) for run in runs] == [2, 2]
    assert "the sweep goes on with 2 clients, as it began, and not with 4" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"objective": "accuracy_personal_mean"},
            ("objective", "accuracy_personal_mean"),
        ),
        ({"sampler": "grid"}, ("sampler", "grid")),
        ({"trials": 0}, ("trials", 0)),
        ({"space": {}}, ("space", {})),
        ({"space": {"lr": [1]}}, ("setting", "lr")),
        ({"space": {"momentum": {"low": 0.9, "high": 0}}}, ("momentum in space",)),
        ({"space": {"density": 0.5}}, ("density in space", 0.5)),
        ({"space": {"learning-rate": {"low": -1.0, "high": 1.0}}}, ("learning-rate", -1.0)),
        ({"space": {"density": [0.1, 0.2]}}, ("density", 0.1)),
        (
            {"space": {"momentum": {"low": 0, "high": 0.9, "log": True}}},
            ("momentum in space",),
        ),
        (
            {"space": {"momentum": {"low": 0.1, "high": 0.9, "log": True, "step": 0.1}}},
            ("momentum in space",),
        ),
        (
            {"space": {"momentum": {"low": 0.1, "high": 0.9, "step": 0}}},
            ("momentum in space",),
        ),
        (
            {"space": {"momentum": {"low": 0.1, "high": 0.9, "step": "x"}}},
            ("momentum in space",),
        ),
        ({"space": {"momentum": {"low": "1e-9x", "high": 0.9}}}, ("momentum", "1e-9x")),
        ({"space": {"momentum": {"low": False, "high": 0.9}}}, ("momentum", False)),
        (
            {"space": {"learning-rate": {"low": 0.1, "high": math.inf}}},
            ("learning-rate", math.inf),
        ),
        (
            {"space": {"local-epochs": {"low": 1, "high": 3, "step": 0.5}}},
            ("local-epochs in space",),
        ),
        ({"speed": 3}, ("search",)),
        ({"objective": ["loss_mean"]}, ("objective", ["loss_mean"])),
        ({"space": {5: [1, 2]}}, ("space", 5)),
        ({"space": {"seed": [1, 2]}}, ("space", "seed")),
        ({"space": {"out-dir": ["a", "b"]}}, ("out-dir", "a")),
        ({"space": {"momentum": {"low": 0.1, "high": 0.9, "step": [1]}}}, ("momentum in space",)),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_anything_is_written(tmp_path, change, said):
    document = {**DOCUMENT, "search": {**DOCUMENT["search"], **change}}
    with refuses(*said, where="matrix 'in memory'"):
        fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"common": {**DOCUMENT["common"], "seed": 1}}, ("seed in common", 1)),
        ({"common": {**DOCUMENT["common"], "foo": 1}}, ("setting", "foo")),
        (
            {"common": {**DOCUMENT["common"], "density": 0.5}},
            ("density", 0.5),
        ),
        ({"common": {**DOCUMENT["common"], "resume-from": "q"}}, ("resume-from", "q")),
        ({"seeds": [0, 0]}, ("seeds", [0, 0])),
        ({"seeds": [0, -1]}, ("seed", -1)),
    ],
)
def test_a_search_with_a_wrong_entry_beside_it_is_refused_before_anything_is_written(tmp_path, change, said):
    with refuses(*said, where="matrix 'in memory'"):
        fedprune_app.sweep({**DOCUMENT, **change}, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("changes", [{"validation-fraction": 0}, {"system": "fedspallm", "dataset": "stdlib"}])
def test_a_search_by_validation_data_that_no_run_has_is_refused_before_anything_is_written(tmp_path, changes):
    common = {"system": "fedavg", "num-server-rounds": 1, **changes}
    space = {"density": [0.4]} if "dataset" in changes else {"momentum": [0.1]}
    document = {**DOCUMENT, "common": common, "search": {"space": space}}
    with refuses("objective", "accuracy_validation_mean"):
        fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


@pytest.mark.full
def test_a_search_by_what_a_last_phase_leaves_needs_one(tmp_path):
    objective = "accuracy_last_phase_validation_mean"
    search = {"trials": 1, "objective": objective, "space": {"momentum": [0.1]}}
    document = {**DOCUMENT, "common": {"system": "fedavg", "num-server-rounds": 1}, "search": search}
    with refuses("objective", objective, condition="with last-phase false"):
        fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    document["common"] |= {"last-phase": True, "evaluate-every": 1}
    (run,) = fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    assert float(rows(tmp_path / "s")[0][objective]) == run.rounds[-1][objective]


@pytest.mark.full
def test_systems_have_draws_of_their_own(tmp_path):
    common = {"num-server-rounds": 1, "evaluate-every": 1}
    search = {"trials": 1, "space": {"learning-rate": {"low": 0.01, "high": 0.3}}}
    document = {"clients": 3, "common": common, "systems": ["fedavg", "standalone"], "search": search}
    runs = fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    assert len({run.config["learning-rate"] for run in runs}) == 2


def test_a_search_by_the_loss_needs_no_validation_data(tmp_path):
    search = {"trials": 1, "objective": "loss_mean", "space": {"momentum": {"low": 0, "high": 0.9, "step": 0.45}}}
    common = {**DOCUMENT["common"], "validation-fraction": 0}
    runs = fedprune_app.sweep({**DOCUMENT, "common": common, "search": search}, out=tmp_path / "s", **QUICK)
    assert runs[0].config["momentum"] in (0, 0.45, 0.9)


@pytest.mark.full
@pytest.mark.parametrize(
    "document", [DOCUMENT, {"systems": ["fedavg"], "clients": 3, "common": {"num-server-rounds": 1}}]
)
def test_two_sweeps_are_not_at_work_in_one_folder(tmp_path, document):
    fedprune_app.sweep(document, out=tmp_path / "s", **QUICK)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    with exclusive(tmp_path / "s"):
        with refuses("out", tmp_path / "s", which="is in use"):
            fedprune_app.sweep(document, out=tmp_path / "s", resume=True, **QUICK)
        assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()} == before
    fedprune_app.sweep(document, out=tmp_path / "s", resume=True, **QUICK)


SEVERAL = {
    "clients": 3,
    "common": {"num-server-rounds": 1, "evaluate-every": 1},
    "seeds": [0, 4],
    "systems": ["fedavg", {"system": "fedprox", "local-epochs": 1, "space": {"fedprox.mu": [0.0, 0.1]}}],
    "search": {"trials": 2, "space": {"local-epochs": [1, 2], "momentum": {"low": 0.0, "high": 0.9}}},
}


@pytest.mark.full
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
        effective(search, {"learning-rate": 0.1, **({} if "momentum" in search.settings else {"momentum": 0.5})})
        for search in matrix_of(document, "x").searches
    ]
    (name,) = {name.partition("-digits")[0] for name, _ in matrix_of(best_matrix(several, [0, 4], 3), "x").settings}
    assert name == "fedavg"


@pytest.mark.full
def test_a_search_of_one_system_goes_on_beside_that_of_another(tmp_path):
    document = {**SEVERAL, "seeds": [0], "search": {**SEVERAL["search"], "trials": 1}}
    fedprune_app.sweep({**document, "systems": ["fedavg"]}, out=tmp_path / "s", **QUICK)
    more = fedprune_app.sweep(
        {**document, "systems": ["fedavg", "standalone"]}, out=tmp_path / "s", resume=True, **QUICK
    )
    assert [run.system for run in more] == ["fedavg", "standalone"]


@pytest.mark.full
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
        ({"datasets": ["digits"]}, ("entry", "datasets")),
        ({"common": {"system": "fedavg"}}, ("system in common", "fedavg")),
        ({"systems": None}, ("systems", None)),
        ({"systems": []}, ("systems", [])),
        ({"systems": ["fedavg", "fedavg"]}, ("name of systems", "fedavg")),
        ({"systems": ["fedavgg"]}, ("system", "fedavgg")),
        ({"systems": [{"system": "fedavg", "seed": 7}]}, ("seed in systems", 7)),
        ({"systems": [{"system": "fedavg", "space": 3}]}, ("space", 3)),
        ({"systems": [{"system": "fedavg", "space": {"density": [0.5]}}]}, ("density", 0.5)),
        (
            {"systems": [{"system": "fedavg", "momentum": 0.5, "local-epochs": 1}]},
            ("space", {}),
        ),
        ({"search": {"trials": 1}}, ("space", {})),
    ],
)
def test_searches_that_cannot_be_are_refused_before_anything_is_written(tmp_path, change, said):
    with refuses(*said, where="matrix 'in memory'"):
        fedprune_app.sweep({**SEVERAL, **change}, out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


@pytest.mark.full
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
    (search,) = matrix_of(document, "x").searches
    for topology in ("ring", "random"):
        kept = effective(search, {"dispfl.topology": topology, "dispfl.neighbours": 2})
        assert kept == {**common, "dispfl.topology": topology} | (
            {"dispfl.neighbours": 2} if topology == "random" else {}
        )
        matrix_of(best_matrix([kept], [0], 4), "x").cells(RunInputs(out=tmp_path))
    only = matrix_of({**document, "search": {"space": {**space, "dispfl.topology": ["ring"]}}}, "x")
    with refuses("dispfl.neighbours", 1):
        only.cells(RunInputs(out=tmp_path))


@pytest.mark.parametrize(
    ("key", "which"),
    [
        ("momentum", "the matrix varies"),
        ("fedprox.mu", "the matrix varies"),
        ("local-epochs", "the matrix varies"),
        ("system", "the matrix varies"),
        ("density", "has no effect"),
    ],
)
def test_what_searches_draw_or_set_for_one_system_is_not_given_for_all(tmp_path, key, which):
    with refuses(key, 1, which=which):
        fedprune_app.sweep(SEVERAL, out=tmp_path / "s", **{key: 1}, **QUICK)
    assert not (tmp_path / "s").exists()


def test_a_search_alone_has_one_system(tmp_path):
    with refuses("system", condition="with search"):
        matrix_of({"search": DOCUMENT["search"]}, "x")
    with refuses("setting", "space.momentum"):
        matrix_of({"systems": [{"system": "fedavg", "space": {"momentum": [0.1]}}]}, "x").cells(RunInputs(out=tmp_path))


@pytest.mark.parametrize("value", ["1e5", "yes", "1:30", "é\n", 1e-5, True, 2**62])
def test_a_matrix_that_is_written_is_read_as_it_was(tmp_path, value):
    document = {"systems": [{"system": "fedavg", "data-dir": value}], "seeds": [3]}
    (tmp_path / "matrix.yaml").write_text(to_yaml(document), encoding="utf-8")
    ((_, settings),) = read_matrix(tmp_path / "matrix.yaml").settings
    assert (settings["data-dir"], type(settings["data-dir"])) == (value, type(value))
