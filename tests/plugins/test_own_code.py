"""Networks, data and partitions of one's own, and what of them cannot be used."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedprune_app
from fedprune_app.data import plugin_datasets
from fedprune_app.data.dataset import Form
from fedprune_app.data.datasets import load_dataset
from fedprune_app.exports.file import read_export_info
from tests.plugins.conftest import PRIVATELY, QUICK, write

pytestmark = pytest.mark.usefixtures("no_plugins")


def test_a_network_that_needs_two_examples_is_trained_by_who_has_one_too_many(fedprune, tmp_path):
    """BatchNorm of one value by channel refuses the last batch of 31 examples in batches of 10."""
    write(
        tmp_path / "normed.py",
        "from torch import nn\n"
        "def net(image_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))\n",
    )
    given = (
        "system=fedavg",
        "model=normed.py:net",
        "partition=iid",
        "samples-per-client=31",
        "validation-fraction=0.0",
    )
    code, said = fedprune("run", *given, *QUICK, "local-epochs=2", "batch-size=10", "--out", "run")
    assert code == 0, said
    (row,) = map(json.loads, (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    assert row["failures"] == 0
    whole = 3 * 2 * (64 * 8 + 8 * 10) * 2 * 30  # three passes, of two FLOPs per weight, for 30 examples twice
    assert row["flops"] == row["replies"] * whole
    ticket = ("fedltp.public-samples=61", "fedltp.ticket-iterations=8")
    code, said = fedprune("run", "system=fedltp", given[1], *ticket, *QUICK, "--out", "ticket")
    assert code == 0, said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return torch.nn.Linear(3, 4)", "fails on images of 1x8x8: RuntimeError"),
        ("return torch.nn.Flatten()", "has no layer that can be pruned"),
        ("return 7", "is of type int, allowed: torch.nn.Module"),
        ("raise KeyError('x')", "cannot be made for images of 1x8x8 and 10 classes: KeyError"),
        ("return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))", "returns 2x3 for two images"),
        (
            "class Net(torch.nn.Linear):\n"
            "        def forward(self, images):\n"
            "            return super().forward(images.flatten(1)).squeeze()\n"
            "    return Net(64, 10)",
            "returns 10 for one image, allowed: logits of shape 1x10",
        ),
    ],
)
def test_a_network_that_does_not_fit_is_refused_before_the_run(fedprune, tmp_path, body, said):
    path = write(tmp_path / "net.py", f"import torch\ndef net(shape, classes):\n    {body}\n")
    code, found = fedprune("run", f"model={path}:net", "--out", "run", *QUICK)
    assert code == 2
    assert re.search(said, " ".join(found.split())), found
    assert not (tmp_path / "run").exists()


NO_TEST = Form(needs_test=False)


GREY = np.zeros((6, 4, 4), np.uint8)


LABELS = np.array([0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (7, "returns a int, allowed: a pair of training and test part"),
        ((None, None), "returns a tuple"),
        (((GREY, LABELS), None), "has no test part, allowed: one with a test part, or test-split 'holdout'"),
        (((GREY, LABELS[:3]), (GREY, LABELS)), r"has training labels of shape \(3,\) for 6 examples"),
        (((GREY, LABELS.astype(float)), (GREY, LABELS)), "training label 0.0, allowed: whole numbers from 0 on"),
        (((GREY, LABELS - 1), (GREY, LABELS)), "allowed: whole numbers from 0 on"),
        (((GREY, LABELS), (GREY, LABELS * 10**9)), "has the test label '1000000000', allowed: 0, 1"),
        (((GREY, np.eye(2)[LABELS]), (GREY, LABELS)), r"training labels of shape \(6, 2\) for 6 .* argmax\(axis=1\)"),
        (((GREY, LABELS.astype(str)), (GREY, LABELS + 1)), "has the test label '2', allowed: 0, 1"),
        (((GREY, [None, "a"] * 3), (GREY, LABELS)), "has the training label None, allowed: whole numbers"),
        (((GREY, [0, 1, None, 1, 0, 1]), (GREY, LABELS)), "has the training label None, allowed: whole numbers"),
        (((GREY, [[0], [0, 1]] * 3), (GREY, LABELS)), r"has the training label \[0\], .* one for each example"),
        (((GREY, ["a"] * 6), (GREY, ["a"] * 6)), "has one label, 'a', allowed: at least two"),
        (((GREY.astype(int), LABELS), (GREY, LABELS)), r"training examples of shape \(6, 4, 4\) and type int64"),
        (((GREY[:, None, :, :].repeat(2, 1), LABELS), (GREY, LABELS)), "allowed: uint8 images with 1 or 3 channels"),
        (((GREY, LABELS), (GREY[:, :3], LABELS)), "allowed: parts of one shape and type"),
        (((np.full((6, 3), np.nan), LABELS), (GREY, LABELS)), "examples with NaN or infinity"),
        (([1, 2], [3, 4]), "the training part, of type list, cannot be read as examples with labels: TypeError"),
    ],
)
def test_a_dataset_that_cannot_be_is_refused(found, said):
    with pytest.raises(ValueError, match=said):
        plugin_datasets.dataset("mine", lambda data_dir: found, "", Form(), public_scale=False)


def test_images_of_every_form_are_the_same_images():
    rng = np.random.default_rng(0)
    colours, labels = rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8), LABELS

    class Items(torch.utils.data.Dataset):
        classes = ("cat", "dog")

        def __len__(self):
            return 6

        def __getitem__(self, i):

            return Image.fromarray(colours[i]), int(labels[i])

    named = {"image": colours, "label": labels[:, None]}
    frame = pd.DataFrame({"label": labels})
    forms = [(colours, frame), (colours.transpose(0, 3, 1, 2), labels == 1), named, Items()]
    loaded = [
        plugin_datasets.dataset(
            "mine", lambda _, part=part: {"train": part, "test": part}, "", Form(), public_scale=False
        )
        for part in forms
    ]
    for each in loaded:
        np.testing.assert_array_equal(each.train_images, colours.transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(each.test_labels, labels)
        assert each.mean == loaded[0].mean
    assert [each.classes for each in loaded] == [("0", "1"), ("0", "1"), ("0", "1"), ("cat", "dog")]


def test_numbers_of_a_table_are_normalised_but_not_where_each_row_is_private():
    rows = np.random.default_rng(0).normal(3.0, 2.0, (50, 4)).astype(np.float32)
    labels = np.arange(50) % 3
    for public_scale in (False, True):
        found = plugin_datasets.dataset(
            "mine", lambda _: ((rows, labels), None), "", NO_TEST, public_scale=public_scale
        )
        assert found.image_shape == (4, 1, 1)
        assert found.num_classes == 3
        assert (found.mean == (0.0,) * 4) is public_scale
    assert len(found.test_labels) == 0


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[0, 1], [2]], "returns 2 parts, allowed: one per client, 3"),
        ([[0, 1], [2], []], "gives client 2 what is not allowed: at least one whole number from 0 to 5"),
        ([[0, 1], [2], [6]], "gives client 2 what is not allowed: at least one whole number from 0 to 5"),
        ([[0, 1], [1], [2]], "gives an example"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(parts, said):
    with pytest.raises(ValueError, match=f"partition 'mine' {said}"):
        plugin_datasets.dealt("mine", lambda labels, clients, rng: parts, LABELS, 3, np.random.default_rng(0))


def test_a_private_run_takes_a_network_of_one_shape_and_refuses_one_that_mixes_before_it_starts(fedprune, tmp_path):
    write(
        tmp_path / "nets.py",
        "import torch\nfrom torch import nn\n"
        "class Mixed(nn.Sequential):\n"
        "    def forward(self, images):\n        return super().forward(images - images.mean(0))\n"
        "def fixed(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
        "def mixed(shape, classes):\n    return Mixed(nn.Flatten(), nn.Linear(64, classes))\n",
    )
    given = ("system=fedavg", *PRIVATELY, *QUICK)
    code, said = fedprune("run", "model=nets.py:fixed", *given, "--out", "a")
    assert code == 0, said
    code, said = fedprune("run", "model=nets.py:mixed", *given, "--out", "b")
    assert (code, "the network mixes the examples of a batch" in said) == (2, True), said
    assert not (tmp_path / "b").exists()


ODD = """
import random

import numpy as np
import torch
from torch import nn
from fedprune_app.data.dataset import Dataset

def layers(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, classes))

def tied(shape, classes):
    model = layers(classes)
    model[3].weight = model[1].weight
    return model

def double(shape, classes):
    return layers(classes).double()

def hooked(shape, classes):
    model = layers(classes)
    model[1].weight.register_hook(lambda gradient: 0 * gradient)
    return model

def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def part(shape, kind=np.uint8, classes=2):
    return np.arange(np.prod((20, *shape))).reshape(20, *shape).astype(kind), np.arange(20) % classes

def made(shape=(1, 8, 8), classes=2, std=0.5, **more):
    return Dataset("made", *part(shape, classes=classes), *part(shape), ("a", "b"), (0.5,), (std,), **more)

def flat(folder):
    return made((8, 8))

def labelled(folder):
    return made(classes=4)

def grouped(folder):
    return made(groups=[0] * 19)

def owned(folder):
    return made(owners=np.zeros(9, np.int64))

def even(folder):
    return made(std=0.0)

def tracked(folder):
    return (torch.zeros(20, 1, 8, 8, requires_grad=True), np.zeros(20, int)), part((1, 8, 8))

def entropy(folder):
    images, labels = part((1, 8, 8))
    return (np.random.default_rng().permutation(images), labels), part((1, 8, 8))

def seeded(folder):
    images, labels = part((1, 8, 8))
    return (np.random.permutation(images), labels), part((1, 8, 8))

def entropic(shape, classes):
    model = layers(classes)
    model[1].weight.data[0, 0] = float(np.random.default_rng().random())
    return model

class Drawn(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.register_buffer("order", torch.randperm(64))
        self.projection = torch.tensor(np.random.randn(64, 64), dtype=torch.float32) / 8
        self.flips = [random.choice((-1.0, 1.0)) for _ in range(64)]
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = x.flatten(1)[:, self.order] * torch.tensor(self.flips)
        return self.fc(torch.relu(x @ self.projection))

def drawn(shape, classes):
    return Drawn(classes)

def unseeded(labels, num_clients, rng):
    return np.array_split(np.random.default_rng().permutation(len(labels)), num_clients)
"""


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model=odd.py:double", "has the parameter '1.weight' of type torch.float64, allowed: float32"),
        ("model=odd.py:lazy", "has the lazy parameter '1.weight', allowed: layers that know their sizes"),
        ("model=odd.py:hooked", "has a hook on '1.weight', which copies lose, allowed: hooks on layers"),
        ("dataset=odd.py:flat", "has examples of shape (20, 8, 8) and labels of shape (20,)"),
        ("dataset=odd.py:labelled", "allowed: (N, C, H, W), and N labels from 0 to 1"),
        ("dataset=odd.py:grouped", "has 19 groups for 20 examples, allowed: one for each"),
        ("dataset=odd.py:owned", "has 9 owners for 20 examples, allowed: one for each"),
        ("dataset=odd.py:even", "the deviation (0.0,), allowed: 1 numbers each, deviations above 0"),
        (
            "dataset=odd.py:tracked",
            "cannot be read as examples with labels: RuntimeError: Can't call numpy() on Tensor that requires",
        ),
        ("dataset=odd.py:entropy", "is another one each time that it is loaded, allowed: one that draws by the global"),
        (
            "model=odd.py:entropic",
            "is another network each time that it is made, allowed: one that draws by the global",
        ),
        ("partition=odd.py:unseeded", "deals other data each time, allowed: a function that draws by the generator"),
    ],
)
def test_what_cannot_be_used_as_it_is_is_one_line_before_the_start(fedprune, tmp_path, setting, says):
    write(tmp_path / "odd.py", ODD)
    model = () if setting.startswith("model") else ("model=mlp-small",)
    code, said = fedprune("check", "system=fedavg", "--clients", "2", setting, *model)
    assert (code, says in said, said.count("\n")) == (2, True, 1), said


def test_data_that_numpy_s_generator_shuffles_are_the_same_each_time(fedprune, tmp_path):
    write(tmp_path / "odd.py", ODD)
    code, said = fedprune("check", "system=fedavg", "--clients", "2", "dataset=odd.py:seeded", "model=mlp-small")
    assert code == 0, said


def test_what_three_generators_drew_for_a_network_is_the_same_in_the_exported_one(fedprune, tmp_path):
    write(tmp_path / "odd.py", ODD)
    more = ("system=fedavg", "num-server-rounds=2", "fraction-train=1.0", "partition=iid", "learning-rate=0.05")
    code, said = fedprune("run", "model=odd.py:drawn", *more, "--engine", "inprocess", "--clients", "2", "--out", "run")
    assert code == 0, said
    *_, last = map(json.loads, (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    code, said = fedprune("export", "run", "--global", "-o", "net.safetensors", "--plugin", "odd.py")
    assert code == 0, said
    scope = {}
    exec(ODD, scope)
    network = fedprune_app.load_model("net.safetensors", build=scope["drawn"])
    info, digits = read_export_info("net.safetensors"), load_dataset("digits")
    images = (torch.tensor(digits.test_images) / 255 - info.mean[0]) / info.std[0]
    accuracy = float((network(images).argmax(1).numpy() == digits.test_labels).mean())
    assert accuracy == pytest.approx(last["accuracy_global"], abs=0.02)
    assert accuracy > 0.5
    exec(ODD.replace("torch.relu(", "torch.tanh("), scope)  # the code has changed since
    with pytest.raises(ValueError, match=r"model 'odd.py:drawn' made anew computes something else than the run's own"):
        fedprune_app.load_model("net.safetensors", build=scope["drawn"])


def test_a_weight_that_layers_share_is_pruned_as_one(fedprune, tmp_path):
    write(tmp_path / "odd.py", ODD)
    code, said = fedprune("run", "model=odd.py:tied", "system=dispfl", "dispfl.neighbours=2", *QUICK, "--out", "run")
    assert code == 0, said
    assert fedprune("check", "model=odd.py:tied", "system=fedavg", "--clients", "2")[0] == 0


def test_a_private_run_takes_public_constants_in_place_of_measured_ones():
    names = {}
    exec(ODD, names)
    found = plugin_datasets.dataset(
        "odd", lambda _: names["made"](std=0.3, is_measured=True), "", Form(), public_scale=True
    )
    assert (found.mean, found.std, found.is_measured) == ((0.5,), (0.5,), False)
    own = plugin_datasets.dataset("odd", lambda _: names["made"](std=0.3), "", Form(), public_scale=True)
    assert (own.mean, own.std) == ((0.5,), (0.3,))


def test_square_images_of_floats_may_have_their_channels_last():
    images = np.random.default_rng(0).random((6, 8, 8, 3))
    found = plugin_datasets.dataset("x", lambda _: ((images, np.arange(6) % 2), None), "", NO_TEST, public_scale=False)
    assert found.image_shape == (3, 8, 8)
    assert np.array_equal(found.train_images, images.transpose(0, 3, 1, 2).astype(np.float32))
