"""Pictures of Pillow become pixels here, whoever brings them: image folders, Hugging Face's datasets and plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Pixels = NDArray[np.uint8]
_GREY = ("1", "L", "LA")


def stacked(
    pictures: Iterable[Picture],
    count: int,
    refuse: Callable[[int, str], ValueError],
    size: int = 0,
    fit: str = "crop",
) -> Pixels:
    """Return the pixels of ``count`` pictures as (N, C, H, W), with one channel if every picture is grey, else three.

    With ``size`` each picture becomes a square of that side, see :func:`resized`; else all have one size. What
    ``refuse`` makes of a picture's position and the reason is raised for a picture that cannot be read, for one of
    another size, and for one of more than 8 bits per channel, of which too few levels might be left.
    """
    images: Pixels = np.empty(0, np.uint8)
    for i, picture in enumerate(pictures):
        if picture.mode.startswith(("I", "F")):
            raise refuse(i, "has more than 8 bits per channel, allowed: 8 bits")
        try:
            array = pixels(picture)
            array = resized(array, (size, size), fit) if size else array
        except Exception as error:  # Pillow's readers raise what they like, DecompressionBombError too
            raise refuse(i, f"cannot be read as an image ({type(error).__name__})") from None
        if i == 0:
            images = np.empty((count, *array.shape), np.uint8)
        if array.shape[1:] != images.shape[2:]:
            this_size, first_size = ("x".join(map(str, shape)) for shape in (array.shape[1:], images.shape[2:]))
            reason = f"is {this_size} (height x width), the images before it are {first_size}"
            raise refuse(i, f"{reason}; the key image-size makes them one size")
        images = as_deep_as(array, images)
        images[i] = array
    return images


def pixels(picture: Picture) -> Pixels:
    """Return a picture of 8 bits per channel as (C, H, W), turned as its EXIF data say.

    Grey has one channel, and all else has three: the colours of a palette, not its indices. Transparency is dropped.
    """
    from PIL import ImageOps

    picture.load()  # Pillow then turns TIFF files, and says so in their EXIF data
    with suppress(Exception):  # damaged EXIF data say nothing
        picture = ImageOps.exif_transpose(picture)
    if picture.mode in _GREY and not picture.has_transparency_data:
        return np.asarray(picture.convert("L"))[None]
    colours = np.asarray(picture.convert("RGBA").convert("RGB")).transpose(2, 0, 1)
    return colours[:1] if picture.mode in _GREY else colours


def resized(image: Pixels, size: tuple[int, int], fit: str) -> Pixels:
    """Return pixels (C, H, W) with another (height, width), by Pillow's bicubic interpolation with antialiasing.

    With the ``fit`` "crop" an image is cut around its middle to the new proportions, with "stretch" it is squeezed.
    """
    from PIL import Image, ImageOps

    if image.shape[1:] == size:
        return image
    method = ImageOps.fit if fit == "crop" else Image.Image.resize
    array = np.asarray(method(picture_of(image), size[::-1], Image.Resampling.BICUBIC))
    return array[None] if len(image) == 1 else array.transpose(2, 0, 1)


def as_deep_as(reference: Pixels, images: Pixels) -> Pixels:
    """Return images (N, C, H, W) with three channels if they are grey and ``reference``, (..., C, H, W), is not."""
    return np.repeat(images, 3, axis=1) if (images.shape[1], reference.shape[-3]) == (1, 3) else images


def picture_of(image: Pixels) -> Picture:
    from PIL import Image

    return Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
