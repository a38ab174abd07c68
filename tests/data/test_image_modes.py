"""Images of every kind that Pillow writes: read as they are, or refused by name, never spoilt in silence.

It is one reading, whether an image is in a folder, in a dataset of Hugging Face, or what a plug-in's function returns.
"""

from __future__ import annotations

import struct
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

from fedprune_app.data import plugin_datasets
from fedprune_app.data.dataset import Form
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.folders import image_folder, read_image
from tests.examples import full

RAMP = np.linspace(0, 65535, 20).astype(np.uint16).reshape(4, 5)
GREY = (RAMP >> 8).astype(np.uint8)
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], axis=-1)


def saved(folder, files):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {"image": [str(file) for file in files], "label": [0] * len(files)}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_dict(columns, features=kinds).save_to_disk(str(folder))


def opened(path):
    with path.open("rb") as file, Image.open(file) as image:
        image.load()
    return image


NO_TEST = Form(needs_test=False)
WAYS = ("folder", "huggingface", "items", "arrays")


def read_in(way, folder, names, form=NO_TEST):
    """The pixels of the images in folder/train/a, by one of the ways in which they come."""
    files = [folder / "train" / "a" / name for name in names]
    if way == "folder":
        return image_folder("x", folder, form=form).train_images
    if way == "huggingface":
        place = folder / f"saved {time.monotonic_ns()}"
        saved(place, files)
        return plugin_datasets.on_disk(place, form, public_scale=False).train_images
    images = [opened(file) for file in files]
    part = [(image, k % 2) for k, image in enumerate(images)] if way == "items" else (images, [0] * len(images))
    numbered = replace(form, classes=("0", "1"))
    return plugin_datasets.dataset("x", lambda _: (part, None), "", numbered, public_scale=False).train_images


@pytest.fixture(params=WAYS)
def read(tmp_path, request):
    for kind in ("a", "b"):
        (tmp_path / "data" / "train" / kind).mkdir(parents=True)

    def write_and_read(image: Image.Image, name: str, **options: object) -> np.ndarray:
        image.save(tmp_path / "data" / "train" / "a" / name, **options)
        return read_in(request.param, tmp_path / "data", [name])[0]

    write_and_read.way = request.param
    return write_and_read


@pytest.mark.parametrize(
    ("image", "name"),
    [
        (Image.fromarray(RAMP), "x.png"),
        (Image.fromarray(RAMP), "x.tif"),
        (Image.frombytes("I;16B", (5, 4), RAMP.astype(">u2").tobytes()), "x.tif"),
        (Image.fromarray(RAMP), "x.pgm"),
        (Image.fromarray(RAMP.astype(np.int32) * 1000), "x.tif"),
        (Image.fromarray(RAMP.astype(np.float32) / 65535), "x.tif"),
    ],
    ids=["16 bits, png", "16 bits, tiff", "16 bits, big-endian", "16 bits, pgm", "int32", "float32"],
)
def test_what_would_be_lost_is_refused_with_the_files_name(read, image, name):
    with pytest.raises(ValueError, match="has more than 8 bits per channel, allowed: 8 bits") as refused:
        read(image, name)
    assert (f"train/a/{name}'" if read.way == "folder" else "training picture 0 ") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (4, 2)], ids=["colour", "grey with alpha"])
def test_16_bits_that_pillow_reads_as_8_are_refused_too(tmp_path, kind, channels):
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    header, rows = struct.pack(">IIBBBBB", 5, 4, 16, kind, 0, 0, 0), 4 * (b"\0" + bytes(2 * 5 * channels))
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    (tmp_path / "train" / "b").mkdir()
    with pytest.raises(ValueError, match=r"train/a/x\.png' has more than 8 bits per channel, allowed: 8 bits"):
        image_folder("image-folder", tmp_path, Form(needs_test=False))


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
    assert pixels.shape[0] == (1 if image.mode in ("L", "1", "LA") else 3)
    assert np.broadcast_to(pixels, (3, 4, 5)).tolist() == np.asarray(colours).transpose(2, 0, 1).tolist()


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_an_image_is_turned_as_its_exif_data_say(read, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for image in (COLOUR, GREY):
        pixels = read(Image.fromarray(image), f"x.{suffix}", exif=exif)
        upright = np.asarray(ImageOps.exif_transpose(tagged(image, orientation)))
        assert pixels.tolist() == (upright.transpose(2, 0, 1) if image is COLOUR else upright[None]).tolist()


def tagged(pixels, orientation):
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = orientation
    return image


@pytest.mark.parametrize("way", WAYS)
def test_grey_among_colours_has_three_channels_and_sizes_become_one(tmp_path, way):
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    images = {"a.png": GREY, "b.png": COLOUR, "c.png": np.dstack([GREY, 255 - GREY])}
    for name, image in images.items():
        Image.fromarray(image).save(folder / name)
    found = read_in(way, tmp_path, [*images])
    for k in (0, 2):
        assert found[k].tolist() == [GREY.tolist()] * 3
    assert found[1].tolist() == COLOUR.transpose(2, 0, 1).tolist()
    Image.fromarray(COLOUR[:, :3]).save(folder / "e.png")
    with pytest.raises(ValueError, match=r"is 4x3 .* the images before it are 4x5; the key image-size makes them one"):
        read_in(way, tmp_path, [*images, "e.png"])
    sizes = Form(needs_test=False, image_size=4)
    assert read_in(way, tmp_path, [*images, "e.png"], sizes).shape == (4, 3, 4, 4)


def test_an_image_keeps_its_orientation_where_its_exif_data_are_damaged(read):
    if read.way == "huggingface":
        pytest.skip("Hugging Face's datasets refuse it")
    assert read(Image.fromarray(GREY), "x.png", exif=b"Exif\0\0MM\0\0damaged").tolist() == [GREY.tolist()]


def test_a_format_that_was_saved_with_the_data_hides_nothing(tmp_path):
    datasets = pytest.importorskip("datasets")
    PALETTE.save(tmp_path / "x.png")
    saved(tmp_path / "as-they-are", [tmp_path / "x.png"])
    datasets.load_from_disk(str(tmp_path / "as-they-are")).with_format("numpy", columns=["image"]).save_to_disk(
        str(tmp_path / "as-arrays")
    )
    found = plugin_datasets.on_disk(tmp_path / "as-arrays", NO_TEST, public_scale=False).train_images[0]
    assert found.tolist() == np.asarray(PALETTE.convert("RGB")).transpose(2, 0, 1).tolist()


@pytest.mark.parametrize("mode", ["L", full("RGB")])
def test_a_column_of_one_mode_hides_no_levels_that_would_be_lost(tmp_path, mode):
    datasets = pytest.importorskip("datasets")
    Image.fromarray(np.arange(20, dtype=np.uint16).reshape(4, 5) * 3000).save(tmp_path / "x.png")
    saved(tmp_path / "as-they-are", [tmp_path / "x.png"])
    data = datasets.load_from_disk(str(tmp_path / "as-they-are"))
    data.cast_column("image", datasets.Image(mode=mode)).save_to_disk(str(tmp_path / "of-a-mode"))
    with pytest.raises(ValueError, match="training picture 0 has more than 8 bits per channel"):
        plugin_datasets.on_disk(tmp_path / "of-a-mode", NO_TEST, public_scale=False)


def test_what_predict_reads_is_what_a_run_reads(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOUR).save(tmp_path / "x.png", exif=exif)
    upright = np.rot90(COLOUR, -1).transpose(2, 0, 1)
    assert read_image(tmp_path / "x.png", (3, 5, 4)).tolist() == upright.tolist()
    luminance = np.asarray(Image.fromarray(COLOUR).convert("L"))
    assert read_image(tmp_path / "x.png", (1, 5, 4)).tolist() == [np.rot90(luminance, -1).tolist()]


def test_pixels_that_an_older_version_cached_are_not_used(tmp_path, monkeypatch):
    for kind in ("a", "b"):
        (tmp_path / "train" / kind).mkdir(parents=True)
        Image.fromarray(GREY).save(tmp_path / "train" / kind / "x.png")
    from fedprune_app.data import datasets, folders

    monkeypatch.setattr(folders, "_READING", b"")
    monkeypatch.setattr(folders, "_decode", lambda *given: np.full((2, 1, 4, 5), 255, np.uint8))
    load_dataset("image-folder", tmp_path, needs_test=False)
    monkeypatch.undo()
    datasets._load.cache_clear()
    assert load_dataset("image-folder", tmp_path, needs_test=False).train_images[0].tolist() == [GREY.tolist()]


@pytest.mark.parametrize("way", ["folder", "huggingface"])
def test_a_picture_that_is_a_program_is_given_to_no_interpreter(tmp_path, monkeypatch, way):
    """Pillow goes by a file's content, and has Ghostscript run what is PostScript."""
    interpreter, called = tmp_path / "bin" / "gs", tmp_path / "called"
    interpreter.parent.mkdir()
    interpreter.write_text(f'#!/bin/sh\necho called >> "{called}"\n[ "$1" = --version ] && echo 10.0\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("PATH", str(interpreter.parent), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it is looked for once in a process
    classes = tmp_path / "train"
    for kind in ("a", "b"):
        (classes / kind).mkdir(parents=True)
        Image.fromarray(GREY).save(classes / kind / "0.png")
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (classes / "a" / "z.png").write_bytes(program)
    with pytest.raises(ValueError, match="UnidentifiedImageError"):
        read_in(way, tmp_path, ["z.png", "0.png"])
    assert not called.exists()
