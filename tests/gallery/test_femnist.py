"""FEMNIST is read by writer, and files that are not LEAF's are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedprune_app import plugins
from fedprune_app.data import splits
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.splits import DataConfig, label_counts
from tests.gallery.federations import file_of

pytestmark = pytest.mark.usefixtures("no_plugins")


def load(folder):
    plugins.load({"plugins": str(file_of("femnist"))})
    splits.clear_cache()
    return load_dataset("femnist", folder)


def write_leaf(folder, part, users, seed=0):
    rng = np.random.default_rng(seed)
    data = {
        name: {"x": rng.random((count, 784)).round(3).tolist(), "y": rng.integers(0, 62, count).tolist()}
        for name, count in users.items()
    }
    (folder / part).mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": list(users.values()), "user_data": data}
    (folder / part / f"all_data_{seed}.json").write_text(json.dumps(content))
    return data


def test_femnist_is_read_by_writer(tmp_path):
    data = write_leaf(tmp_path, "train", {"f0001_41": 6, "f0000_14": 4})
    write_leaf(tmp_path, "train", {"f0002_07": 5}, seed=1)
    write_leaf(tmp_path, "test", {"f0000_14": 2, "f0001_41": 3, "f0002_07": 1}, seed=2)
    found = load(tmp_path)
    assert found.classes[:11] == (*"0123456789", "A")
    assert found.image_shape == (1, 28, 28)
    assert found.owners.tolist() == [1] * 6 + [0] * 4 + [2] * 5
    assert found.test_owners.tolist() == [0, 0, 1, 1, 1, 2]
    write_leaf(tmp_path, "test", {"f0000_99": 2}, seed=3)  # this writer has no training image
    found = load(tmp_path)
    assert found.owners.tolist() == [1] * 6 + [0] * 4 + [2] * 5
    assert found.test_owners.tolist() == [0, 0, 1, 1, 1, 2, -1, -1]
    first = np.rint(np.array(data["f0001_41"]["x"][0]) * 255)
    np.testing.assert_array_equal(found.train_images[0, 0].ravel(), first)
    config = DataConfig("femnist", str(tmp_path), partition="owners", test_split="holdout", validation_fraction=0)
    sizes = [sum(sum(part) for part in label_counts(config, client, 3).values()) for client in range(3)]
    assert sizes == [6, 9, 6]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no file of LEAF's"),
        ('{"users": ["a"]}', "is no file of LEAF's"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [0]}}}', "is no file of LEAF's"),
        ({"x": [[2.0] * 784], "y": [0]}, "allowed: as many labels from 0 to 61 as images of numbers from 0 to 1"),
        ({"x": [[0.5] * 784], "y": [62]}, "allowed: as many labels from 0 to 61 as images of numbers from 0 to 1"),
        ({"x": [[0.5] * 784], "y": [1, 2]}, "allowed: as many labels from 0 to 61 as images of numbers from 0 to 1"),
    ],
)
def test_a_file_that_is_not_leafs_is_refused(tmp_path, content, said):
    write_leaf(tmp_path, "test", {"a": 1})
    (tmp_path / "train").mkdir()
    text = content if isinstance(content, str) else json.dumps({"users": ["a"], "user_data": {"a": content}})
    (tmp_path / "train" / "x.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_a_folder_without_leafs_files_is_answered(tmp_path):
    with pytest.raises(ValueError, match=r"train' has no \*\.json of LEAF's preprocess\.sh"):
        load(tmp_path)
