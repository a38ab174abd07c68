"""Pictures of Pillow become pixels here, whoever brings them: image folders, Hugging Face's datasets and plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Pixels = NDArray[np.uint8]
_GREY = ("1", "L", "LA")
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_DIM = 1 << 12


class Unreadable(ValueError):
    """The pixels of a picture cannot be had as 8 bits per channel without losing information; the text says why."""


def stacked(
    pictures: Iterable[Picture],
    count: int,
    refuse: Callable[[int, str], ValueError],
    size: int = 0,
    fit: str = "crop",
    *,
    is_set: bool = True,
) -> Pixels:
    """Return the pixels of ``count`` pictures as (N, C, H, W), with one channel if every picture is grey, else three.

    With ``size`` each picture becomes a square of that side, see :func:`resized`; else all have one size. What
    ``refuse`` makes of a picture's position and the reason is raised for a picture that :func:`pixels` refuses, and for
    one of another size. Pictures of 16 bits of which none uses more than a sixteenth of the range (12 bits in 16, say)
    are refused, since few levels would be left. They are taken where they are no set (``is_set``), as one alone may be
    dark.
    """
    images: Pixels = np.empty(0, np.uint8)
    brightest, deep_index = 0, -1  # of the pictures of 16 bits: the largest value, and the first position
    for i, picture in enumerate(pictures):
        try:
            array, maximum = pixels(picture)
            array = resized(array, (size, size), fit) if size else array
        except Unreadable as error:
            raise refuse(i, str(error)) from None
        except Exception as error:  # Pillow's readers raise what they like, DecompressionBombError too
            raise refuse(i, f"cannot be read as an image ({type(error).__name__})") from None
        if maximum is not None:
            brightest, deep_index = max(brightest, maximum), i if deep_index < 0 else deep_index
        if i == 0:
            images = np.empty((count, *array.shape), np.uint8)
        if array.shape[1:] != images.shape[2:]:
            this_size, first_size = ("x".join(map(str, shape)) for shape in (array.shape[1:], images.shape[2:]))
            reason = f"is {this_size} (height x width), the images before it are {first_size}"
            raise refuse(i, f"{reason}; the key image-size makes them one size")
        images = as_deep_as(array, images)
        images[i] = array
    if deep_index >= 0 and brightest < _DIM and is_set:
        reason = f"and the others of 16 bits have no value above {brightest}, allowed: values up to 65535, or 8 bits"
        raise refuse(deep_index, reason)
    return images


def pixels(picture: Picture) -> tuple[Pixels, int | None]:
    """Return a picture as (C, H, W), turned as its EXIF data say, and the largest value of a picture of 16 bits.

    Grey has one channel, and all else has three: the colours of a palette, not its indices. Of grey of 16 bits the
    higher 8 are taken, so 0 is black and 65535 white, as Pillow does for colours. Transparency is dropped. Raises
    :class:`Unreadable` for integers of 32 bits and floating-point numbers, whose range a file does not say, and for a
    picture of one colour that differs in its transparency alone.
    """
    # before version 11 Pillow opens PNG files of 16 bits as integers of 32 bits, and PGM files still
    is_deep = picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM"))
    picture = _upright(picture)
    if is_deep:
        values = np.asarray(picture)
        return (values >> 8).astype(np.uint8)[None], int(values.max())
    if picture.mode in ("I", "F"):
        kind = "32-bit integers" if picture.mode == "I" else "floating-point numbers"
        raise Unreadable(f"has {kind}, allowed: 8 or 16 bits per channel")
    is_grey, is_clear = picture.mode in _GREY, picture.has_transparency_data
    if is_grey and not is_clear:
        return np.asarray(picture.convert("L"))[None], None
    channels = np.asarray(picture.convert("RGBA" if is_clear else "RGB")).transpose(2, 0, 1)
    colours, transparency = channels[:3], channels[3:]
    if transparency.size and np.ptp(transparency) and not np.ptp(colours, axis=(1, 2)).any():
        raise Unreadable("is of one colour and differs in its transparency alone, allowed: an image in its colours")
    return colours[:1] if is_grey else colours, None


def _upright(picture: Picture) -> Picture:
    """Return a loaded picture, turned as its EXIF data say; damaged EXIF data say nothing."""
    from PIL.Image import Transpose

    picture.load()  # Pillow then turns TIFF files, and says so in their EXIF data
    try:
        orientation = picture.getexif().get(0x0112)
    except Exception:  # Pillow's readers raise what they like
        orientation = None
    turn = dict(enumerate(_TURNS, 2)).get(orientation or 0)
    return picture.transpose(Transpose[turn]) if turn else picture


def resized(image: Pixels, size: tuple[int, int], fit: str) -> Pixels:
    """Return pixels (C, H, W) with another (height, width), by Pillow's bicubic interpolation with antialiasing.

    With the ``fit`` "crop" an image is cut around its middle to the new proportions, with "stretch" it is squeezed.
    """
    from PIL import Image, ImageOps

    if image.shape[1:] == size:
        return image
    method = ImageOps.fit if fit == "crop" else Image.Image.resize
    array = np.asarray(method(_picture(image), size[::-1], Image.Resampling.BICUBIC))
    return array[None] if len(image) == 1 else array.transpose(2, 0, 1)


def in_grey(image: Pixels) -> Pixels:
    """Return pixels (C, H, W) with one channel: colours become grey by their luminance."""
    return image if len(image) == 1 else np.asarray(_picture(image).convert("L"))[None]


def as_deep_as(reference: Pixels, images: Pixels) -> Pixels:
    """Return images (N, C, H, W) with three channels if they are grey and ``reference``, (..., C, H, W), is not."""
    return np.repeat(images, 3, axis=1) if (images.shape[1], reference.shape[-3]) == (1, 3) else images


def _picture(image: Pixels) -> Picture:
    from PIL import Image

    return Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
