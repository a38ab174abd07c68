"""Folders of images: sizes that are made one, and images that belong to somebody."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clients.context import NodeContext
from clients.images import Images
from fedprune_app.config import parse_config
from fedprune_app.data import splits
from fedprune_app.data.dataset import FileError, Form
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.folders import image_folder
from fedprune_app.data.splits import DataConfig, client_data, label_counts
from fedprune_app.exports.predict import predictions
from fedprune_app.preflight.describe import data_found
from fedprune_app.preflight.inputs import inputs_in
from fedprune_app.preflight.prepare import prepare


@pytest.fixture(autouse=True)
def nothing_kept():
    splits.clear_cache()


def write(path: Path, size=(6, 8), value=None, mode="L"):
    """One image of (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(abs(hash(path.name)) % 2**32)
    pixels = rng.integers(0, 256, size, dtype=np.uint8) if value is None else np.full(size, value, np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def mixed(tmp_path):
    """Images of several sizes in train/ and test/."""
    for part in ("train", "test"):
        for k, size in enumerate([(20, 30), (30, 20), (25, 25)]):
            for name in ("cat", "dog"):
                write(tmp_path / part / name / f"{k}.png", size)
    return tmp_path


@pytest.fixture
def people(tmp_path):
    """Three people, with 8, 12 and 16 images of two classes, and one class that only the last one has."""
    for count, name in ((4, "anna"), (6, "ben"), (8, "cleo")):
        for label in ("cat", "dog"):
            for k in range(count):
                write(tmp_path / name / label / f"{name}-{k}.png")
    write(tmp_path / "cleo" / "owl" / "only.png")
    return tmp_path


def test_images_that_are_held_out_for_a_test_have_no_part_in_the_normalisation(people):
    config = DataConfig("image-folder", str(people), partition="owners", test_split="holdout")
    of_all = [client_data(config, client, 3) for client in range(3)]
    kept = torch.cat([part for data in of_all for part in (data.train_images, data.validation_images)]).double()
    assert kept.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(kept.std((0, 2, 3), correction=0), torch.ones(1).double(), rtol=1e-4, atol=0)
    assert torch.cat([data.test_images for data in of_all]).mean((0, 2, 3)).abs().max() > 1e-4


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_images_of_several_sizes_become_squares_of_one(mixed):
    with pytest.raises(ValueError, match="the key image-size makes them one size"):
        load_dataset("image-folder", mixed)
    for fit in ("crop", "stretch"):
        assert load_dataset("image-folder", mixed, image_size=16, image_fit=fit).image_shape == (1, 16, 16)


@pytest.mark.parametrize(("part", "other"), [("train", "test"), ("test", "train")])
def test_one_coloured_image_gives_both_parts_three_channels(tmp_path, part, other):
    for each in ("train", "test"):
        for name in ("cat", "dog"):
            for k in range(3):
                write(tmp_path / "data" / each / name / f"{k}.png")
    Image.new("RGB", (8, 6), (200, 10, 10)).save(tmp_path / "data" / part / "dog" / "2.png")
    data = load_dataset("image-folder", tmp_path / "data")
    images = {"train": data.train_images, "test": data.test_images}
    assert images[part].shape == images[other].shape == (6, 3, 6, 8)
    assert (images[other] == images[other][:, :1]).all()
    grey = np.asarray(Image.open(tmp_path / "data" / other / "dog" / "2.png"))
    np.testing.assert_array_equal(images[other][5, 0], grey)
    assert data.image_shape == (3, 6, 8)
    assert len(data.mean) == len(data.std) == 3


def test_crop_cuts_around_the_middle_and_stretch_cuts_nothing(tmp_path):
    pixels = np.zeros((10, 30), np.uint8)
    pixels[:, 10:20] = 200  # the middle third is light
    for part in ("train", "test"):
        for name in ("a", "b"):
            path = tmp_path / part / name / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(pixels).save(path)
    cut = load_dataset("image-folder", tmp_path, image_size=10, image_fit="crop").train_images[0, 0]
    squeezed = load_dataset("image-folder", tmp_path, image_size=10, image_fit="stretch").train_images[0, 0]
    assert (cut == 200).all()
    assert squeezed[:, 0].max() < 20 < 180 < squeezed[:, 5].min()


def test_a_size_that_images_have_already_changes_none(people):
    every = {"by_owner": True, "needs_test": False}
    for name in ("anna", "ben", "cleo"):
        for path in (people / name).rglob("*.png"):
            write(path, (8, 8))
    as_they_are = load_dataset("image-folder", people, **every)
    resized = load_dataset("image-folder", people, image_size=8, **every)
    np.testing.assert_array_equal(as_they_are.train_images, resized.train_images)


def test_each_size_has_a_cache_of_its_own(mixed):
    shapes = [load_dataset("image-folder", mixed, image_size=size).image_shape for size in (8, 12, 8)]
    assert shapes == [(1, 8, 8), (1, 12, 12), (1, 8, 8)]


# --- owners -----------------------------------------------------------------------------------------------------------


def test_each_client_has_the_images_of_one_folder(people):
    config = DataConfig("image-folder", str(people), partition="owners", test_split="holdout", seed=3)
    counts = [label_counts(config, client, 3) for client in range(3)]
    assert [[sum(part[label] for part in each.values()) for label in range(3)] for each in counts] == [
        [4, 4, 0],
        [6, 6, 0],
        [8, 8, 1],
    ]
    assert all(sum(each["test"]) > 0 for each in counts)


def test_the_numbers_of_clients_and_of_owners_are_the_same(people):
    config = DataConfig("image-folder", str(people), partition="owners", test_split="holdout")
    with pytest.raises(ValueError, match="--clients is 20"):
        label_counts(config, 0, 20)


def test_a_dataset_that_does_not_say_whose_its_examples_are_is_refused():
    config = DataConfig(partition="owners", test_split="holdout")
    with pytest.raises(ValueError, match="partition is 'owners'"):
        label_counts(config, 0, 3)


def test_folders_of_people_need_tests_of_their_own(people):
    config = DataConfig("image-folder", str(people), partition="owners", test_split="labels")
    with pytest.raises(ValueError, match="test-split is not 'holdout', allowed with partition"):
        label_counts(config, 0, 3)


def test_folders_of_nodes_are_no_folders_of_people(tmp_path):
    """Else a run would learn to tell training images from test images."""
    for path in ("a/train/cat", "a/train/dog", "a/test/cat", "b/train/dog"):
        write(tmp_path / path / "1.png")
    config = DataConfig("image-folder", str(tmp_path), partition="owners", test_split="holdout")
    with pytest.raises(ValueError, match="has <client>/train/, allowed with partition 'owners': <client>/<class>/"):
        label_counts(config, 0, 2)


# --- as a user runs it ------------------------------------------------------------------------------------------------


def test_a_run_on_folders_of_people(fedprune, people, tmp_path):
    given = ("dataset=image-folder", f"data-dir={people}", "partition=owners", "image-size=16", "image-fit=stretch")
    quick = ("num-server-rounds=1", "--clients", "3", "--engine", "inprocess", "--out", "run")
    code, said = fedprune("run", "system=fedavg", "model=cnn-small", *given, *quick)
    assert code == 0, said
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["config"]["test-split"] == "holdout"
    parts = ("train", "validation", "test")
    assert [sum(sum(row[part]) for part in parts) for row in info["partition"]] == [8, 12, 17]
    assert info["model"]["class_names"] == ["cat", "dog", "owl"]
    code, said = fedprune("export", "run", "--global", "-o", "net.safetensors")
    assert code == 0, said
    write(tmp_path / "new" / "holiday.png", (40, 50), mode="RGB")
    code, said = fedprune("predict", "net.safetensors", tmp_path / "new" / "holiday.png")
    assert code == 0, said
    assert os.listdir(tmp_path / "new") == ["holiday.png"]


def test_predict_knows_what_was_learnt(fedprune, tmp_path, capsys):
    for part, count in (("train", 40), ("test", 4)):
        for name, value in (("dark", 20), ("light", 230)):
            for k in range(count):
                write(tmp_path / "shades" / part / name / f"{k}.png", (8, 8), value + k % 9)
    given = ("dataset=image-folder", f"data-dir={tmp_path / 'shades'}", "model=cnn-small", "partition=iid")
    quick = ("num-server-rounds=4", "--clients", "2", "--engine", "inprocess", "--out", "run")
    assert fedprune("run", "system=fedavg", *given, *quick)[0] == 0
    assert fedprune("export", "run", "--global", "-o", "net.safetensors")[0] == 0
    write(tmp_path / "night.jpg", (30, 50), 25, mode="RGB")  # another size, and coloured
    write(tmp_path / "day.png", (8, 8), 220)
    found = predictions(tmp_path / "net.safetensors", [tmp_path / "night.jpg", tmp_path / "day.png"], top=2)
    assert [each.classes[0][0] for each in found] == ["dark", "light"]
    for each in found:
        assert sum(share for _, share in each.classes) == pytest.approx(1)
    assert fedprune("predict", "net.safetensors", "day.png", "--top", "5", "--json")[0] == 0
    code, text = fedprune("predict", "net.safetensors", "none.png", "day.png", "--json")
    assert (code, "image 'none.png' is no file here" in " ".join(text.split())) == (2, True), text
    for given, said in (
        (("net.safetensors", "none.png"), "image 'none.png' is no file here"),
        (("net.safetensors", "shades"), "image 'shades' is no file here"),
        (("day.png", "day.png"), "exported model 'day.png'"),
        (("net.safetensors", "net.safetensors"), "cannot be read as an image"),
    ):
        code, text = fedprune("predict", *given)
        assert (code, said in " ".join(text.split())) == (2, True), text


def test_an_image_folder_without_test_images_holds_out_a_share(fedprune, mixed):
    given = ("system=fedavg", "dataset=image-folder", f"data-dir={mixed}", "image-size=8", "model=cnn-small")
    given += ("partition=iid",)
    for path in (mixed / "test").rglob("*.png"):
        path.unlink()
    (mixed / "test" / "cat").rmdir()
    (mixed / "test" / "dog").rmdir()
    (mixed / "test").rmdir()
    code, said = fedprune("check", *given, "--clients", "2")
    assert code == 2
    assert "test-split=holdout" in said
    code, said = fedprune("check", *given, "test-split=holdout", "validation-fraction=0", "--clients", "2")
    assert code == 0, said


def test_check_data_counts_what_lies_in_an_image_folder_and_is_not_read(fedprune, mixed):
    given = ("dataset=image-folder", f"data-dir={mixed}", "image-size=8")
    code, said = fedprune("check-data", *given)
    assert (code, "not read" in said) == (0, False), said
    for place in ("train/cat/sub/9.png", "train/9.png", "test/dog/a/b/9.jpg", "validation/cat/9.png"):
        write(mixed / place)
    for name in ("README", "test/README", "train/cat/photo.heic"):
        (mixed / name).write_text("")
    splits.clear_cache()
    code, said = fedprune("check-data", *given)
    assert code == 0, said
    note = "files that are no images in the folder of a class"
    assert note in " ".join(said.split())
    assert "are not read: 4" in " ".join(said.split())
    code, said = fedprune("check", *given, "system=fedavg", "model=cnn-small", "partition=iid", "--clients", "2")
    assert (code, note in " ".join(said.split())) == (0, True), said


def test_a_folder_inside_a_class_is_a_group_in_whatever_class_it_is(mixed):
    for place in ("train/cat/ann/1.png", "train/cat/bob/1.png", "train/dog/ann/2.png", "test/dog/cy/1.png"):
        write(mixed / place)
    data = image_folder("image-folder", mixed, Form(image_size=8))
    plain = image_folder("image-folder", mixed, Form(image_size=8))
    assert sorted(filter(None, data.groups)) == ["ann", "ann", "bob"]
    assert sorted(filter(None, data.test_groups)) == ["cy"]
    assert (len(data.groups), len(data.test_groups)) == (len(data.train_labels), len(data.test_labels))
    ann = [data.train_labels[i] for i, name in enumerate(data.groups) if name == "ann"]
    assert ann == [plain.classes.index("cat"), plain.classes.index("dog")]


def test_a_table_beside_a_folder_says_which_images_are_of_one_group(mixed):
    first, *others = sorted(path.relative_to(mixed) for path in (mixed / "train").rglob("*.png"))
    (mixed / "groups.csv").write_text(f"group,file\nann,{first}\nann,{others[-1]}\n,{others[0]}\n")
    data = image_folder("image-folder", mixed, Form(image_size=8))
    assert [i for i, name in enumerate(data.groups) if name == "ann"] == [0, len(data.groups) - 1]
    assert {*data.groups} | {*data.test_groups} == {"ann", ""}
    (mixed / "groups.csv").write_text(f"group,file\nann,{first}\nann ,{others[-1]}\n")  # an export's blanks
    assert {*image_folder("image-folder", mixed, Form(image_size=8)).groups} == {"ann", ""}
    for text, said in (
        ("file\nx\n", "columns 'file' and 'group'"),
        ("file,group\ntrain/no.png,a\n", "train/no.png"),
        (f"file,group\n{first},a\n{first},b\n", "names a file twice"),
    ):
        (mixed / "groups.csv").write_text(text)
        with pytest.raises(FileError, match=said):
            image_folder("image-folder", mixed, Form(image_size=8))


def test_a_folder_without_groups_has_none(mixed):
    assert image_folder("image-folder", mixed, Form(image_size=8)).groups is None


def test_check_data_notes_images_of_one_class(fedprune, mixed):
    given = ("check-data", "dataset=image-folder", f"data-dir={mixed}", "image-size=8")
    note = "note: there is one class, and a run needs at least two"
    code, said = fedprune(*given)
    assert (code, note in said) == (0, False), said
    for part in ("train", "test"):
        shutil.rmtree(mixed / part / "dog")
    splits.clear_cache()
    code, said = fedprune(*given)
    assert (code, note in " ".join(said.split())) == (0, True), said


def test_check_data_proposes_owners_and_says_what_each_of_them_has(fedprune, people):
    given = ("check-data", "dataset=image-folder", f"data-dir={people}", "test-split=holdout")
    code, said = fedprune(*given)
    assert code == 2
    assert "partition=owners reads <client>/<class>/*, here of anna, ben, cleo" in said
    splits.clear_cache()
    config = prepare(inputs_in(None, [*given[1:], "partition=owners"])).config
    rows = dict(data_found(config)[0])
    assert (rows["owners"], rows["  ben"]) == ("3", "12 examples: cat 6, dog 6")


def test_owners_are_in_natural_order(tmp_path):
    for name in ("site10", "site2", "Site1"):
        write(tmp_path / name / "cat" / "1.png")
        write(tmp_path / name / "dog" / "1.png")
    data = image_folder("image-folder", tmp_path, Form(by_owner=True, needs_test=False))
    assert data.owner_names == ("Site1", "site2", "site10")
    assert data.owners.tolist() == [0, 0, 2, 2, 1, 1]


def test_a_simulation_calls_clients_by_their_owners_and_a_node_tells_no_name(federate, fedprune, people, tmp_path):
    given = {"dataset": "image-folder", "data_dir": str(people), "partition": "owners", "model": "cnn-small"}
    run = federate(clients=3, num_server_rounds=1, local_epochs=1, **given)
    assert run.info["client_names"] == {"0": "anna", "1": "ben", "2": "cleo"}
    code, said = fedprune("export", run.folder, "--client", "dora", "-o", tmp_path / "dora.safetensors")
    assert (code, "error: --client is 'dora', allowed: anna, ben, cleo" in said) == (2, True)
    config = parse_config(run.info["config"])
    images = Images(config, NodeContext(0, 3, tmp_path), torch.device("cpu"))  # as on a node, which simulates nothing
    assert "owner" not in images.registration()


def test_check_data_knows_the_folders_of_owners(fedprune, people):
    write(people / "anna" / "cat" / "sub" / "sub" / "9.png")
    code, said = fedprune(
        *("check-data", "dataset=image-folder", f"data-dir={people}", "partition=owners", "test-split=holdout")
    )
    assert code == 0, said
    assert "are not read: 1" in " ".join(said.split())
