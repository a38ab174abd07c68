"""A client's training, validation and test data: disjoint, of one label law, a function of the configuration."""

import dataclasses

import numpy as np
import pytest
import torch

from fedprune_app.data import splits
from fedprune_app.data.dataset import Dataset
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.names import PARTITIONS
from fedprune_app.data.splits import ClientData, DataConfig, Pool, client_data, label_counts, partition_indices

CLIENTS = 10
PARTS = ("train", "validation", "test")


def config(**changes):
    return DataConfig(**changes)


def images(data, part):
    return getattr(data, f"{part}_images")


def labels(data, part):
    return getattr(data, f"{part}_labels")


every_scheme = pytest.mark.parametrize("partition", [name for name in PARTITIONS if name != "owners"])
TEST_SPLITS = ("labels", "proportional", "holdout")
every_test_split = pytest.mark.parametrize("test_split", TEST_SPLITS)


@every_scheme
@every_test_split
def test_a_clients_tensors_are_what_training_takes(partition, test_split):
    data = client_data(config(partition=partition, test_split=test_split), 3, CLIENTS)
    for part in PARTS:
        assert images(data, part).dtype == torch.float32
        assert images(data, part).shape == (len(labels(data, part)), 1, 8, 8)
        assert labels(data, part).dtype == torch.int64
        assert len(labels(data, part)) > 0
    assert data.num_examples == len(data.train_labels)


@every_scheme
@every_test_split
def test_train_and_validation_make_up_the_clients_share(partition, test_split):
    chosen = config(partition=partition, test_split=test_split)
    dataset = load_dataset("digits")
    pool = np.concatenate([dataset.train_labels, dataset.test_labels])
    for client, share in enumerate(partition_indices(chosen, CLIENTS)):
        counts = {part: np.array(own) for part, own in label_counts(chosen, client, CLIENTS).items()}
        own = counts["train"] + counts["validation"] + (counts["test"] if test_split == "holdout" else 0)
        assert np.array_equal(own, np.bincount(pool[share], minlength=10))


@every_scheme
def test_with_privacy_each_images_part_follows_from_the_image_alone(partition):
    """Whoever has an image, and whatever others he has, it is for the same use; without privacy it is not."""

    def parts(number, **changes):
        part_of = {}
        for client in range(number):
            chosen = config(partition=partition, test_split="holdout", classes_per_client=3, seed=2, **changes)
            for part, indices in splits._split_indices(chosen, client, number).items():
                for index in indices.tolist():
                    assert part_of.setdefault(index, part) == part or not chosen.private
        return part_of

    few, many = parts(4, private=True), parts(CLIENTS, private=True)
    both = few.keys() & many.keys()
    assert len(both) > 500
    assert all(few[index] == many[index] for index in both)
    open_few, open_many = parts(4), parts(CLIENTS)
    assert any(open_few[index] != open_many[index] for index in both)
    assert abs(sum(part == "test" for part in many.values()) / len(many) - 0.3) < 0.06


@every_scheme
@every_test_split
def test_a_number_of_samples_per_client_is_dealt_and_no_more(partition, test_split):
    chosen = config(partition=partition, test_split=test_split, samples_per_client=50)
    dataset = load_dataset("digits")
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    parts = partition_indices(chosen, CLIENTS)
    dealt = np.concatenate(parts)
    assert len(np.unique(dealt)) == len(dealt) == 500
    if partition in ("iid", "shards", "dirichlet-client"):
        assert [len(part) for part in parts] == [50] * CLIENTS
    pool = labels if test_split == "holdout" else dataset.train_labels
    assert (dealt.max() >= len(dataset.train_labels)) == (test_split == "holdout")
    shares = np.bincount(pool) * 500 / len(pool)
    assert (np.abs(np.bincount(pool[dealt]) - shares) < 1).all()


@pytest.mark.parametrize(
    "scheme",
    [
        {"partition": "dirichlet-client"},
        {"partition": "dirichlet-client", "dirichlet_groups": 4},
        {"partition": "classes", "class_assignment": "random"},
    ],
)
def test_dis_pfls_20_clients_hold_500_images_each(monkeypatch, scheme):
    labels = np.random.default_rng(0).permutation(np.arange(50_000) % 10)  # CIFAR-10's, of single pixels
    images, few = np.zeros((50_000, 1, 1, 1), dtype=np.uint8), slice(1000)
    classes = tuple("abcdefghij")
    like_cifar = Dataset("cifar10", images, labels, images[few], labels[few], classes, (0.0,), (1.0,))
    monkeypatch.setattr(splits, "load_dataset", lambda *_, **__: like_cifar)
    chosen = config(dataset="cifar10", samples_per_client=500, **scheme)
    parts = partition_indices(chosen, 20)
    assert [len(part) for part in parts] == [500] * 20
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    if scheme["partition"] == "classes":
        assert ((counts > 0).sum(axis=1) == 2).all()
    neighbours_apart = np.abs(np.diff(counts, axis=0)).sum(axis=1) > 300
    assert neighbours_apart.sum() <= 3 if "dirichlet_groups" in scheme else neighbours_apart.sum() >= 8


def test_samples_that_are_dealt_are_drawn_anew_with_every_seed():
    parts = [partition_indices(config(partition="iid", samples_per_client=50, seed=s), CLIENTS) for s in (1, 2)]
    assert set(np.concatenate(parts[0])) != set(np.concatenate(parts[1]))


def test_as_many_samples_as_there_are_is_all_of_them():
    settings = {"partition": "dirichlet-client", "seed": 3}
    everything, counted = (config(**settings, samples_per_client=count) for count in (0, 1438))
    assert np.array_equal(partition_indices(everything, 1)[0], partition_indices(counted, 1)[0])


def test_more_samples_than_there_are_is_an_error():
    message = "samples-per-client is 144"
    with pytest.raises(ValueError, match=message):
        partition_indices(config(partition="iid", samples_per_client=144), CLIENTS)
    assert len(partition_indices(config(partition="iid", samples_per_client=143), CLIENTS)[0]) == 143


def test_groups_of_a_plug_in_may_be_numbers_and_an_empty_name_is_no_group():
    images, labels = np.zeros((5, 1, 2, 2), np.uint8), np.zeros(5, np.int64)
    of_test = np.array(["0", "", "2", "7", "7"])
    groups = {"groups": np.array([0, 1, 0, 2, 1]), "test_groups": of_test}
    pool = Pool(Dataset("own", images, labels, images, labels, ("a", "b"), (0.5,), (0.5,), **groups))
    assert pool.group_numbers(np.array([1, 2, 3, 4, 5, 6, 7])).tolist() == [0, 1, 2, 0, 1, 3, 2]
    assert pool.without_groups_of(np.arange(5, 10), np.arange(5)).tolist() == [6, 8, 9]


def test_a_missing_value_of_a_plug_ins_groups_is_no_group():
    images, labels = np.zeros((6, 1, 2, 2), np.uint8), np.zeros(6, np.int64)
    groups = [None, float("nan"), np.datetime64("NaT"), "nan", "ann", float("nan")]
    pool = Pool(Dataset("own", images, labels, images[:0], labels[:0], ("a", "b"), (0.5,), (0.5,), groups=groups))
    assert pool.groups == ["", "", "", "nan", "ann", ""]


def test_parts_of_a_client_never_share_a_sample():
    for test_split in TEST_SPLITS:
        for client in range(CLIENTS):
            indices = splits._split_indices(config(test_split=test_split), client, CLIENTS)
            together = np.concatenate(list(indices.values()))
            assert len(np.unique(together)) == len(together)
            assert all((np.diff(own) > 0).all() for own in indices.values())


def test_test_images_come_from_the_test_set_unless_the_sets_are_merged():
    dataset = load_dataset("digits")
    for test_split in TEST_SPLITS:
        indices = splits._split_indices(config(test_split=test_split), 0, CLIENTS)
        in_test_set = indices["test"] >= len(dataset.train_labels)
        assert in_test_set.all() == (test_split != "holdout")
        if test_split != "holdout":
            assert indices["train"].max() < len(dataset.train_labels)


@every_scheme
def test_holdout_deals_out_train_and_test_set_together(partition):
    parts = partition_indices(config(partition=partition, test_split="holdout"), CLIENTS)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1797))


@every_scheme
def test_split_labels_tests_on_all_images_of_the_clients_labels(partition):
    chosen = config(partition=partition)
    available = np.bincount(load_dataset("digits").test_labels)
    for client in range(CLIENTS):
        counts = {part: np.array(own) for part, own in label_counts(chosen, client, CLIENTS).items()}
        held = counts["train"] + counts["validation"] > 0
        assert np.array_equal(counts["test"], np.where(held, available, 0))


@every_scheme
@pytest.mark.parametrize("size", [100, 40])
def test_split_proportional_tests_on_images_of_the_clients_law(partition, size):
    chosen = config(partition=partition, test_split="proportional", test_samples=size)
    available = np.bincount(load_dataset("digits").test_labels)
    for client in range(CLIENTS):
        counts = {part: np.array(own) for part, own in label_counts(chosen, client, CLIENTS).items()}
        own = counts["train"] + counts["validation"]
        exact = [-(-int(n) * size // int(own.sum())) for n in own]  # ceil, in whole numbers
        assert counts["test"].tolist() == np.minimum(exact, available).tolist()


@every_scheme
@every_test_split
def test_validation_has_the_label_shares_of_training(partition, test_split):
    chosen = config(partition=partition, test_split=test_split, validation_fraction=0.2)
    for client in range(CLIENTS):
        counts = {part: np.array(own) for part, own in label_counts(chosen, client, CLIENTS).items()}
        own = counts["train"] + counts["validation"]
        total = counts["validation"].sum()
        assert total == max(1, round(0.2 * own.sum()))
        assert (np.abs(counts["validation"] - own * total / own.sum()) < 1).all()
        if test_split == "holdout":
            whole = own + counts["test"]
            assert (np.abs(counts["test"] - whole * counts["test"].sum() / whole.sum()) < 1).all()
            assert counts["test"].sum() == round(0.3 * whole.sum())


def test_normalisation_is_that_of_torchvision():
    dataset = load_dataset("digits")
    chosen = config(partition="iid", validation_fraction=0)
    (share,) = partition_indices(chosen, 1)
    expected = dataset.train_images[share] / np.float64(255)
    expected = (expected - dataset.mean[0]) / dataset.std[0]
    data = client_data(chosen, 0, 1)
    assert torch.allclose(data.train_images, torch.from_numpy(expected).float(), atol=1e-6)
    assert data.train_labels.tolist() == dataset.train_labels.tolist()


@every_scheme
def test_everything_derives_from_the_seed(partition):
    def everything(seed):
        partition_indices.cache_clear()
        splits._split_indices.cache_clear()
        chosen = config(partition=partition, test_split="proportional", seed=seed)
        return [splits._split_indices(chosen, client, CLIENTS) for client in range(CLIENTS)]

    first, again, other = everything(5), everything(5), everything(6)
    assert all(np.array_equal(a[p], b[p]) for a, b in zip(first, again, strict=True) for p in PARTS)
    for part in ("train", "validation"):
        assert not all(np.array_equal(a[part], b[part]) for a, b in zip(first, other, strict=True))


def test_a_client_of_two_samples_keeps_one_for_validation():
    num_clients = 1438 // 2
    counts = label_counts(config(partition="iid", validation_fraction=0.01), 0, num_clients)
    assert (sum(counts["train"]), sum(counts["validation"])) == (1, 1)


def test_no_validation_is_asked_for_and_none_is_held_out():
    chosen = config(validation_fraction=0.0)
    assert client_data(chosen, 0, CLIENTS).validation_images.shape == (0, 1, 8, 8)
    assert sum(label_counts(chosen, 0, CLIENTS)["validation"]) == 0


def test_test_tensors_are_made_only_when_read(monkeypatch):
    built = []
    images = splits.Pool.images
    monkeypatch.setattr(
        splits.Pool,
        "images",
        lambda pool, indices, *how: built.append(len(indices)) or images(pool, indices, *how),
    )
    client_data.cache_clear()
    data = client_data(config(), 0, CLIENTS)
    assert isinstance(data, ClientData)
    assert built == []
    assert data.train_images is data.train_images
    assert built == [len(data.train_labels)]


def test_a_process_keeps_the_tensors_of_few_clients():
    first = client_data(config(), 0, CLIENTS)
    assert client_data(config(), 0, CLIENTS) is first
    for client in range(1, CLIENTS):
        client_data(config(), client, CLIENTS)
    assert client_data(config(), 0, CLIENTS) is not first


def test_client_data_can_be_made_of_tensors_and_not_changed():
    empty = torch.zeros(0, dtype=torch.int64)
    pair = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
    data = ClientData(*pair, torch.zeros(0, 1, 8, 8), empty, *pair)
    assert data.num_examples == 2
    for frozen in (data, client_data(config(), 0, CLIENTS)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.train_labels = empty


@pytest.mark.parametrize("partition_id", [-1, CLIENTS])
def test_a_client_that_is_not_there_is_an_error(partition_id):
    with pytest.raises(ValueError, match=f"partition is {partition_id}, allowed: 0 to 9"):
        client_data(config(), partition_id, CLIENTS)


@pytest.mark.parametrize("num_clients", [0, 1439])
def test_there_are_at_most_as_many_clients_as_samples(num_clients):
    with pytest.raises(ValueError, match=f"clients is {num_clients}, allowed: 1 to 1438 for 1438 training samples"):
        partition_indices(config(partition="iid"), num_clients)
