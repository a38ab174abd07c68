"""Tables and Hugging Face's folders are read as what they are, and refused by name where they are not."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import fedprune_app
from fedprune_app import cli
from fedprune_app.data import plugin_datasets, splits, tables
from fedprune_app.data.dataset import FileError, Form
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.splits import DataConfig, client_data, dataset_of, label_counts
from fedprune_app.exports.file import load_model, read_export_info
from fedprune_app.exports.predict import predictions
from fedprune_app.results.groups import group_runs
from fedprune_app.results.reader import load_run
from fedprune_app.results.tables import final_rows
from tests.examples import full
from tests.refusing import refuses


@pytest.fixture(autouse=True)
def nothing_kept():
    splits.clear_cache()


def patients(count, seed):
    rng = np.random.default_rng(seed)
    age, pressure = rng.integers(20, 90, count), rng.normal(120, 15, count)
    ill = np.where(age + rng.normal(0, 5, count) > 60, "ill", "well")
    return pd.DataFrame(
        {
            "age": age,
            "pressure": pressure,
            "smokes": age % 2 == 0,
            "clinic": [f"c{k % 3}" for k in range(count)],
            "label": ill,
        }
    )


@pytest.fixture
def clinics(tmp_path):
    patients(300, 0).to_csv(tmp_path / "train.csv", index=False)
    patients(90, 1).to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_is_read_with_its_columns_as_features(clinics):
    data = load_dataset("table", clinics, owner_column="clinic")
    rows = patients(300, 0)
    assert data.classes == ("ill", "well")
    assert data.image_shape == (3, 1, 1)
    np.testing.assert_allclose(data.train_images[:, 1, 0, 0], rows["pressure"], rtol=1e-6)
    np.testing.assert_array_equal(data.train_images[:, 2, 0, 0], rows["smokes"])
    np.testing.assert_array_equal(data.train_labels, (rows["label"] == "well").astype(int))
    assert data.owners[:4].tolist() == [0, 1, 2, 0]
    assert data.mean[0] == pytest.approx(rows["age"].mean())
    assert len(data.test_labels) == 90


def test_parquet_is_the_same_table(clinics, tmp_path):
    for part in ("train", "test"):
        (tmp_path / "p").mkdir(exist_ok=True)
        pd.read_csv(clinics / f"{part}.csv").to_parquet(tmp_path / "p" / f"{part}.parquet")
    here, there = (load_dataset("table", folder, owner_column="clinic") for folder in (clinics, tmp_path / "p"))
    np.testing.assert_array_equal(here.train_images, there.train_images)
    assert here.classes == there.classes


def test_numbers_as_labels_are_in_the_order_of_their_values(tmp_path):
    rows = pd.DataFrame({"x": range(24), "label": [10, 9, 2] * 8})
    rows.to_csv(tmp_path / "train.csv", index=False)
    assert load_dataset("table", tmp_path, needs_test=False).classes == ("2", "9", "10")


def write(rows, path):
    if path.suffix == ".csv":
        rows.to_csv(path, index=False)
    else:
        rows.to_parquet(path)


def named(names):
    return pd.DataFrame({"x": np.arange(len(names)), "label": names})


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["1", "01"], ("01", "1")),
        (["007", "008"], ("007", "008")),
        (["NA", "None", "null"], ("NA", "None", "null")),
        (["10", "9", "1.0"], ("1.0", "9", "10")),
    ],
)
def test_labels_stay_the_texts_that_they_are(tmp_path, form, labels, classes):
    write(named(labels * 4), tmp_path / f"train.{form}")
    for given in ((), classes):
        data = load_dataset("table", tmp_path, needs_test=False, classes=given)
        assert data.classes == classes
        assert [data.classes[label] for label in data.train_labels] == labels * 4


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_empty_label_is_a_missing_one(tmp_path, form):
    write(named(["1", "", "2", None]), tmp_path / f"train.{form}")
    with pytest.raises(ValueError, match="has 2 missing values in column 'label', allowed: none"):
        load_dataset("table", tmp_path, needs_test=False)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_owner_has_one_name_in_both_files_whatever_else_is_in_the_column(tmp_path, form):
    write(named(["a", "b"] * 2).assign(who=[1, 2, None, 1]), tmp_path / f"train.{form}")  # pandas writes 1.0
    write(named(["a", "b"]).assign(who=[1, 2]), tmp_path / f"test.{form}")
    data = load_dataset("table", tmp_path, owner_column="who")
    assert data.owners.tolist() == [0, 1, -1, 0]
    assert data.test_owners.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("owners", "numbers"), [(["01", "1", "NA"], [0, 1, 2]), ([2**60 + 1, None, 2**60], [1, -1, 0])]
)
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_owners_whose_names_are_alike_are_two(tmp_path, form, owners, numbers):
    write = {"csv": lambda t, path: t.to_csv(path, index=False), "parquet": pd.DataFrame.to_parquet}[form]
    whose = pd.array(owners, dtype="Int64" if None in owners else "object")
    write(named(["a", "b", "a"]).assign(who=whose), tmp_path / f"train.{form}")
    data = load_dataset("table", tmp_path, needs_test=False, owner_column="who")
    assert data.owners.tolist() == numbers


def test_blanks_around_a_name_are_no_part_of_it(tmp_path):
    (tmp_path / "train.csv").write_text("x,label,who\n0,a,north\n1,b,south\n2,a,nobody else\n")
    (tmp_path / "test.csv").write_text("x,label,who\n0,a,north \n1,b,west\n")
    config = DataConfig("table", str(tmp_path), partition="owners", test_split="holdout", owner_column="who")
    assert load_dataset("table", tmp_path, owner_column="who").test_owners.tolist() == [1, -1]
    assert splits.unread(config)[0].startswith("1 examples of the test part are dealt to clients too")


def test_clinics_are_clients(clinics):
    config = DataConfig("table", str(clinics), partition="owners", test_split="labels", owner_column="clinic")
    assert [sum(label_counts(config, client, 3)["train"]) for client in range(3)] == [90, 90, 90]
    config = DataConfig("table", str(clinics), partition="owners", test_split="holdout", owner_column="clinic")
    sizes = [sum(sum(part) for part in label_counts(config, client, 3).values()) for client in range(3)]
    assert sizes == [130, 130, 130]  # those of the test file too: the table says whose they are
    assert splits.unread(config) == [
        "90 examples of the test part are dealt to clients too, since test-split is 'holdout'"
    ]


@pytest.mark.parametrize("is_own", [False, True])
def test_rows_that_are_held_out_for_a_test_have_no_part_in_the_normalisation(clinics, is_own):
    if is_own:
        (clinics / "test.csv").unlink()
    config = DataConfig(
        "table", str(clinics), partition="owners", test_split="holdout", owner_column="clinic", is_own=is_own
    )
    count = 1 if is_own else 3
    of_all = [client_data(config, client, count) for client in range(count)]
    kept = torch.cat([part for data in of_all for part in (data.train_images, data.validation_images)]).double()
    assert kept.mean(0).abs().max() < 1e-6
    torch.testing.assert_close(kept.std(0, correction=0), torch.ones_like(kept[0]), rtol=1e-5, atol=0)
    tested = torch.cat([data.test_images for data in of_all]).double()
    assert tested.mean(0).abs().max() > 1e-3
    assert dataset_of(config, count).mean != dataset_of(config).mean


@pytest.fixture
def visits(tmp_path):
    """``visits(test=...)``: 240 rows of 60 patients, whose numbers are no feature, and of nobody in particular."""

    def write(test=0):
        frame = patients(240 + test, 0).assign(patient=[f"p{k % 60}" if k % 8 else "" for k in range(240 + test)])
        frame[:240].to_csv(tmp_path / "train.csv", index=False)
        if test:
            frame[240:].assign(patient=[f"p{k % 90}" for k in range(test)]).to_csv(tmp_path / "test.csv", index=False)
        return DataConfig("table", str(tmp_path), test_split="holdout", ignore_columns="clinic", group_column="patient")

    return write


def names_by_part(config, clients=3):
    groups = splits._pool(config).groups
    for client in range(clients):
        parts = splits._split_indices(config, client, clients)
        yield {part: {groups[i] for i in indices.tolist()} - {""} for part, indices in parts.items()}


@pytest.mark.parametrize("how", [{}, {"private": True}, {"private": True, "by_group": True}], ids=str)
def test_no_patient_stands_on_both_sides_of_a_split(visits, how):
    config = replace(visits(), partition="iid", **how)
    assert dataset_of(config).features == ("age", "pressure", "smokes")
    for names in names_by_part(config):
        assert min(map(len, names.values())) > 0
        assert not names["train"] & names["test"]
        assert not names["validation"] & (names["train"] | names["test"])


@pytest.mark.parametrize("test_split", ["labels", "proportional"])
def test_patients_of_the_shared_test_rows_whom_any_client_trains_on_are_left_out(visits, test_split):
    config = replace(visits(test=200), partition="iid", test_split=test_split)
    parts = names_by_part(config)
    trained = set().union(*(names["train"] | names["validation"] for names in parts))
    for names in parts:
        assert names["test"]
        assert not names["test"] & trained


def test_groups_are_counted_in_place_of_rows_where_they_are_protected(visits):
    config = replace(visits(), partition="iid", private=True, by_group=True)
    sizes = splits.part_sizes(config, 0, 3)
    pool, parts = splits._pool(config), splits._split_indices(config, 0, 3)
    for part, numbers in splits.group_numbers(config, 0, 3).items():
        names = [pool.groups[i] or i for i in parts[part].tolist()]
        assert sizes[part] == len(set(names)) == int(numbers.max()) + 1
        assert numbers.tolist() == [list(dict.fromkeys(names)).index(name) for name in names]
    assert splits.group_numbers(replace(config, by_group=False), 0, 3) == {}
    assert "30 examples have no group: each is a group of its own" in splits.unread(config)


def test_a_patient_more_moves_nobody_else_into_another_part(visits, tmp_path):
    config = replace(visits(), is_own=True, private=True, by_group=True, split_secret="s" * 64)
    (before,) = names_by_part(config, 1)
    frame = pd.read_csv(tmp_path / "train.csv")
    pd.concat([frame[:5].assign(patient="new"), frame]).to_csv(tmp_path / "train.csv", index=False)
    splits.clear_cache()
    (after,) = names_by_part(config, 1)
    assert {part: names - {"new"} for part, names in after.items()} == before


def test_what_is_told_of_own_patients_is_planned_by_their_number_alone(visits, tmp_path):
    """Wherever the rows are, and however many one of them has: what is told follows from how many there are."""
    config = replace(visits(test=90), is_own=True, private=True, by_group=True, split_secret="s" * 64)
    (names,) = names_by_part(config, 1)
    assert not names["test"] & (names["train"] | names["validation"])  # a patient of both files is for training
    sizes = splits.part_sizes(config, 0, 1)
    frame = pd.read_csv(tmp_path / "train.csv")
    known = frame["patient"].nunique() + int(frame["patient"].isna().sum())
    assert sizes == {"train": known - round(0.1 * known), "validation": round(0.1 * known), "test": sizes["test"]}
    pd.concat([frame, frame[frame["patient"] == "p1"]]).to_csv(tmp_path / "train.csv", index=False)
    splits.clear_cache()
    assert splits.part_sizes(config, 0, 1) == sizes


def test_data_without_groups_protect_no_groups():
    with refuses("dp.unit", "group", condition="with these data"):
        splits.part_sizes(DataConfig(private=True, by_group=True, test_split="holdout"), 0, 3)


def test_a_file_of_tests_with_groups_is_refused_where_single_examples_are_protected(visits):
    """Which tests count would follow from which groups train: one example would move as many as its group has."""
    config = replace(visits(test=90), is_own=True, private=True, split_secret="s" * 64)
    with refuses("dp.unit", "example", condition="with these data"):
        splits.part_sizes(config, 0, 1)
    assert splits.part_sizes(replace(config, by_group=True), 0, 1)["test"] > 0


def test_somebody_who_has_test_rows_alone_is_no_client(clinics):
    for part, count, seed, names in (("train", 300, 0, "ac"), ("test", 90, 1, "abc")):
        rows = patients(count, seed)
        rows.assign(clinic=[names[k % len(names)] for k in range(count)]).to_csv(clinics / f"{part}.csv", index=False)
    sizes = []
    for test_split in ("labels", "holdout"):
        config = DataConfig("table", str(clinics), partition="owners", test_split=test_split, owner_column="clinic")
        counts = [label_counts(config, client, 2) for client in range(2)]
        assert all(sum(each["train"]) and sum(each["test"]) for each in counts)
        sizes.append([sum(sum(part) for part in each.values()) for each in counts])
        with pytest.raises(ValueError, match="--clients is 3"):
            label_counts(config, 0, 3)
    assert sizes[1] == [150 + 30, 150 + 30]  # the 30 rows of b are nobody's


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (
            lambda t: t.drop(columns="label"),
            {},
            "has no column 'label', which label-column names, allowed: age, ",
        ),
        (lambda t: t, {"owner_column": "ward"}, "has no column 'ward', which owner-column names, allowed: age, "),
        (lambda t: t, {}, "has column 'clinic' without numbers, allowed: numbers"),
        (
            lambda t: t.assign(age=None),
            {"owner_column": "clinic"},
            "has 300 missing values in column 'age'",
        ),
        (lambda t: t.assign(label="x"), {"owner_column": "clinic"}, "has one label, 'x', allowed: at least two"),
        (lambda t: t.assign(age=1e300), {"owner_column": "clinic"}, "too large for float32"),
        (lambda t: t.iloc[:0], {}, "train.csv' has no rows, allowed: at least one"),
        (lambda t: t, {"label_column": ""}, "has no column '', which label-column names"),
    ],
)
def test_a_table_that_cannot_be_is_refused(clinics, change, settings, said):
    change(patients(300, 0)).to_csv(clinics / "train.csv", index=False)
    with pytest.raises(ValueError, match=said) as error:
        load_dataset("table", clinics, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0,0.1,0.2,1\n", "cannot be read: Length of header or names does not match length of data"),
        ("0,0.1,x\n\n0,0.1,1,\n", "cannot be read: .* Expected 3 fields in line 4, saw 4"),
        ("0,0.1,x\n0,0.1\n", "has 2 missing values in column 'label'"),
    ],
)
def test_a_line_of_more_or_fewer_values_than_the_header_is_refused(tmp_path, lines, said):
    (tmp_path / "train.csv").write_text(f"a,b,label\n{lines}{lines}")
    with pytest.raises(FileError, match=said):
        load_dataset("table", tmp_path, needs_test=False)


NAMELESS = "has columns without a name, or two of one name, allowed: a name of its own for each .to_csv.index=Fal"


@pytest.mark.parametrize("header", [",a,label", "a, ,label", "a,a,label", "label,a,label"])
def test_columns_without_a_name_or_of_one_name_are_refused(tmp_path, header):
    (tmp_path / "train.csv").write_text(f"{header}\n0,1,2\n3,4,5\n")
    with pytest.raises(FileError, match=NAMELESS):
        load_dataset("table", tmp_path, needs_test=False)


def test_columns_that_pandas_keeps_as_the_index_of_parquet_are_columns(tmp_path):
    rows = pd.DataFrame({"site": [1.0, 2, 3, 4], "age": [30.0, 40, 50, 60], "label": list("abab")})
    found = []
    for number, index in enumerate(([], ["site"], ["site", "age"])):
        (tmp_path / f"{number}").mkdir()
        (rows.set_index(index) if index else rows).to_parquet(tmp_path / f"{number}" / "train.parquet")
        found.append(tables.table(tmp_path / f"{number}", Form(needs_test=False), public_scale=True))
    assert [each.features for each in found] == [("site", "age")] * 3
    assert all((each.train_images == found[0].train_images).all() for each in found)


def test_columns_of_parquet_without_a_name_or_of_one_name_are_refused(tmp_path):
    values = [pa.array([1.0, 2.0]), pa.array([3.0, 4.0]), pa.array(["x", "y"])]
    for names, told in [(["", "a", "label"], NAMELESS), (["a", "a", "label"], "Multiple matches")]:
        parquet.write_table(pa.table(values, names=names), tmp_path / "train.parquet")
        with pytest.raises(FileError, match=told):
            load_dataset("table", tmp_path, needs_test=False)


def test_blank_lines_quotes_and_a_byte_order_mark_are_no_values(tmp_path):
    text = '\ufeff"a",b,label\n\n1,2,"x,\ny"\n  \n3,4,z\n\n'
    (tmp_path / "train.csv").write_text(text, encoding="utf-8")
    data = load_dataset("table", tmp_path, needs_test=False)
    assert data.classes == ("x,\ny", "z")
    assert data.train_images[:, :, 0, 0].tolist() == [[1, 2], [3, 4]]


def test_columns_of_parquet_whose_names_are_numbers_have_names(tmp_path):
    rows = pd.DataFrame({0: [1.0, 2.0], 1: ["x", "y"]})
    rows.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="has no column 'label', which label-column names, allowed: 0, 1"):
        load_dataset("table", tmp_path, needs_test=False)
    splits.clear_cache()
    assert load_dataset("table", tmp_path, needs_test=False, label_column="1").classes == ("x", "y")


def test_the_classes_of_a_refused_label_are_cut_where_they_are_many(clinics):
    for part, count in (("train", 300), ("test", 90)):
        rows = patients(count, 0).drop(columns="clinic")
        rows.assign(label=[k / 8 + (part == "test") / 16 for k in range(count)]).to_csv(
            clinics / f"{part}.csv", index=False
        )
    with pytest.raises(ValueError, match=r"has the label '0.0625', allowed: 0.0, .*, ... \(288 more\)$"):
        load_dataset("table", clinics)


def test_a_test_table_has_the_columns_and_labels_of_the_training_table(clinics):
    rows = patients(90, 1)
    for broken, said in (
        (rows.drop(columns="age"), "has no column 'age', which the training rows have"),
        (rows.assign(label="dead"), "has the label 'dead', allowed: ill, well"),
    ):
        broken.to_csv(clinics / "test.csv", index=False)
        splits.clear_cache()
        with pytest.raises(ValueError, match=said):
            load_dataset("table", clinics, owner_column="clinic")
    (clinics / "test.csv").unlink()
    with pytest.raises(ValueError, match=re.escape("has no test.csv or test.parquet")) as error:
        load_dataset("table", clinics, owner_column="clinic")
    assert "test-split=holdout" in str(error.value)


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda t: t, {"label_column": "name of mine"}),
        (lambda t: t.assign(age=None), {}),
        (lambda t: t.assign(age="secret"), {}),
        (lambda t: t.assign(label="secret"), {}),
        (lambda t: t, {"classes": ("1", "2")}),
    ],
)
def test_a_damaged_table_is_refused(clinics, change, settings):
    change(patients(300, 0).drop(columns="clinic")).to_csv(clinics / "train.csv", index=False)
    with pytest.raises(FileError):
        load_dataset("table", clinics, needs_test=False, **settings)


@pytest.mark.parametrize("system", ["fedavg", full("subfedavg"), full("fedp3")])
def test_a_run_on_a_table(fedprune, clinics, tmp_path, system):
    given = ("dataset=table", f"data-dir={clinics}", "owner-column=clinic", "partition=owners", f"system={system}")
    quick = ("num-server-rounds=4", "--clients", "3", "--engine", "inprocess", "--out", "run")
    code, said = fedprune("run", *given, "learning-rate=0.1", *quick)
    assert code == 0, said
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert rows[-1]["accuracy_personal_mean"] > 0.75  # who is older is more often ill
    code, said = fedprune("check-data", *given[:3])
    assert code == 0, said


def test_what_is_charged_follows_the_number_of_patients(fedprune, visits, tmp_path):
    """Steps, sampling rate and counts, by the ledger of each client; who reads the record is told the unit."""
    config = visits()
    given = ("dataset=table", f"data-dir={tmp_path}", "ignore-columns=clinic", "group-column=patient", "system=fedavg")
    private = ("dp.enabled=true", "dp.unit=group", "dp.noise-multiplier=1", "dp.delta=1e-3", "partition=iid")
    quick = ("num-server-rounds=1", "local-epochs=2", "fraction-train=1", "batch-size=5")
    code, said = fedprune("run", *given, *private, *quick, "--clients", "2", "--engine", "inprocess", "--out", "run")
    assert code == 0, said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["protected_unit"] == "patient"
    dealt = replace(config, partition="iid", private=True, by_group=True)
    for client in range(2):
        sizes = splits.part_sizes(dealt, client, 2)
        ledger = (tmp_path / "run" / "clients" / f"{client:05d}" / "ledger.jsonl").read_text().splitlines()
        first, steps = (json.loads(line.split(" ", 1)[1]) for line in ledger[:2])
        assert first["unit"] == "patient"
        assert (steps["sample_rate"], steps["count"]) == (5 / sizes["train"], 2 * -(-sizes["train"] // 5))
        assert sizes["train"] < len(splits._split_indices(dealt, client, 2)["train"])
    assert "(per patient, simulated)" in str(final_rows(group_runs([load_run(tmp_path / "run")])))


@pytest.mark.full
def test_a_run_whose_groups_have_one_row_each_is_one_of_examples_to_the_last_bit(fedprune, clinics, tmp_path):
    for part in ("train", "test"):
        frame = pd.read_csv(clinics / f"{part}.csv").assign(patient="")
        frame.to_csv(clinics / f"{part}.csv", index=False)
    ends = []
    for unit in ("example", "group"):
        given = ("dataset=table", f"data-dir={clinics}", "group-column=patient", "system=fedavg")
        private = ("dp.enabled=true", f"dp.unit={unit}", "dp.noise-multiplier=1", "num-server-rounds=1")
        code, said = fedprune("run", *given, *private, *ON_CLINICS[:-1], unit)
        assert code == 0, said
        rows = [json.loads(line) for line in (tmp_path / unit / "clients.jsonl").read_text().splitlines()]
        told = [{k: v for k, v in row.items() if k not in ("flops", "bytes_up", "bytes_down")} for row in rows]
        ends.append((json.loads((tmp_path / unit / "run.json").read_text())["final_sha256"], told))
    assert ends[0] == ends[1]


ON_CLINICS = ("owner-column=clinic", "partition=owners", "--clients", "3", "--engine", "inprocess", "--out", "run")


@pytest.mark.parametrize("whose", [("--client", "1"), full(("--global",))])
def test_a_table_is_predicted_by_the_names_of_its_columns(fedprune, clinics, tmp_path, whose, capsys):
    run = fedprune("run", "system=fedavg", "dataset=table", f"data-dir={clinics}", "num-server-rounds=2", *ON_CLINICS)
    assert run[0] == 0, run[1]
    assert fedprune("export", "run", *whose, "-o", "net.safetensors")[0] == 0
    info = read_export_info(tmp_path / "net.safetensors")
    assert info.features == ("age", "pressure", "smokes")
    rows = patients(1500, 5)  # more than go through the network together
    rows[["smokes", "label", "pressure", "age"]].assign(name="Ann").to_csv("other order.csv", index=False)
    rows.drop(columns=["label", "clinic"]).to_parquet("rows.parquet")
    files = [Path("rows.parquet"), Path("other order.csv")]
    found = predictions(tmp_path / "net.safetensors", files, top=2)
    inputs = torch.tensor(rows[list(info.features)].to_numpy(dtype=np.float32))
    network = load_model(tmp_path / "net.safetensors")
    shares = network(((inputs - torch.tensor(info.mean)) / torch.tensor(info.std))[:, :, None, None]).softmax(1)
    assert fedprune_app.predict("net.safetensors", "rows.parquet", top=2) == found[:1500]
    for file in files:
        mine = [each for each in found if each.file == file]
        assert [each.row for each in mine] == list(range(1, 1501))
        ill = torch.tensor([dict(each.classes)["ill"] for each in mine])
        torch.testing.assert_close(ill, shares[:, 0].detach(), rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    cli.app(["predict", "net.safetensors", "rows.parquet", "rows.parquet", "--json"], standalone_mode=False)
    by_file = json.loads(capsys.readouterr().out)
    assert [len(each) for each in by_file["rows.parquet"]] == [1] * 1500
    rows.drop(columns="age").to_csv("no age.csv", index=False)
    Path("rows.txt").write_text("age\n")
    for file, wrong in (
        ("no age.csv", "'no age.csv' has no column 'age', which the training rows have"),
        ("rows.txt", "file 'rows.txt' is no table, allowed: a file that ends in .csv or .parquet"),
        ("none.csv", "table 'none.csv' is no file here"),
    ):
        code, said = fedprune("predict", "net.safetensors", file)
        assert code == 2
        assert wrong in " ".join(said.split())


def test_a_run_does_not_go_on_with_columns_in_another_order(fedprune, clinics, tmp_path):
    run = ("run", "system=fedavg", "dataset=table", f"data-dir={clinics}", *ON_CLINICS)
    assert fedprune(*run, "num-server-rounds=1")[0] == 0
    whole = [pd.read_csv(clinics / f"{part}.csv") for part in ("train", "test")]
    for part, rows in zip(("train", "test"), whole, strict=True):
        rows[["pressure", "age", *rows.columns[2:]]].to_csv(clinics / f"{part}.csv", index=False)
    splits.clear_cache()
    code, said = fedprune(*run, "num-server-rounds=2", "--resume")
    assert code != 0
    assert "the columns of the tables differ, or their order" in " ".join(said.split()), said


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_large_number_keeps_its_meaning(tmp_path, form):
    """In float32 all times of two minutes are one number."""
    time = 1_700_000_000 + np.arange(60)
    write(pd.DataFrame({"time": time, "always": 0.1, "label": time % 2}), tmp_path / f"train.{form}")
    config = DataConfig("table", str(tmp_path), partition="iid", test_split="holdout", validation_fraction=0)
    data = client_data(config, 0, 1)
    kept, held = data.train_images, data.test_images
    assert kept.dtype == held.dtype == torch.float32
    assert len(kept[:, 0].unique()) == len(kept)
    assert kept[:, 0].std(correction=0) == pytest.approx(1, rel=1e-6)
    assert kept[:, 1].abs().max() < 1e-6
    assert held[:, 1].abs().max() < 1e-6
    train, test = splits.digests(config)
    assert len({*train, *test}) == 60


def test_a_model_of_large_numbers_predicts_what_it_learnt(fedprune, tmp_path):
    for part, count in (("train", 600), ("test", 60)):
        time = 1_700_000_000 + np.random.default_rng(count).integers(0, 60, count)
        write(pd.DataFrame({"time": time, "label": time > 1_700_000_030}), tmp_path / f"{part}.csv")
    given = ("system=fedavg", "dataset=table", f"data-dir={tmp_path}", "partition=iid", "learning-rate=0.1")
    code, said = fedprune("run", *given, "num-server-rounds=3", "--clients", "2", "--engine", "inprocess", "--out", "r")
    assert code == 0, said
    assert fedprune("export", "r", "--global", "-o", "net.safetensors")[0] == 0
    found = predictions(tmp_path / "net.safetensors", [tmp_path / "test.csv"])
    right = pd.read_csv(tmp_path / "test.csv")["label"].astype(str)
    assert np.mean([each.classes[0][0] == label for each, label in zip(found, right, strict=True)]) > 0.9


def test_whole_numbers_are_numbers_and_bytes_are_texts(tmp_path):
    rows = {"a": [0.5, 2.5] * 2, "n": pd.array([1, 2, 3, 4], "Int64"), "label": [b"x", b"y"] * 2}
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    data = load_dataset("table", tmp_path, needs_test=False)
    assert data.train_images[:, :, 0, 0].tolist() == [[0.5, 1], [2.5, 2], [0.5, 3], [2.5, 4]]
    assert data.classes == ("x", "y")
    pd.DataFrame({**rows, "label": [b"\xff", b"y"] * 2}).to_parquet(tmp_path / "train.parquet")
    splits.clear_cache()
    with pytest.raises(FileError, match="cannot be read: 'utf-8' codec can't decode"):
        load_dataset("table", tmp_path, needs_test=False)


def test_columns_that_are_no_features_are_left_out_by_name(fedprune, clinics, tmp_path):
    given = ("dataset=table", f"data-dir={clinics}", "system=fedavg", "partition=iid", "--clients", "2")
    code, said = fedprune("check", *given)
    assert code == 2
    assert "has column 'clinic' without numbers, allowed: numbers" in " ".join(said.split())
    assert " ignore-columns" in said
    code, said = fedprune("check", *given, "ignore-columns=clinic, age")
    assert code == 0, said
    data = load_dataset("table", clinics, ignore_columns=("clinic", "age"))
    assert data.features == ("pressure", "smokes")
    with pytest.raises(ValueError, match="has no column 'ward', which ignore-columns names"):
        load_dataset("table", clinics, ignore_columns=("ward",))


# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)

    def part(count):
        images = [Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)) for _ in range(count)]
        features = datasets.Features(
            {"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog", "owl"])}
        )
        return datasets.Dataset.from_dict({"photo": images, "kind": [k % 3 for k in range(count)]}, features=features)

    datasets.disable_progress_bars()
    whole = datasets.DatasetDict({"train": part(30), "test": part(9)})
    whole.save_to_disk(str(tmp_path / "saved"))
    whole["train"].save_to_disk(str(tmp_path / "train-only"))
    return tmp_path, whole


@pytest.mark.filterwarnings("ignore")
def test_what_save_to_disk_wrote_is_read(saved):
    folder, whole = saved
    data = load_dataset("huggingface", folder / "saved")
    assert data.classes == ("cat", "dog", "owl")
    assert data.image_shape == (3, 9, 8)
    np.testing.assert_array_equal(data.train_images[4], np.asarray(whole["train"][4]["photo"]).transpose(2, 0, 1))
    assert data.test_labels.tolist() == [0, 1, 2] * 3
    with pytest.raises(ValueError, match="has no test part, allowed: one with a test part, or test-split 'holdout'"):
        load_dataset("huggingface", folder / "train-only")
    assert len(load_dataset("huggingface", folder / "train-only", needs_test=False).train_labels) == 30
    with pytest.raises(ValueError, match="dataset 'huggingface' cannot be loaded: FileNotFoundError: Directory"):
        load_dataset("huggingface", folder)


def hugging(folder, parts, **features):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    picture = {"img": datasets.Image()} if "img" in next(iter(parts.values())) else {}
    kinds = datasets.Features({**picture, **features})
    made = {part: datasets.Dataset.from_dict(columns, features=kinds) for part, columns in parts.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))


def pictures(labels):
    return [Image.new("L", (4, 4), 20 * k) for k in range(len(labels))]


def test_a_column_that_could_be_another_one_is_asked_for(tmp_path):
    datasets = pytest.importorskip("datasets")
    fine = [0, 1, 2, 3]
    columns = {
        "img": pictures(fine),
        "fine": fine,
        "coarse": [0, 0, 1, 1],
        "depth": pictures(fine),
        "note": list("abcd"),
    }
    kinds = {"fine": datasets.ClassLabel(num_classes=4), "coarse": datasets.ClassLabel(num_classes=2)}
    kinds |= {"depth": datasets.Image(), "note": datasets.Value("string")}
    hugging(tmp_path / "two", {"train": columns, "validation": columns}, **kinds)
    read = partial(load_dataset, "huggingface", tmp_path / "two", needs_test=False)
    with pytest.raises(ValueError, match="no column 'image', which image-column names, allowed: img, dep"):
        read()
    with pytest.raises(ValueError, match="no column 'label', which label-column names, allowed: fine, co"):
        read(image_column="img")
    with pytest.raises(ValueError, match="no column 'x', which label-column names, allowed: fine, coarse"):
        read(image_column="img", label_column="x")
    assert read(image_column="img", label_column="fine").num_classes == 4
    assert read(image_column="depth", label_column="coarse").train_labels.tolist() == [0, 0, 1, 1]
    data = read(image_column="img", label_column="note")
    assert data.classes == ("a", "b", "c", "d")


def test_classes_are_compared_by_their_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    train, test = ["dog", "cat", "10", "9"], ["cat", "dog"]
    text = {"label": datasets.Value("string")}
    hugging(
        tmp_path / "t",
        {part: {"img": pictures(x), "label": x} for part, x in (("train", train), ("test", test))},
        **text,
    )
    data = load_dataset("huggingface", tmp_path / "t")
    assert data.classes == ("10", "9", "cat", "dog")
    assert [data.classes[k] for k in data.test_labels] == test
    given = ("dog", "cat", "9", "10")
    assert load_dataset("huggingface", tmp_path / "t", classes=given).train_labels.tolist() == [0, 1, 3, 2]
    with pytest.raises(ValueError, match="has the training label '10', allowed: cat, dog, 9"):
        load_dataset("huggingface", tmp_path / "t", classes=("cat", "dog", "9"))


def test_the_classes_of_test_data_may_be_in_another_order():
    class Items(list):
        classes = ()

    parts = Items([(np.zeros((4, 4), np.uint8), 0)] * 3), Items([(np.zeros((4, 4), np.uint8), 0)])
    parts[0].classes, parts[1].classes = ("cat", "dog"), ("dog", "cat")
    data = plugin_datasets.dataset("x", lambda _: parts, "", Form(), public_scale=False)
    assert data.test_labels.tolist() == [1]
    parts[1].classes = ()  # as of a subset of PyTorch
    assert plugin_datasets.dataset("x", lambda _: parts, "", Form(), public_scale=False).test_labels.tolist() == [0]


# --- what is found before a run ---------------------------------------------------------------------------------------


def test_the_size_of_a_table_is_told(fedprune, clinics, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    given = ("dataset=table", f"data-dir={clinics}", "owner-column=clinic")
    for command, more in (("check-data", []), ("check", ["system=fedavg", "partition=iid", "--clients", "3"])):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", sys.stderr)
            code, said = fedprune(command, *given, *more)
        assert code == 0, said
        assert "300 training and 90 test examples of 3x1x1, 2 classes" in said


def test_check_data_tells_what_it_found(fedprune, clinics, capsys, monkeypatch):
    rows = patients(300, 0)
    pd.concat([patients(88, 1), rows.iloc[:2]]).to_csv(clinics / "test.csv", index=False)
    code, said = fedprune("check-data", "dataset=table", f"data-dir={clinics}", "owner-column=clinic")
    assert code == 0
    assert "2 test examples are training examples too" in " ".join(said.split())
    rows.assign(clinic="").to_csv(clinics / "train.csv", index=False)
    splits.clear_cache()
    code, said = fedprune("check-data", "dataset=table", f"data-dir={clinics}", "owner-column=clinic")
    assert code == 0, said
    assert "300 training examples are nobody's" in " ".join(said.split())
    rows.to_csv(clinics / "train.csv", index=False)
    splits.clear_cache()
    code, said = fedprune("check-data", "dataset=table", f"data-dir={clinics}")
    assert code == 2
    assert "has column 'clinic' without numbers" in said
