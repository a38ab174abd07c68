"""Images of every kind that Pillow writes: read as they are, or refused by name, never spoilt in silence."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedprune_app.data.datasets import load_dataset

RAMP = np.linspace(0, 65535, 20).astype(np.uint16).reshape(4, 5)
GREY = (RAMP >> 8).astype(np.uint8)
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], axis=-1)


@pytest.fixture
def read(tmp_path):
    for kind in ("a", "b"):
        (tmp_path / "data" / "train" / kind).mkdir(parents=True)

    def write_and_read(image: Image.Image, name: str, **options: object) -> np.ndarray:
        image.save(tmp_path / "data" / "train" / "a" / name, **options)
        return load_dataset("image-folder", tmp_path / "data", needs_test=False).train_images[0]

    return write_and_read


def big_endian() -> Image.Image:
    return Image.frombytes("I;16B", (5, 4), RAMP.astype(">u2").tobytes())


@pytest.mark.parametrize(
    ("image", "name", "mode"),
    [
        (Image.fromarray(RAMP), "x.png", ("I;16", "I")),
        (Image.fromarray(RAMP), "x.tif", ("I;16",)),
        (big_endian(), "x.tif", ("I;16B",)),
        (Image.fromarray(RAMP), "x.pgm", ("I",)),
    ],
    ids=["png", "tiff", "tiff, big-endian", "pgm"],
)
def test_of_16_bits_the_higher_8_are_read(read, tmp_path, image, name, mode):
    pixels = read(image, name)
    with Image.open(tmp_path / "data" / "train" / "a" / name) as written:
        assert written.mode in mode
    assert pixels.tolist() == [GREY.tolist()]


def test_an_8_bit_image_stored_in_16_bits_comes_back_exactly(read):
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    assert read(Image.fromarray(levels * 257), "x.png").tolist() == [levels.tolist()]


@pytest.mark.parametrize(
    ("image", "name", "says"),
    [
        (Image.fromarray(RAMP.astype(np.int32) * 1000), "x.tif", "has 32-bit integers, allowed: 8 or 16 bits"),
        (Image.fromarray(RAMP.astype(np.float32) / 65535), "x.tif", "has floating-point numbers, allowed: 8 or 16"),
        (Image.fromarray(RAMP >> 4), "x.png", "no value above 4095, allowed: values up to 65535, or 8 bits"),
        (Image.fromarray(np.dstack([GREY * 0, GREY])), "x.png", "differs in its transparency alone"),
        (Image.fromarray(np.dstack([COLOUR * 0, GREY])), "x.png", "differs in its transparency alone"),
    ],
    ids=["int32", "float32", "12 bits in 16", "shape in the alpha of grey", "shape in the alpha of colour"],
)
def test_what_would_be_lost_is_refused_with_the_files_name(read, image, name, says):
    with pytest.raises(ValueError, match=says) as refused:
        read(image, name)
    assert f"train/a/{name}'" in str(refused.value)
    assert "\n" not in str(refused.value)


PALETTE = Image.fromarray(COLOUR).quantize(20)


@pytest.mark.parametrize(
    ("image", "name", "options"),
    [
        (Image.fromarray(GREY), "x.png", {}),
        (Image.fromarray(GREY > 99), "x.png", {}),
        (Image.fromarray(COLOUR), "x.png", {}),
        (Image.fromarray(np.dstack([GREY, 255 - GREY])), "x.png", {}),
        (Image.fromarray(np.dstack([COLOUR, GREY])), "x.png", {}),
        (PALETTE, "x.png", {}),
        (PALETTE, "x.png", {"transparency": 3}),
        (PALETTE, "x.png", {"transparency": bytes(range(20))}),
        (PALETTE, "x.gif", {"transparency": 3}),
        (PALETTE.convert("PA"), "x.tif", {}),
        (Image.fromarray(COLOUR).convert("CMYK"), "x.tif", {}),
        (Image.fromarray(COLOUR).convert("YCbCr"), "x.jpg", {}),
    ],
    ids=["L", "1", "RGB", "LA", "RGBA", "P", "P transparent", "P by bytes", "GIF transparent", "PA", "CMYK", "YCbCr"],
)
def test_kinds_of_8_bits_are_read_in_their_colours(read, tmp_path, image, name, options):
    pixels = read(image, name, **options)
    with Image.open(tmp_path / "data" / "train" / "a" / name) as written:
        colours = written.convert("RGBA").convert("RGB")
    assert pixels.shape[0] == (1 if image.mode in ("L", "1") else 3)
    assert np.broadcast_to(pixels, (3, 4, 5)).tolist() == np.asarray(colours).transpose(2, 0, 1).tolist()


def test_a_folder_may_mix_kinds(tmp_path):
    images = {"a.png": Image.fromarray(GREY), "b.png": Image.fromarray(RAMP), "c.tif": big_endian()}
    for kind, names in (("grey", images), ("mixed", {**images, "d.png": Image.fromarray(COLOUR)})):
        for number, (name, image) in enumerate(names.items()):
            folder = tmp_path / kind / "train" / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / name)
    grey = load_dataset("image-folder", tmp_path / "grey", needs_test=False).train_images
    assert [image.tolist() for image in grey] == [[GREY.tolist()]] * 3
    mixed = load_dataset("image-folder", tmp_path / "mixed", needs_test=False).train_images
    assert [image.tolist() for image in mixed[:3]] == [[GREY.tolist()] * 3] * 3
    assert mixed[3].tolist() == COLOUR.transpose(2, 0, 1).tolist()


def test_pixels_that_an_older_version_cached_are_not_used(tmp_path, monkeypatch):
    for kind in ("a", "b"):
        (tmp_path / "train" / kind).mkdir(parents=True)
        Image.fromarray(RAMP).save(tmp_path / "train" / kind / "x.png")
    from fedprune_app.data import datasets, folders

    monkeypatch.setattr(folders, "_READING", b"")
    monkeypatch.setattr(folders, "_decode", lambda *given: np.full((2, 1, 4, 5), 255, np.uint8))
    load_dataset("image-folder", tmp_path, needs_test=False)
    monkeypatch.undo()
    datasets._load.cache_clear()
    assert load_dataset("image-folder", tmp_path, needs_test=False).train_images[0].tolist() == [GREY.tolist()]
