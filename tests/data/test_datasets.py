"""Reading datasets: formats, caches and what is said about files that are not there or damaged."""

import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedprune_app.data import dataset, datasets, folders
from fedprune_app.data.dataset import FileError
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.names import DATASETS


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """No dataset of another test, and a cache directory of this test's own."""
    datasets._load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def rng():
    return np.random.default_rng(0)


def error_of(*args, **kwargs):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - callers check the message
        load_dataset(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- digits ---------------------------------------------------------------------------------------------------


def test_digits_are_the_1797_bundled_images_split_once_by_label():
    data = load_dataset("digits")
    assert (data.image_shape, data.num_classes) == ((1, 8, 8), 10)
    assert len(data.train_images) + len(data.test_images) == 1797
    assert len(data.test_images) == 359
    from sklearn.datasets import load_digits

    bundled = load_digits()
    ours = np.concatenate([data.train_images, data.test_images]).reshape(-1, 64)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, np.rint(bundled.data * 255 / 16).astype(np.uint8)))
    assert ours.max() == 255
    whole = np.bincount(bundled.target) * 359 / 1797
    assert (np.abs(np.bincount(data.test_labels) - whole) < 1).all()


def test_computed_mean_and_std_normalise_the_training_images():
    data = load_dataset("digits")
    pixels = (data.train_images / 255 - np.array(data.mean)) / np.array(data.std)
    assert pixels.mean() == pytest.approx(0, abs=1e-9)
    assert pixels.std() == pytest.approx(1, abs=1e-9)


def test_a_dataset_is_loaded_once():
    data = load_dataset("digits")
    assert load_dataset(name="digits", data_dir="", download=False) is data


def test_a_digest_tells_data_from_other_data(monkeypatch):
    digits = load_dataset("digits")

    def changed(index):
        images = digits.train_images.copy()
        images[index, 0, 4, 4] ^= 1
        return replace(digits, train_images=images)

    digests = {each.content_sha256 for each in (digits, changed(0), changed(-1), replace(digits, classes=("a",) * 10))}
    assert len(digests) == 4
    relabelled = replace(digits, train_labels=digits.train_labels[::-1].copy())
    assert relabelled.content_sha256 not in digests
    assert replace(digits, train_images=digits.train_images.copy()).content_sha256 == digits.content_sha256
    monkeypatch.setattr(dataset, "_MOST_DIGESTED", -(-digits.train_images.nbytes // 10))  # each tenth
    assert changed(1).content_sha256 == changed(2).content_sha256 != changed(10).content_sha256


# --- IDX ------------------------------------------------------------------------------------------------------


def write_idx(path: Path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_idx_dataset(folder, prefixes=("train", "t10k"), labels=(range(10), range(10))):
    images = []
    for prefix, own in zip(prefixes, labels, strict=True):
        images.append(rng().integers(256, size=(len(own), 28, 28)))
        write_idx(folder / f"{prefix}-images-idx3-ubyte", images[-1])
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", np.array(own))
    return images


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_like_sets_are_read_from_idx_files(tmp_path, name, folder):
    train, test = write_idx_dataset(tmp_path / folder / "raw", labels=(range(10), [3, 1, 4]))
    data = load_dataset(name, tmp_path)
    assert np.array_equal(data.train_images[:, 0], train)
    assert np.array_equal(data.test_images[:, 0], test)
    assert data.test_labels.tolist() == [3, 1, 4]
    assert (data.test_labels.dtype, data.train_images.dtype) == (np.int64, np.uint8)
    assert (data.image_shape, data.num_classes) == ((1, 28, 28), 10)


def test_emnist_is_turned_upright_and_letters_count_from_zero(tmp_path):
    prefixes = ("emnist-letters-train", "emnist-letters-test")
    train, _ = write_idx_dataset(tmp_path / "EMNIST" / "raw", prefixes, (range(1, 27), [26, 1]))
    data = load_dataset("emnist-letters", tmp_path)
    assert np.array_equal(data.train_images[:, 0], train.transpose(0, 2, 1))
    assert data.train_labels.tolist() == list(range(26))
    assert [data.classes[label] for label in data.test_labels] == ["z", "a"]
    first_ten = load_dataset("emnist-letters-10", tmp_path)
    assert np.array_equal(first_ten.train_images, data.train_images[:10])
    assert (first_ten.train_labels.tolist(), first_ten.test_labels.tolist()) == (list(range(10)), [0])
    assert first_ten.classes == tuple("abcdefghij")


def test_emnist_digits_keep_their_labels(tmp_path):
    write_idx_dataset(tmp_path / "EMNIST" / "raw", ("emnist-digits-train", "emnist-digits-test"))
    assert load_dataset("emnist-digits", tmp_path).train_labels.tolist() == list(range(10))


def test_a_pickled_copy_beside_the_idx_files_is_not_looked_at(tmp_path):
    write_idx_dataset(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "processed").mkdir()
    for name in ("training.pt", "test.pt"):
        (tmp_path / "MNIST" / "processed" / name).write_bytes(b"not even a pickle")
    assert len(load_dataset("mnist", tmp_path).train_labels) == 10


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "has 7839 values, its header says 7840"),
        (lambda content: b"\x00\x00\x0d\x03" + content[4:], "is not an IDX file"),
        (lambda content: content[:9], "is not an IDX file"),
        (lambda content: b"", "is not an IDX file"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, damage, message):
    write_idx_dataset(tmp_path / "MNIST" / "raw")
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    assert error_of("mnist", tmp_path).startswith(f"'{path}'")
    assert message in error_of("mnist", tmp_path)


# --- CIFAR binary ---------------------------------------------------------------------------------------------


def write_cifar10(folder):
    root = folder / "cifar-10-batches-bin"
    root.mkdir(parents=True)
    images = rng().integers(256, size=(12, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(12, dtype=np.uint8) % 10
    records = np.concatenate([labels[:, None], images.reshape(12, -1)], axis=1)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for name, part in zip(names, np.split(records, 6), strict=True):
        part.tofile(root / name)
    (root / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    return images, labels


def test_cifar10_is_read_from_its_binary_version(tmp_path):
    images, labels = write_cifar10(tmp_path)
    data = load_dataset("cifar10", tmp_path)
    assert np.array_equal(data.train_images, images[:10])
    assert np.array_equal(data.test_images, images[10:])
    assert np.array_equal(data.train_labels, labels[:10])
    assert data.classes == tuple("abcdefghij")
    assert data.std == (0.2023, 0.1994, 0.2010)


def test_cifar100_takes_the_fine_label(tmp_path):
    root = tmp_path / "cifar-100-binary"
    root.mkdir()
    record = np.concatenate([[7, 42], np.arange(3072) % 256]).astype(np.uint8)
    for name in ("train.bin", "test.bin"):
        record.tofile(root / name)
    (root / "fine_label_names.txt").write_text("\n".join(f"class{i}" for i in range(100)))
    data = load_dataset("cifar100", tmp_path)
    assert data.train_labels.tolist() == [42]
    assert data.num_classes == 100
    assert data.train_images[0, 1, 0, :3].tolist() == [0, 1, 2]  # plane of green starts at 1024 = 4 * 256


def test_a_cut_off_cifar_file_is_named(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-5])
    assert error_of("cifar10", tmp_path).startswith(f"'{path}' has 6141 bytes, not whole records of 3073")


def test_pickled_cifar_is_refused_with_a_reason(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"\x80\x04.")
    assert "pickled batches are not read" in error_of("cifar10", tmp_path)


# --- image folders --------------------------------------------------------------------------------------------


def write_images(folder, names=("cat", "dog"), per_class=3, mode="RGB", size=(5, 4), suffix="png"):
    pixels = rng()
    for name in names:
        folder.joinpath(name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            shape = (*size, 3) if mode == "RGB" else size
            image = Image.fromarray(pixels.integers(256, size=shape, dtype=np.uint8))
            image.save(folder / name / f"{i}.{suffix}")


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "own" / "train")
    write_images(tmp_path / "own" / "test", per_class=1)
    return tmp_path / "own"


def pixels_of(path):
    return np.asarray(Image.open(path)).transpose(2, 0, 1)


def test_an_image_folder_is_read_class_by_class(folder):
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    data = load_dataset("image-folder", folder)
    assert data.classes == ("cat", "dog")
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 1]
    assert data.image_shape == (3, 5, 4)
    assert np.array_equal(data.train_images[4], pixels_of(folder / "train" / "dog" / "1.png"))


def test_grey_folders_have_one_channel_and_mixed_ones_three(folder, tmp_path):
    for part in ("train", "test"):
        write_images(tmp_path / "grey" / part, mode="L")
    assert load_dataset("image-folder", tmp_path / "grey").image_shape == (1, 5, 4)
    write_images(folder / "train", mode="L", per_class=1)
    assert load_dataset("image-folder", folder).image_shape == (3, 5, 4)


@pytest.mark.parametrize("inner", ["", "cifar10"])
def test_cifar10_is_also_read_from_an_image_folder(tmp_path, inner):
    for part in ("train", "test"):
        write_images(tmp_path / inner / part)
    data = load_dataset("cifar10", tmp_path)
    assert (data.name, data.classes) == ("cifar10", ("cat", "dog"))
    assert data.mean == (0.4914, 0.4822, 0.4465)


def forbid_decoding(monkeypatch):
    def refuse(*given):
        raise AssertionError("decoded again")

    monkeypatch.setattr(folders, "_decode", refuse)


def test_a_folder_is_decoded_once(folder, monkeypatch):
    first = load_dataset("image-folder", folder)
    datasets._load.cache_clear()
    forbid_decoding(monkeypatch)
    again = load_dataset("image-folder", folder)
    assert again is not first
    assert np.array_equal(again.train_images, first.train_images)
    assert isinstance(again.train_images, np.memmap)
    assert not [name for name in os.listdir(folder / ".fedprune-cache") if name.endswith(".tmp")]


def test_a_changed_folder_is_decoded_again(folder):
    load_dataset("image-folder", folder)
    datasets._load.cache_clear()
    path = folder / "train" / "cat" / "0.png"
    Image.new("RGB", (4, 5), (1, 2, 3)).save(path)
    assert load_dataset("image-folder", folder).train_images[0, :, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("damage", ["emptied", "cut", "another's content"])
def test_a_damaged_cache_is_made_again(folder, damage):
    first = load_dataset("image-folder", folder).train_images.copy()
    (cache,) = (folder / ".fedprune-cache").glob("train-*.npy")
    damaged = {"emptied": b"", "cut": cache.read_bytes()[:-100], "another's content": b"\x93NUMPY" + bytes(500)}
    cache.unlink()  # the arrays of other tests are mapped from it
    cache.write_bytes(damaged[damage])
    datasets._load.cache_clear()
    assert np.array_equal(load_dataset("image-folder", folder).train_images, first)


def test_a_cache_is_on_disk_before_it_has_its_name(folder, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size) or real(file))
    load_dataset("image-folder", folder)
    for cache in (folder / ".fedprune-cache").glob("*.npy"):
        assert cache.stat().st_size in synced


def test_where_the_folder_cannot_be_written_the_cache_is_the_users(folder, tmp_path, monkeypatch):
    (folder / ".fedprune-cache").write_text("a file where the cache would go")
    first = load_dataset("image-folder", folder)
    assert list((tmp_path / "user-cache" / "fedprune").rglob("train-*.npy"))
    datasets._load.cache_clear()
    forbid_decoding(monkeypatch)
    assert np.array_equal(load_dataset("image-folder", folder).train_images, first.train_images)


def test_without_any_place_for_a_cache_images_are_decoded_in_memory(folder, tmp_path):
    (folder / ".fedprune-cache").write_text("")
    (tmp_path / "user-cache").write_text("")
    assert len(load_dataset("image-folder", folder).train_images) == 6


@pytest.mark.programs
def test_processes_that_load_a_folder_at_once_agree(folder):
    code = (
        "import sys; from fedprune_app.data.datasets import load_dataset;"
        "print(load_dataset('image-folder', sys.argv[1]).train_images.sum())"
    )
    command = [sys.executable, "-c", code, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = {process.communicate()[0].strip() for process in running}
    assert sums == {str(load_dataset("image-folder", folder).train_images.sum())}
    assert len(list((folder / ".fedprune-cache").glob("train-*.npy"))) == 1


def test_a_corrupt_image_is_named(folder):
    path = folder / "train" / "dog" / "1.png"

    def refused() -> None:
        with pytest.raises(FileError, match=re.escape(f"'{path}' cannot be read as an image")):
            load_dataset("image-folder", folder)

    for content in (b"", b"no image", path.read_bytes()[:60]):
        path.write_bytes(content)
        refused()
    assert not list((folder / ".fedprune-cache").glob("train-*.npy"))
    path.unlink()
    path.symlink_to(folder / "nowhere.png")
    refused()


def test_an_image_of_another_size_is_named(folder):
    path = folder / "train" / "dog" / "2.png"
    Image.new("RGB", (7, 5)).save(path)
    why = "is 5x7 (height x width), the images before it are 5x4; the key image-size makes them one size"
    assert error_of("image-folder", folder) == f"'{path}' {why}"


def test_test_images_of_another_shape_are_refused(folder, tmp_path):
    write_images(tmp_path / "b" / "train")
    write_images(tmp_path / "b" / "test", size=(6, 6))
    assert "(3, 5, 4) in train, (3, 6, 6) in test" in error_of("image-folder", tmp_path / "b")


def test_a_class_of_the_test_images_is_one_of_the_training_images(folder):
    (folder / "test" / "eel").mkdir()
    assert "test' has the class 'eel', allowed: those of train/, or of the key classes: cat, dog" in error_of(
        "image-folder", folder
    )


def test_a_folder_without_images_is_refused(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
    assert error_of("image-folder", tmp_path) == f"data-dir '{tmp_path}' has no images in train/"


# --- Tiny ImageNet --------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for wnid in ("n02", "n01"):
        write_images(root / "train" / wnid, names=("images",), suffix="JPEG", size=(64, 64))
    write_images(root / "val", names=("images",), per_class=2, suffix="JPEG", size=(64, 64))
    (root / "val" / "val_annotations.txt").write_text("0.JPEG\tn02\t0\t0\t9\t9\n1.JPEG\tn01\t0\t0\t9\t9\n")
    return root


@pytest.mark.parametrize("inside", [False, True])
def test_tiny_imagenet_tests_on_its_annotated_validation_set(tiny, inside):
    data = load_dataset("tiny-imagenet", tiny if inside else tiny.parent)
    assert data.classes == ("n01", "n02")
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [1, 0]
    assert data.image_shape == (3, 64, 64)


def test_a_test_image_of_an_unknown_class_is_left_out(tiny):
    (tiny / "val" / "val_annotations.txt").write_text("0.JPEG\tn03\n1.JPEG\tn01\n")
    assert load_dataset("tiny-imagenet", tiny).test_labels.tolist() == [0]


# --- what is not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("digits", "huggingface")])
def test_missing_files_say_what_is_expected_where(tmp_path, name):
    assert "data-dir is empty" in error_of(name)
    (tmp_path / "empty").mkdir()
    for folder, says in (("nowhere", "is no folder; "), ("empty", "has no ")):
        message = error_of(name, tmp_path / folder)
        assert message.startswith(f"data-dir '{tmp_path / folder}' {says}")
        assert f"dataset '{name}'" in message
        own = ("image-folder", "table")  # nobody offers them for download
        assert message.endswith("set download=true to fetch it") == (name not in own)
    assert not (tmp_path / "nowhere").exists()


def test_a_failed_download_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "_CIFAR_HOME", (tmp_path / "no-server").as_uri())
    message = error_of("cifar10", tmp_path / "new", download=True)
    assert message.startswith(f"data-dir '{tmp_path / 'new'}': download of dataset 'cifar10' failed: ")


def test_a_download_fills_the_folder_once(tmp_path, monkeypatch):
    fetched = []

    def fetch(url, folder, md5):
        fetched.append(url)
        write_cifar10(folder)

    monkeypatch.setattr(datasets, "fetch_archive", fetch)
    for _ in range(2):
        datasets._load.cache_clear()
        assert len(load_dataset("cifar10", tmp_path / "new", download=True).train_labels) == 10
    assert fetched == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]


def test_a_download_is_checked_against_the_published_checksum(tmp_path, monkeypatch):
    import torchvision.datasets.utils

    def refuse(url, root, md5):
        raise RuntimeError(f"File not found or corrupted: {url} {md5}\n")

    monkeypatch.setattr(torchvision.datasets.utils, "download_and_extract_archive", refuse)
    assert error_of("cifar100", tmp_path, download=True).endswith(
        "failed: File not found or corrupted: https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz "
        "03b5dce01913d631647c71ecec9e9cb8"
    )
