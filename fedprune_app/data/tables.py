"""Tables of numbers: CSV or Parquet files with a column of labels, for networks of linear layers."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedprune_app.core.texts import one_line
from fedprune_app.data.dataset import (
    Dataset,
    FileError,
    Form,
    coded,
    in_order,
    missing,
    owned_by,
    scale,
    shortened,
    text_of,
)

if TYPE_CHECKING:
    import pandas

_SUFFIXES = (".csv", ".parquet")


def table(folder: Path, form: Form, *, public_scale: bool) -> Dataset:
    """Read ``folder/train.csv`` and ``folder/test.csv``, or Parquet files of these names.

    Each row is an example. All columns are features, in the order of the training file, except the columns of labels,
    owners and groups and those that the form ignores. Features are numbers, normalised by the mean and the standard
    deviation of the training rows, or not with ``public_scale``. Labels, owners and groups are texts: 01 is not 1, and
    NA is an ordinary name. Only an empty cell is missing. The classes are the distinct labels in order, or those of the
    form. Raises a one-line ``ValueError`` naming the file and the column.
    """
    label, owner, group, ignored = form.label_column, form.owner_column, form.group_column, form.ignore_columns
    texts = [label, *filter(None, (owner, group))]
    places = [folder / f"{part}{suffix}" for part in ("train", "test") for suffix in _SUFFIXES]
    files = {path.stem: path for path in places if path.exists()}  # Parquet wins if both exist
    if "train" not in files or (form.needs_test and "test" not in files):
        part = "test" if "train" in files else "train"
        advice = "; test-split=holdout holds out a share of each client's rows" if part == "test" else ""
        raise ValueError(missing("table", folder, f"{part}.csv or {part}.parquet", advice))
    frames = {part: _read(path, texts) for part, path in files.items()}
    train = frames["train"]
    for part, frame in frames.items():
        _check_columns(files[part], frame, [label], "label-column names")
        _check_columns(files[part], frame, [owner] if owner else [], "owner-column names")
        _check_columns(files[part], frame, [group] if group else [], "group-column names")
    _check_columns(files["train"], train, ignored, "ignore-columns names")
    features = [name for name in train.columns if name not in (*texts, *ignored)]
    arrays = {part: _features(files[part], frame, features, label) for part, frame in frames.items()}
    labels = {part: frame[label].tolist() for part, frame in frames.items()}
    classes = form.classes or in_order(labels["train"])
    if len(classes) < 2:
        raise FileError(files["train"], f"has one label, {classes[0]!r}, allowed: at least two")

    def refuse(part: str, value: str) -> FileError:
        return FileError(files[part], f"has the label {value!r}, allowed: {shortened(classes)}")

    numbers = coded(labels, classes, refuse)
    test = (arrays["test"], numbers["test"]) if "test" in files else (arrays["train"][:0], numbers["train"][:0])
    owned = None

    def names(column: str) -> dict[str, list[str]]:
        """Return names as they are equal in both files: of numbers beside an empty cell, pandas writes 1.0 for 1."""
        texts = {part: frame[column].fillna("").str.strip() for part, frame in frames.items()}
        return {part: text.str.replace(r"^(\d+)\.0$", r"\1", regex=True).tolist() for part, text in texts.items()}

    if owner:
        owned = owned_by(names(owner)["train"], names(owner).get("test", []))
    groups = names(group) if group else {}
    return Dataset(
        "table",
        *(arrays["train"], numbers["train"], *test, classes, *scale(arrays["train"], public_scale)),
        owners=owned.train if owned else None,
        test_owners=owned.test if owned and "test" in files else None,
        owner_names=owned.names if owned else (),
        groups=groups.get("train"),
        test_groups=groups.get("test"),
        features=tuple(features),
        is_measured=not public_scale,
        stored=lambda: [digest for path in files.values() for digest in _row_digests(path)],
    )


def column_names(folder: Path) -> list[str]:
    """Return the names of the columns of the training rows in ``folder``; none without such rows."""
    places = [path for suffix in _SUFFIXES if (path := folder / f"train{suffix}").exists()]
    return [name for path in places[-1:] for name in _read(path, []).columns]


def rows(path: Path, features: Sequence[str]) -> NDArray[np.float64]:
    """Read the columns ``features`` of a CSV or Parquet file, in this order, as float64 (N, F, 1, 1).

    Other columns are ignored. Raises a one-line ``ValueError`` naming the file and the column.
    """
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"file {str(path)!r} is no table, allowed: a file that ends in {' or '.join(_SUFFIXES)}")
    return _features(path, _read(path, []), features)


def _read(path: Path, texts: Sequence[str]) -> pandas.DataFrame:
    """Return a table whose columns ``texts`` are texts, and missing where a cell is empty."""
    try:
        import pandas
    except ImportError:
        raise ValueError("dataset 'table' needs pandas: install fedprune[data]") from None
    types = dict.fromkeys(texts, str)
    try:
        if path.suffix == ".csv":
            # pandas renames empty and duplicate names, so the header is read separately
            header = pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False)
            names = header.iloc[0].tolist()
            with warnings.catch_warnings():
                warnings.simplefilter("error", pandas.errors.ParserWarning)  # lines with more values than the header
                frame = pandas.read_csv(path, index_col=False, dtype=types, keep_default_na=False, na_values=[""])
        else:
            frame = pandas.read_parquet(path)
            if any(name is not None for name in frame.index.names):
                frame = frame.reset_index()  # columns that pandas stores as the index come first
            frame.columns = frame.columns.astype(str)
            names = frame.columns.tolist()
            for name in set(texts) & set(names):
                values = ["" if pandas.isna(value) else text_of(value) for value in frame[name]]
                frame[name] = [value or None for value in values]
    except Exception as error:  # pandas' readers may raise anything
        raise FileError(path, f"cannot be read: {one_line(error)}") from None
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        allowed = "a name of its own for each (to_csv(index=False) writes no row numbers)"
        raise FileError(path, f"has columns without a name, or two of one name, allowed: {allowed}")
    return frame


def _row_digests(path: Path) -> list[bytes]:
    """Return a digest of each row as stored, over all its columns."""
    import pandas

    if path.suffix == ".csv":
        frame = pandas.read_csv(path, index_col=False, dtype=str, keep_default_na=False)
    else:
        frame = pandas.read_parquet(path)
    return [hashlib.sha256(repr(row).encode()).digest() for row in frame.itertuples(index=False, name=None)]


def _check_columns(path: Path, frame: pandas.DataFrame, names: Sequence[str], reason: str) -> None:
    for name in names:
        if name not in frame.columns:
            allowed = ", ".join(frame.columns)
            raise FileError(path, f"has no column '{name}', which {reason}, allowed: {allowed}")


def _features(path: Path, frame: pandas.DataFrame, features: Sequence[str], label: str = "") -> NDArray[np.float64]:
    """Return the features as float64 (N, F, 1, 1)."""
    if frame.empty:
        raise FileError(path, "has no rows, allowed: at least one")
    _check_columns(path, frame, features, "the training rows have")
    for name in filter(None, (*features, label)):
        if num_missing := int(frame[name].isna().sum()):
            raise FileError(path, f"has {num_missing} missing values in column '{name}', allowed: none")
    for name in features:
        if frame[name].dtype.kind not in "iufb":
            allowed = (
                "numbers (an empty cell alone is a missing value; pandas.get_dummies makes columns of 0 and 1 from "
                "texts), or ignore-columns"
            )
            raise FileError(path, f"has column '{name}' without numbers, allowed: {allowed}")
    numbers: NDArray[np.float64] = frame[list(features)].to_numpy(dtype=np.float64)
    with np.errstate(over="ignore"):
        if not np.isfinite(numbers.astype(np.float32)).all():
            raise FileError(path, "has a number that is infinite, or too large for float32")
    return numbers[:, :, None, None]
