"""Advice on a folder of one's own: from files to a page, models and the matrix that repeats the runs."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image

from fedprune_app.data import splits
from fedprune_app.preflight.own_data import settings_of
from fedprune_app.results.advice import validated
from fedprune_app.results.reader import load_run
from fedprune_app.sweeps import advise
from tests.refusing import refuses

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def clinics(tmp_path):
    """A table of three clinics, whose rows have the label by the sum of two columns."""
    rng, folder = np.random.default_rng(0), tmp_path / "clinics"
    folder.mkdir()
    lines = ["a,b,clinic,outcome"]
    for clinic, count in (("c10", 60), ("c2", 40), ("c1", 30)):
        for a, b in rng.normal(size=(count, 2)):
            lines.append(f"{a},{b},{clinic},{'ill' if a + b > 0 else 'well'}")
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_table_says_which_column_may_be_the_owners(clinics):
    with refuses("owner-column", allowed="one of the columns a, b, clinic, outcome"):
        settings_of(clinics, {})
    found = settings_of(clinics, {"owner-column": "clinic"})
    assert (found["dataset"], found["partition"], found["owner-column"]) == ("table", "owners", "clinic")


def test_folders_of_sites_are_found_and_large_pictures_made_small(tmp_path):
    for site in ("north", "south"):
        for label in ("cat", "dog"):
            (tmp_path / site / label).mkdir(parents=True)
            Image.new("RGB", (100, 80)).save(tmp_path / site / label / "1.png")
    found = settings_of(tmp_path, {})
    assert (found["dataset"], found["partition"], found["image-size"]) == ("image-folder", "owners", 32)
    assert settings_of(tmp_path, {"image-size": 64})["image-size"] == 64
    (tmp_path / "north" / "cat" / "._1.png").write_bytes(b"what macOS leaves")
    assert settings_of(tmp_path, {}) == found
    small = tmp_path / "linked"
    (small / "elsewhere" / "cat").mkdir(parents=True)
    Image.new("L", (28, 28)).save(small / "elsewhere" / "cat" / "1.png")
    (small / "west").symlink_to(small / "elsewhere")
    assert "image-size" not in settings_of(small, {})
    shutil.rmtree(small)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with refuses("DIR", tmp_path):
        settings_of(tmp_path, {})
    (tmp_path / "train.xlsx").touch()
    with refuses("DIR", tmp_path):
        settings_of(tmp_path, {})


def test_each_site_has_a_file_of_its_own_whatever_its_name_is(tmp_path, monkeypatch):
    def write(folder, client, form, path, **how):
        path.write_text(str(client))
        return None, *2 * [SimpleNamespace(file_bytes=1, milliseconds=(1, 1))]

    monkeypatch.setattr(advise, "export_model", write)
    monkeypatch.setattr(advise.advice, "validation_of", lambda group: 1)
    group = SimpleNamespace(system="dispfl", first=SimpleNamespace(folder=tmp_path, config={"plugins": ""}))
    names = ["北京", "上海", "Ward (A)", "Ward [A]", "north", "North", "dispfl-1", "x" * 300]
    _, models = advise._files({"dispfl": group}, ["dispfl"], names, tmp_path / "models", [])
    assert [path.read_text() for _, path in models] == [str(client) for client in range(len(names))]
    files = [path.name.lower() for path in (tmp_path / "models").iterdir()]
    assert len({*files}) == len(names) + 1
    assert {"北京.onnx", "上海.onnx", "north.onnx", "dispfl-1.onnx"} <= {*files}


@pytest.mark.full
def test_with_too_few_minutes_the_rounds_measured_are_kept_for_a_second_call_on_the_same_data(fedprune, clinics):
    given = (clinics, "owner-column=clinic", "label-column=outcome", "--minutes", "0.01", "-o", "advice")
    allowed = "at least 1, by the first rounds on this machine; a second call goes on from here"
    for runs_before in ("", ": finished before"):
        code, said = fedprune("advise", *given)
        assert (code, said.count(": finished before")) == (2, 5 if runs_before else 0)
        assert said.endswith(f"error: --minutes is 0.01, allowed: {allowed}\n")
    code, said = fedprune("advise", *given, "batch-size=16")
    assert code == 2
    assert "advice', which holds something else than advice with these settings, allowed: a new folder\n" in said
    text = (clinics / "train.csv").read_text()
    (clinics / "train.csv").write_text(text.replace("ill", "sick"))
    splits.clear_cache()  # another process
    code, said = fedprune("advise", *given)
    assert code == 2
    assert "advice', which holds advice on other data, or on these before a change, allowed: a new folder\n" in said


@pytest.mark.parametrize("setting", ["learning-rate=0.1", "density=0.2", "fraction-train=0.5", "num-server-rounds=7"])
def test_what_advise_decides_is_no_setting_of_all_runs(fedprune, clinics, setting):
    columns = ("owner-column=clinic", "label-column=outcome")
    code, said = fedprune("advise", clinics, *columns, setting, "--minutes", "0", "-o", "advice")
    key, value = setting.split("=")
    assert code == 2
    assert said.endswith(f"error: {key} is {value}, which is what advise decides, allowed: other keys\n")


@pytest.mark.full
def test_only_the_runs_of_a_plug_in_need_it(fedprune, clinics, tmp_path):
    fedprune("advise", clinics, "owner-column=clinic", "label-column=outcome", "--minutes", "0", "-o", "advice")
    runs = [json.loads(path.read_text()) for path in (tmp_path / "advice" / "measured").glob("*/run.json")]
    assert {run["config"]["system"]: run["config"]["plugins"].rpartition("/")[2] for run in runs} == {
        "standalone": "", "fedavg": "", "fedavg-ft": "", "dispfl": "", "feddst": "feddst.py",
    }  # fmt: skip
    # whatever a method validates in its rounds, its learning rate is chosen by what is compared: own models
    for path in (tmp_path / "advice" / "measured").glob("*/rounds.jsonl"):
        last = json.loads(path.read_text().splitlines()[-1])
        assert validated(load_run(path.parent)) == last["accuracy_last_phase_validation_mean"] > 0


@pytest.mark.slow
def test_advice_on_a_table_is_a_page_with_three_answers_and_models_that_work(fedprune, clinics, tmp_path):
    given = ("owner-column=clinic", "label-column=outcome", "--minutes", "4", "--epsilon", "8")
    code, said = fedprune("advise", clinics, *given, "-o", "advice")
    assert code == 0, said
    assert (tmp_path / "advice" / "report.html").exists()
    page = (tmp_path / "advice" / "advice.html").read_text()
    for text in ("Should these sites federate?", "Should you prune, and how?", "What does privacy cost?", "c10"):
        assert text in page
    runs = [json.loads(path.read_text()) for path in (tmp_path / "advice" / "runs").glob("*/run.json")]
    assert {run["seed"] for run in runs} <= {1, 2, 3}
    assert {run["status"] for run in runs} == {"completed"}
    assert runs[0]["client_names"] == {"0": "c1", "1": "c2", "2": "c10"}
    assert all(run["final_sha256"] in page for run in runs)
    document = yaml.safe_load((tmp_path / "advice" / "runs.yaml").read_text())
    assert document["clients"] == 3
    assert fedprune("predict", tmp_path / "advice" / "models" / "c10.onnx", clinics / "train.csv")[0] == 0
    code, said = fedprune("advise", clinics, *given[:2], "--minutes", "1", "--epsilon", "8", "-o", "advice")
    assert (code, "round 1 of" in said) == (0, False), said  # all runs are there
