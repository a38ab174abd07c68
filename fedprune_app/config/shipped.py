"""The run-config files that come with fedprune are found by name, from a checkout and from an installed wheel alike."""

from pathlib import Path

from fedprune_app.config.meant import not_allowed


def shipped_configs() -> dict[str, Path]:
    """Return the files of the shipped configurations by name, such as ``subfedavg``."""
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):  # a wheel has them in the package
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return {}


def config_file(path: Path) -> Path:
    """Return the file that ``path`` is, or the shipped configuration of that name.

    Raises :class:`ConfigError` for a name that is neither.
    """
    if (path.exists() and not path.is_dir()) or path.suffix or path.parent != Path():
        return path
    shipped = shipped_configs()
    if str(path) not in shipped:
        raise not_allowed("--config", str(path), [*shipped, "or a file"])
    return shipped[str(path)]
