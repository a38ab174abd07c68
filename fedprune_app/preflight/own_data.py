"""What a folder of somebody's own data holds is found by its files, as far as these say it."""

from collections import Counter
from itertools import chain, islice
from pathlib import Path

from fedprune_app.config import ConfigError, Scalar, Settings
from fedprune_app.data.folders import image_files, open_picture, owner_folders
from fedprune_app.data.tables import column_names

_LARGEST_SIDE = 64  # pixels of images that are taken as they are
_SMALL_SIDE = 32
_LOOKED_AT = 100  # images


def settings_of(folder: Path, chosen: Settings) -> dict[str, Scalar]:
    """Return the settings that read the sites in ``folder``, with those that were ``chosen``.

    Raises :class:`ConfigError` with what is needed where the files do not say whose each example is.
    """
    found: dict[str, Scalar] = {"data-dir": str(folder), "partition": "owners"}
    if columns := column_names(folder):
        if "owner-column" not in chosen:
            raise ConfigError("owner-column", ..., f"one of the columns {', '.join(columns)}", which="is not given")
        return {**found, "dataset": "table", **chosen}
    if not (sites := owner_folders(folder)):
        raise ConfigError("DIR", folder, "a folder with <site>/<class>/* (images), or train.csv with a column of sites")
    return {**found, "dataset": "image-folder", **_size_of_images([folder / site for site in sites]), **chosen}


def _size_of_images(sites: list[Path]) -> dict[str, Scalar]:
    sizes: Counter[tuple[int, int]] = Counter()
    for path in islice(chain.from_iterable(map(image_files, sites)), _LOOKED_AT):
        with path.open("rb") as file, open_picture(file) as picture:
            sizes[picture.size] += 1
    is_small = len(sizes) == 1 and max(max(size) for size in sizes) <= _LARGEST_SIDE
    return {} if is_small else {"image-size": _SMALL_SIDE}
