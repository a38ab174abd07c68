"""Clients with data of their own: a folder each, no partition id, and a number that the server gives them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from clients.context import NodeContext
from clients.standalone import StandaloneClient
from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.data import splits
from fedprune_app.data.splits import DataConfig, client_data, data_config, dataset_of, label_counts
from fedprune_app.data.text import own_documents
from fedprune_app.engine import simulated_grid
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.simulated_grid import InProcessGrid, run_in_process
from fedprune_app.exports.find import find_model
from fedprune_app.learning import text_cache
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy.ledger import Ledger
from fedprune_app.results.groups import group_runs
from fedprune_app.results.reader import load_run
from fedprune_app.results.tables import final_rows, perplexity_rows
from strategies.ldp_fedp3 import LDPFedP3
from tests.models.tiny_llm import text_folder, tiny_byte_model
from tests.refusing import refuses

IMAGES = {"dataset": "image-folder", "model": "cnn-small", "batch_size": 10, "fraction_train": 1.0}
CLASSES = tuple("0123")


def image_folder(folder: Path, first: int, classes=CLASSES, per_class=12, test=0) -> Path:
    """Digits as PNG files: ``per_class`` of each class in train/, ``test`` in test/, none that another folder has."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    for digit in classes:
        mine = images[labels == int(digit)][first * (per_class + test) :]
        for part, chosen in (("train", mine[:per_class]), ("test", mine[per_class : per_class + test])):
            if part == "train" or test:
                (folder / part / digit).mkdir(parents=True)
            for i, image in enumerate(chosen):
                Image.fromarray(image).save(folder / part / digit / f"{i}.png")
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Three clients of unlike amounts of data; the last has a test set of its own."""
    root = tmp_path_factory.mktemp("own")
    return [
        image_folder(root / "a", 0),
        image_folder(root / "b", 1, per_class=20),
        image_folder(root / "c", 5, per_class=16, test=4),
    ]


def grid_of(node_configs, node_ids=None):
    """A grid whose nodes have these node-configs, and these ids where they matter."""

    class Grid(InProcessGrid):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for context, node_config in zip(self._contexts.values(), node_configs, strict=True):
                context.node_config = dict(node_config)
            if node_ids:
                self._contexts = dict(zip(node_ids, self._contexts.values(), strict=True))

    return Grid


@pytest.fixture
def own(federate, monkeypatch):
    """``own(node_configs, node_ids, **settings)``: a run of nodes with these node-configs."""

    def run(node_configs, node_ids=None, **settings):
        monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_of(node_configs, node_ids))
        return federate(clients=len(node_configs), **{**IMAGES, **settings})

    return run


def places(folders, **more):
    return [{"data-dir": str(folder), **more} for folder in folders]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_clients_are_numbered_by_node_id_and_take_all_of_their_own_folder(own, folders):
    run = own(places(folders), node_ids=[30, 10, 20], system="fedavg")
    assert run.info["status"] == "completed"
    assert run.info["nodes"] == {"10": 0, "20": 1, "30": 2}
    totals = [[sum(row[part]) for part in ("train", "validation", "test")] for row in run.info["partition"]]
    assert [sum(parts) for parts in totals] == [80, 80, 48], "b, c, a"
    assert totals[1][2] == 16, "c has a test folder"
    assert all(0 < validation < test < train for train, validation, test in totals)
    assert [row["replies"] for row in run.rounds] == [3, 3, 3]
    assert run.rounds[-1]["accuracy_personal_mean"] > 0.25


def test_what_files_are_called_stays_on_the_node_unless_all_have_the_same_data(own, folders, tmp_path, caplog):
    bad = image_folder(tmp_path / "bad", 0)
    path = next((bad / "train").glob("*/*.png"))
    path.rename(path.with_name("smith-john-1961.png")).write_bytes(b"no image")
    (left_out,) = own(places([*folders, bad])).info["clients_left_out"]
    assert "the node cannot do this with data of its own; the node's log says why" in left_out
    assert "smith" not in left_out
    assert any("smith-john-1961.png' cannot be read" in line for line in caplog.messages)


def test_a_node_tells_nobody_how_its_images_are_normalised_and_exports_its_model_by_that(own, folders, tmp_path):
    mine = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders[:2]]
    run = own(places(mine), node_ids=[1, 2], system="fedavg")
    assert "normalisation" not in run.info["model"]
    then = [dataset_of(settings_of(folder), 1) for folder in mine]
    for path in mine[0].glob("train/*/*.png"):
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    splits.clear_cache()
    for client, before in enumerate(then):
        found = find_model(run.folder, client, data_dir=str(mine[client])).info
        assert (found.mean, found.std) == (before.mean, before.std)
    with pytest.raises(ValueError, match=r"--data-dir is .*images became inputs"):
        find_model(run.folder, None)
    assert find_model(run.folder, None, data_dir=str(mine[0])).info.mean == dataset_of(settings_of(mine[0]), 1).mean


def test_the_same_nodes_give_the_same_models_in_whatever_order_they_are_listed(own, folders):
    a, b, c = places(folders)
    first = own([a, b, c], node_ids=[1, 2, 3], name="first", system="dispfl")
    second = own([c, a, b], node_ids=[3, 1, 2], name="second", system="dispfl")
    assert first.sha256 == second.sha256


def test_a_client_of_its_own_data_has_the_capacity_that_its_node_says(own, folders):
    nodes = [{**place, "capacity": share} for place, share in zip(places(folders), (0.3, 0.6, 1.0), strict=True)]
    run = own(nodes, node_ids=[1, 2, 3], system="dispfl", num_server_rounds=2, evaluate_every=2)
    densities = {row["partition"]: row["density"] for row in run.clients if row["round"] == 2}
    assert densities == pytest.approx({0: 0.3, 1: 0.6, 2: 1.0}, abs=1e-2)


def test_a_resumed_run_keeps_its_numbers_and_does_not_ask_who_came_later(own, folders, tmp_path):
    a, b, c = places(folders)
    whole = own([a, b], node_ids=[20, 30], name="whole", system="standalone", num_server_rounds=3)
    own([a, b], node_ids=[20, 30], name="part", system="standalone", num_server_rounds=1)
    again = {"name": "part", "resume_from": str(tmp_path / "part"), "num_server_rounds": 3}
    run = own([c, b, a], node_ids=[10, 30, 20], system="standalone", **again)
    assert run.info["nodes"] == {"20": 0, "30": 1}
    assert run.sha256 == whole.sha256


PRIVATE = {"system": "standalone", "dp.enabled": True, "dp.noise-multiplier": 1.0, "num_server_rounds": 1}


def test_a_ledger_is_known_by_the_images_not_by_number_folder_or_names(own, folders, tmp_path):
    private = PRIVATE | {"dp.ledger-dir": str(tmp_path / "ledgers")}
    a, b, _ = places(folders)
    own([a, b], node_ids=[1, 2], name="first", **private)
    before = {path.name: path.read_bytes() for path in (tmp_path / "ledgers").glob("*.jsonl")}
    moved = shutil.copytree(folders[0], tmp_path / "moved")
    for path in sorted((moved / "train" / "0").iterdir()):
        path.rename(path.with_name(f"renamed-{path.name}"))
    own([b, *places([moved])], node_ids=[1, 2], name="second", seed=1, **private)
    after = {path.name: path.read_bytes() for path in (tmp_path / "ledgers").glob("*.jsonl")}
    assert len(before) == 2
    assert before.keys() == after.keys()
    assert all(after[name].startswith(content) and after[name] != content for name, content in before.items())


def test_a_number_that_the_server_makes_up_begins_no_fresh_ledger(own, folders):
    """Without a folder for ledgers too: the same run gives the same node another number."""

    def ledger(number):
        config = parse_config({"dataset": "image-folder", "data-dir": str(folders[0]), **settings})
        node = StandaloneClient(config, NodeContext(number, 0, Path(config.state_dir), run_key="0" * 16))
        return node.privacy.ledger

    settings = {"model": "cnn-small", "dp.enabled": True, "dp.noise-multiplier": 1.0}
    settings["state-dir"] = str(folders[0].parent / "state")
    ledger(3).charge_steps(1.0, 0.5, 7)
    assert len(ledger(4)) == 1
    assert ledger(3).path == ledger(4).path


def test_a_nodes_log_says_how_many_images_are_of_nobody(own, folders, tmp_path, caplog):
    """The operator's alone: their number is private."""
    folder = shutil.copytree(folders[0], tmp_path / "a")
    first = next((folder / "train" / "0").iterdir()).relative_to(folder)
    (folder / "groups.csv").write_text(f"file,group\n{first},ann\n")
    private = {"dp.enabled": True, "dp.unit": "group", "dp.noise-multiplier": 1.0, "dp.accuracies": "none"}
    run = own(places([folder]), num_server_rounds=1, system="fedavg", **private)
    assert "47 examples have no group: each is a group of its own" in caplog.messages
    assert "have no group" not in json.dumps(run.info)


@pytest.mark.full
def test_a_folder_with_an_image_more_keeps_its_ledger_and_other_images_have_another(own, folders, tmp_path, caplog):
    ledgers = tmp_path / "ledgers"
    private = PRIVATE | {"dp.ledger-dir": str(ledgers)}
    own(places(folders[:1]), name="first", **private)
    (path,) = ledgers.glob("*.jsonl")
    before = Ledger(path)
    more = shutil.copytree(folders[0], tmp_path / "more")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(more / "train" / "0" / "white.png")
    own(places([more]), name="second", **private)
    assert list(ledgers.glob("*.jsonl")) == [path]
    lines = [json.loads(line.split(" ", 1)[1]) for line in path.read_text().splitlines()]
    assert [line["size"] for line in lines if line["kind"] == "data"] == [48, 49]
    assert lines[0]["kind"] == "data", "whose releases these are is said first"
    assert len(Ledger(path)) == 2 * len(before)
    own(places(folders[1:2]), name="third", **private)
    assert len(list(ledgers.glob("*.jsonl"))) == 2
    both = shutil.copytree(folders[0], tmp_path / "both")
    shutil.copytree(folders[1] / "train" / "1", both / "train" / "1", dirs_exist_ok=True)
    for number, image in enumerate(sorted((folders[1] / "train" / "2").iterdir())):
        shutil.copy(image, both / "train" / "2" / f"other-{number}.png")
    with pytest.raises(TooFewReplies, match="the node cannot do this with data of its own"):
        own(places([both]), name="fourth", **private)
    assert re.search(r"data are in the ledgers '.*', '.*', allowed: all of them in one", caplog.text)


@pytest.mark.full
def test_clients_of_their_own_data_each_send_a_part_of_the_next_model(own, folders, monkeypatch, caplog):
    """No node knows how many clients there are: it takes the server's word, as far as there are coordinates."""
    private = PRIVATE | {"system": "ldp-fedp3", "evaluate_every": 0}
    (row,) = own(places(folders), **private).rounds
    assert (row["replies"], row["failures"]) == (3, 0)
    honest = LDPFedP3.send

    def too_many(self, round):
        return (replace(each, fields={"clients": 5317, "place": 0}) for each in honest(self, round))

    monkeypatch.setattr(LDPFedP3, "send", too_many)
    with pytest.raises(TooFewReplies, match="the node cannot do this with data of its own"):
        own(places(folders), name="too-many", **private)
    assert "clients is 5317 and place 0, allowed: 1 to 5316" in caplog.text


def test_a_fedfomo_client_without_a_validation_image_says_so(own, folders):
    """Each own image is drawn by itself, so that a small folder may have none."""
    with pytest.raises(TooFewReplies, match="the node cannot do this with data of its own"):
        own(places(folders), system="fedfomo", validation_fraction=1e-3)


# --- classes ----------------------------------------------------------------------------------------------------------


def test_a_client_without_images_of_a_class_has_an_empty_folder_or_the_run_names_the_classes(own, folders, tmp_path):
    few = image_folder(tmp_path / "few", 3, classes="02")
    named = own(places([folders[0], few]), [1, 2], name="named", system="fedavg", classes=", ".join(CLASSES))
    for digit in "13":
        (few / "train" / digit).mkdir()
    empty = own(places([folders[0], few]), [1, 2], name="empty", system="fedavg")
    assert named.sha256 == empty.sha256
    assert named.info["partition"][1]["train"][1::2] == [0, 0]


def test_clients_whose_classes_differ_stop_the_run_and_are_named(own, folders, tmp_path):
    other = image_folder(tmp_path / "other", 3, classes="0245")
    with pytest.raises(ValueError, match="has classes") as error:
        own(places([folders[0], other]), [11, 22], system="fedavg")
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(
        f"node 11, data-dir '{folders[0]}', has classes ['1', '3', '0', '2'] and node 22, data-dir '{other}', "
        "['4', '5', '0', '2'], allowed: "
    )


def test_a_folder_with_a_class_that_the_run_does_not_name_is_left_out(own, folders, tmp_path):
    other = image_folder(tmp_path / "other", 3, classes="0124")
    run = own(places([folders[0], other]), [1, 2], system="fedavg", classes="0,1,2,3")
    (reason,) = run.info["clients_left_out"]
    assert "the node cannot do this with data of its own" in reason


@pytest.mark.parametrize(
    ("settings", "condition"),
    [
        ({"classes": "cat", "dataset": "image-folder"}, ""),
        ({"classes": "cat,dog,cat", "dataset": "image-folder"}, ""),
        ({"classes": "cat,,dog", "dataset": "image-folder"}, ""),
    ],
    ids=str,
)
def test_classes_that_cannot_be_are_refused(settings, condition):
    with refuses("classes", settings["classes"], condition=condition):
        prepare(RunInputs(settings))


# --- who may ----------------------------------------------------------------------------------------------------------


def test_nodes_with_and_without_a_partition_do_not_run_together(own, folders):
    dealt = {"partition-id": 0, "num-partitions": 2, "data-dir": str(folders[2])}
    with pytest.raises(
        ValueError, match=r"has own-data False and node .* True, allowed: partition-ids on all nodes or on none"
    ):
        own([dealt, *places(folders[:1])], [1, 2], system="fedavg", data_dir=str(folders[2]))


def test_a_node_without_partition_and_data_is_told_what_it_lacks(own):
    with pytest.raises(TooFewReplies, match="node-config: partition-id is not given, nor is data-dir"):
        own([{}], system="fedavg")


def test_data_that_comes_with_the_app_is_nobodys_own(own, folders):
    with pytest.raises(TooFewReplies, match=r"dataset is 'digits'"):
        own(places(folders[:1]), system="fedavg", dataset="digits")


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_run_waits_for_min_clients_and_whoever_watches_is_told(federate, monkeypatch, tmp_path):
    class Late(InProcessGrid):
        asked = 0
        told = ()

        def get_node_ids(self):
            Late.asked += 1
            if Late.asked == 3:
                Late.told = (json.loads((tmp_path / "run" / "progress.json").read_text()),)
            return list(super().get_node_ids())[: 1 if Late.asked < 4 else 3]

    monkeypatch.setattr(simulated_grid, "InProcessGrid", Late)
    run = federate(clients=3, system="standalone", num_server_rounds=1, min_clients=3)
    assert len(run.info["partition"]) == 3
    assert Late.told == ({"text": "waiting for clients: 1 of 3 connected"},)
    assert not (run.folder / "progress.json").exists()


def test_a_simulation_that_can_never_have_so_many_clients_does_not_start(tmp_path):
    given = RunInputs(on_command_line={"min-clients": 3}, out=tmp_path / "run")
    with refuses("min-clients", 3):
        prepare(given, Placement("inprocess", 2))
    assert not (tmp_path / "run").exists()


# --- the split --------------------------------------------------------------------------------------------------------


def settings_of(folder, **more):
    return DataConfig(dataset="image-folder", data_dir=str(folder), is_own=True, **more)


def rows_of(images):
    return {image.numpy().tobytes() for image in images}


def test_train_validation_and_test_share_no_image_and_leave_none(folders):
    config = settings_of(folders[1], test_fraction=0.25)
    data = client_data(config, 0, 1)
    parts = [data.train_images, data.validation_images, data.test_images]
    assert sum(len(part) for part in parts) == 80
    assert all(len(part) >= 5 for part in parts)
    assert len(rows_of(parts[0]) | rows_of(parts[1]) | rows_of(parts[2])) == 80
    assert label_counts(config, 0, 1)["test"] == np.bincount(data.test_labels, minlength=4).tolist()


@pytest.mark.parametrize("private", [True, False])
def test_one_image_more_moves_no_other_between_training_validation_and_test(folders, tmp_path, private):
    more = shutil.copytree(folders[1], tmp_path / "more")
    first = sorted((more / "train" / "0").iterdir())[0]
    colours = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)  # among grey images
    Image.fromarray(colours).save(first.with_name("  first of all.png"))
    parts = []
    for folder in (folders[1], more):
        config = settings_of(folder, private=private)
        dataset = dataset_of(config)
        pictures = np.concatenate([dataset.train_images, dataset.test_images])[:, 0]
        indices = splits._split_indices(config, 0, 1)
        parts.append({part: {pictures[i].tobytes() for i in own} for part, own in indices.items()})
    added = colours[..., 0].tobytes()
    assert [{picture for picture in parts[1][part] if picture != added} for part in parts[0]] == list(parts[0].values())
    assert sum(map(len, parts[1].values())) == 81


def test_equal_images_are_in_one_part(folders, tmp_path):
    twice = shutil.copytree(folders[1], tmp_path / "twice")
    for path in sorted((twice / "train").glob("*/*.png")):
        shutil.copy(path, path.with_name(f"copy of {path.name}"))
        shutil.copy(path, twice / "train" / "3" / f"mistaken for a 3 {path.parent.name} {path.name}")
    data = client_data(settings_of(twice), 0, 1)
    parts = [rows_of(part) for part in (data.train_images, data.validation_images, data.test_images)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 80


def test_a_folder_that_leaves_nothing_to_train_on_is_refused_in_one_line(tmp_path):
    lone = image_folder(tmp_path / "lone", 0, classes="01", per_class=1)
    alone = settings_of(lone, test_fraction=1 - 1e-9)
    with pytest.raises(
        ValueError, match=r"^client 0 has 2 examples, and none of them is for training, allowed: at least"
    ):
        client_data(alone, 0, 1)


def test_one_image_more_does_not_change_how_a_private_client_sees_the_others(folders, tmp_path):
    white = shutil.copytree(folders[0], tmp_path / "white")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(white / "train" / "0" / "white.png")
    seen = {}
    for name, folder in (("without", folders[0]), ("with", white)):
        given = {"dataset": "image-folder", "data-dir": str(folder), "dp.enabled": True, "dp.noise-multiplier": 1.0}
        config = data_config(parse_config(given), is_own=True)
        data = client_data(config, 0, 1)
        seen[name] = set.union(*map(rows_of, (data.train_images, data.validation_images, data.test_images)))
        assert (dataset_of(config).mean, dataset_of(config).std) == ((0.5,), (0.5,))
    assert len(seen["without"]) == 48
    assert seen["without"] < seen["with"]
    in_the_open = [rows_of(client_data(settings_of(folder), 0, 1).train_images) for folder in (folders[0], white)]
    assert not in_the_open[0] & in_the_open[1], "there each image is seen in the light of all"


def test_a_test_folder_is_the_test_set(folders):
    config = settings_of(folders[2])
    assert label_counts(config, 0, 1)["test"] == [4] * 4
    assert len(dataset_of(config).test_labels) == 16


@pytest.mark.full
def test_the_split_is_the_seeds_and_the_folders_alone(folders):
    config = settings_of(folders[0], seed=3)
    program = (
        "import sys, hashlib; from fedprune_app.data.splits import DataConfig, client_data;"
        "c = DataConfig(dataset='image-folder', data_dir=sys.argv[1], is_own=True, seed=3, partition='classes');"
        "print(hashlib.sha256(client_data(c, 0, 1).test_images.numpy().tobytes()).hexdigest())"
    )
    here = hashlib.sha256(client_data(config, 0, 1).test_images.numpy().tobytes()).hexdigest()
    done = subprocess.run(
        [sys.executable, "-c", program, str(folders[0])], capture_output=True, text=True, timeout=1000
    )
    assert done.stdout.strip() == here, done.stderr
    other = client_data(settings_of(folders[0], seed=4), 0, 1).test_images
    assert rows_of(other) != rows_of(client_data(config, 0, 1).test_images)


def test_own_text_is_split_by_documents_or_a_single_one_by_its_end(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    documents, test = own_documents(str(tmp_path), 0.4, seed=1)
    assert sorted([*(d.text for d in documents), *test.split("\n")]) == [f"text {i}" for i in range(5)]
    assert len(documents) == 3
    assert own_documents(str(tmp_path), 0.4, seed=1) == (documents, test)
    for i in range(1, 5):
        (tmp_path / f"{i}.txt").unlink()
    (only,), end = own_documents(str(tmp_path), 0.4, seed=1)
    assert (only.text, end) == ("text", " 0")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.txt").write_text("held out")
    (tmp_path / "test" / "u.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (whole,), test = own_documents(str(tmp_path), 0.4, seed=1)
    assert (whole.text, test) == ("text 0", "held out\none\ntwo")


# --- text -------------------------------------------------------------------------------------------------------------


def own_text_settings(public, tmp_path):
    return {
        "system": "fedspallm",
        "dataset": "text",
        "data_dir": str(public),
        "model": str(tiny_byte_model(tmp_path / "llm", "llama")),
        "num_server_rounds": 1,
        "fedspallm.segments": 3,
        "fedspallm.segment-length": 24,
        "fedspallm.window": 32,
        "fedspallm.block-size": 8,
    }


@pytest.mark.full
def test_a_language_model_is_pruned_with_text_that_each_node_has_to_itself(own, tmp_path):
    public = text_folder(tmp_path / "public")
    for i in range(3):  # one with documents alone, one with calibration/, one with a test set too
        (tmp_path / f"own{i}").mkdir()
    for path in (public / "calibration").iterdir():
        (tmp_path / "own0" / path.name).write_text(path.read_text())
    (public / "calibration").rename(tmp_path / "own1" / "calibration")
    text_folder(tmp_path / "own2" / "data")
    nodes = places([tmp_path / "own0", tmp_path / "own1", tmp_path / "own2" / "data"])
    run = own(nodes, [1, 2, 3], **own_text_settings(public, tmp_path))
    assert run.info["status"] == "completed"
    assert [row["documents"] for row in run.info["partition"]] == [[], [], []], "what files are called stays there"
    first = next(row for row in run.clients if row["partition"] == 0)
    assert list(first["perplexity"]) == ["own"]
    assert first["perplexity_personal"] == first["perplexity"]["own"]


@pytest.mark.full
def test_what_nodes_call_their_own_test_files_does_not_matter_and_no_servers_text_is_compared_with_them(own, tmp_path):
    """One has names that the server's test/ lacks; one has its name and other words; one has the very same file."""
    public = text_folder(tmp_path / "public")
    words = (public / "test" / "first.txt").read_text()
    theirs = {
        "other": ("mine", "hedge bad cab " * 30),
        "same": ("first", "a bee fed a cade " * 30),
        "equal": ("first", words),
    }
    for name, (stem, text) in theirs.items():
        folder = text_folder(tmp_path / name)
        for path in (folder / "test").iterdir():
            path.unlink()
        (folder / "test" / f"{stem}.txt").write_text(text)
    run = own(places([tmp_path / name for name in theirs]), [1, 2, 3], **own_text_settings(public, tmp_path))
    assert run.info["status"] == "completed"
    assert [list(row["perplexity"]) for row in run.clients] == [["own"]] * 3
    own_perplexities = [row["perplexity"]["own"] for row in run.clients]
    assert len(set(own_perplexities)) == 3
    assert [row["windows"] for row in run.clients] == [len(text) // 32 for _, text in theirs.values()]
    row = run.rounds[-1]
    assert (row["perplexity_personal_mean"], row["perplexity_personal_std"]) == (None, None)
    by_text = row["perplexity_by_text"]
    assert list(by_text) == ["first", "second", "own"]
    assert all(by_text[name]["personal_mean"] is None for name in ("first", "second"))
    assert by_text["own"]["personal_mean"] == pytest.approx(np.mean(own_perplexities))
    assert "global" not in by_text["own"]
    windows = sum(len(text) // 32 for _, text in theirs.values())
    assert [by_text["own"][key] for key in ("windows", "window", "tokens")] == [windows, 32, 32 * windows]
    groups = group_runs([load_run(run.folder)])
    header, (cells,) = perplexity_rows(groups)
    measured = dict(zip(header, cells, strict=True))
    assert measured[f"own texts: {windows} × 32 tokens, standalone"] == f"{np.mean(own_perplexities):.2f}"
    assert not any("own texts" in title and "standalone" not in title for title in header)
    assert not any("first" in title and "standalone" in title for title in header)
    assert "standalone" not in str(final_rows(groups))


@pytest.mark.full
def test_a_folder_that_is_a_clients_own_has_its_own_test_text_with_a_partition_id_too(own, tmp_path):
    public = text_folder(tmp_path / "public")
    nodes = []
    for i in range(2):
        folder = text_folder(tmp_path / f"node{i}")
        (folder / "test" / "first.txt").write_text(f"{i} cabbage " * 40)
        nodes.append({"partition-id": i, "num-partitions": 2, "data-dir": str(folder)})
    run = own(nodes, **{"fedspallm.deal": "own"}, **own_text_settings(public, tmp_path))
    assert [list(row["perplexity"]) for row in run.clients] == [["own"]] * 2
    assert [row["documents"] for row in run.info["partition"]] == [[], []]


@pytest.mark.full
def test_an_own_test_text_too_short_for_a_window_is_found_before_anything_is_pruned(own, tmp_path):
    public = text_folder(tmp_path / "public")
    folder = text_folder(tmp_path / "short")
    for path in (folder / "test").iterdir():
        path.write_text("")
    with pytest.raises(TooFewReplies, match=r"no client could start: .*the node cannot do this with data of its own"):
        own(places([folder]), **own_text_settings(public, tmp_path))


@pytest.mark.full
def test_a_node_whose_texts_have_changed_takes_no_part_in_the_rest_of_a_run(own, tmp_path):
    public = text_folder(tmp_path / "public")
    folders = [text_folder(tmp_path / name) for name in ("a", "b")]
    settings = own_text_settings(public, tmp_path)
    run = own(places(folders), [1, 2], **settings)
    path = folders[0] / "calibration" / "client0.txt"
    path.write_text(path.read_text()[::-1])
    text_cache.clear_cache()
    more = own(places(folders), [1, 2], **{**settings, "num_server_rounds": 2, "resume_from": str(run.folder)})
    assert "the node's own data have changed since the run began" in str(more.info)


def test_the_servers_texts_may_not_be_called_as_clients_own_are(own, tmp_path):
    public = text_folder(tmp_path / "public")
    (public / "test" / "first.txt").rename(public / "test" / "own.txt")
    with pytest.raises(ValueError, match="a test text is called 'own', allowed: any other name"):
        own(places([text_folder(tmp_path / "node")]), **own_text_settings(public, tmp_path))


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_nodes_of_own_data_run_over_grpc_and_end_as_in_process(folders, tmp_path):
    out = tmp_path / "run"
    settings = [
        "dataset=image-folder",
        "model=cnn-small",
        "num-server-rounds=2",
        "local-epochs=1",
        "fraction-train=1.0",
    ]
    command = [sys.executable, "-m", "fedprune_app.cli", "deploy", "local", "--out", str(out), *settings]
    command += ["--data-dirs", ",".join(map(str, folders)), "--capacities", "0.4 0.7 1", "system=dispfl"]
    done = subprocess.run([*command, "min-clients=3"], capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr
    info = json.loads((out / "run.json").read_text())
    number = {int(path.name): k for k in range(3) for path in (out / "deployment" / f"node-{k}" / "state").glob("*/*")}
    assert sorted(number) == [0, 1, 2]
    nodes = [places(folders, capacity=(0.4, 0.7, 1.0)[k])[k] for k in range(3)]
    ordered = [{**nodes[number[n]], "capacity": (0.4, 0.7, 1.0)[number[n]]} for n in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_grid, "InProcessGrid", grid_of(ordered, [1, 2, 3]))
        run_in_process(server_app.app, client_app.app, 3, {**info["config"], "out-dir": str(tmp_path / "here")})
    assert json.loads((tmp_path / "here" / "run.json").read_text())["final_sha256"] == info["final_sha256"]
