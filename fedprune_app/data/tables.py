"""Tables of numbers: CSV or Parquet files with a column of labels, for networks of linear layers."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.data.brought import scale
from fedprune_app.data.datasets import Dataset, missing, owned_by
from fedprune_app.data.errors import FileError, shortened

if TYPE_CHECKING:
    import pandas

_SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True)
class Columns:
    """These are the names of a table's columns that hold no feature; ``owner`` is empty where nobody owns rows."""

    label: str = "label"
    owner: str = ""


def table(
    folder: Path, columns: Columns, fixed: tuple[str, ...] = (), *, needs_test: bool, public_scale: bool
) -> Dataset:
    """Read ``folder/train.csv`` and ``folder/test.csv``, or Parquet files of these names.

    Each row is an example. All columns but the label's and the owner's are features, in the order of the training
    file. They are numbers, which are normalised by the mean and the standard deviation of the training rows. With
    ``public_scale`` they stay as they are. Labels and owners are texts: 01 is not 1, and NA is a name like any other.
    Only an empty cell is a missing one. The classes are the different labels in order, or ``fixed``. Raises a one-line
    ``ValueError`` naming the file and the column.
    """
    if not columns.label:
        raise ValueError("label-column is '', allowed: the name of a column")
    files = {part: _file(folder, part) for part in ("train", "test")}
    if files["train"] is None or (needs_test and files["test"] is None):
        part = "train" if files["train"] is None else "test"
        advice = "; test-split=holdout holds out a share of each client's rows" if part == "test" else ""
        raise ValueError(missing("table", folder, f"{part}.csv or {part}.parquet", Path(f"{part}.csv"), advice))
    frames = {part: _read(path, columns) for part, path in files.items() if path is not None}
    train = frames["train"]
    features = [name for name in train.columns if name not in (columns.label, columns.owner)]
    if not features:
        raise _error(files["train"], "has no column but the label's, allowed: at least one feature")
    arrays = {part: _features(files[part], frame, features, columns) for part, frame in frames.items()}
    labels = {part: frame[columns.label].astype(str).to_numpy() for part, frame in frames.items()}
    classes = fixed or _ordered(set(labels["train"]))
    if len(classes) < 2:
        why, allowed = "has one label", ", allowed: at least two"
        raise _error(files["train"], f"{why}, {classes[0]!r}{allowed}", why + allowed)
    numbers = {name: number for number, name in enumerate(classes)}
    for part, found in labels.items():
        if strange := sorted(set(found) - set(classes)):
            allowed = shortened(classes)
            told = f"has a label that classes does not name, allowed: {allowed}" if fixed else "has a label of no class"
            raise _error(files[part], f"has the label {strange[0]!r}, allowed: {allowed}", told)
    coded = {part: np.array([numbers[name] for name in found], dtype=np.int64) for part, found in labels.items()}
    none = arrays["train"][:0], coded["train"][:0]
    test = (arrays["test"], coded["test"]) if "test" in arrays else none
    owned = _owners(frames, columns.owner)
    mean, std = scale(arrays["train"], public_scale)
    names = tuple(features)
    arguments = (arrays["train"], coded["train"], *test, classes, mean, std, *owned)
    return Dataset("table", *arguments, features=names, is_measured=not public_scale)


def rows(path: Path, features: Sequence[str]) -> NDArray[np.float32]:
    """Read the columns ``features`` of a CSV or Parquet file, in this order, as float32 (N, F, 1, 1).

    Other columns are not looked at. Raises a one-line ``ValueError`` naming the file and the column.
    """
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"file {str(path)!r} is no table, allowed: a file that ends in {' or '.join(_SUFFIXES)}")
    nothing_else = Columns(label="")
    return _features(path, _read(path, nothing_else), features, nothing_else)


def _file(folder: Path, part: str) -> Path | None:
    return next((folder / f"{part}{suffix}" for suffix in _SUFFIXES if (folder / f"{part}{suffix}").is_file()), None)


def _read(path: Path, columns: Columns) -> pandas.DataFrame:
    """Return a table whose labels and owners are texts, and missing where a cell is empty."""
    try:
        import pandas
    except ImportError:
        raise ValueError("dataset 'table' needs pandas: install fedprune[data]") from None
    names = [name for name in (columns.label, columns.owner) if name]
    try:
        if path.suffix == ".csv":
            _check_names(path, _header(path))  # pandas makes others of names that are empty, or there twice
            # pandas takes NA and None for missing ones, whatever a converter returns; nothing that begins with = is one
            frame = pandas.read_csv(path, index_col=False, converters=dict.fromkeys(names, "={}".format))
            texts = {name: [text[1:] for text in frame[name]] for name in names if name in frame.columns}
        else:
            frame = _named_by_text(pandas.read_parquet(path))
            _check_names(path, list(frame.columns))
            there = [name for name in names if name in frame.columns]
            # whole numbers beside a missing one stay exact
            whole = _named_by_text(pandas.read_parquet(path, columns=there, dtype_backend="numpy_nullable"))
            texts = {name: ["" if pandas.isna(value) else _text(value) for value in whole[name]] for name in there}
    except FileError:
        raise
    except Exception as error:  # pandas' readers raise what they like
        why = f"cannot be read: {' '.join(str(error).split())}"
        raise _error(path, why, f"cannot be read ({type(error).__name__})") from None
    return frame.assign(**{name: [text or None for text in found] for name, found in texts.items()})


def _named_by_text(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a table with texts as names of its columns: in Parquet they may be whole numbers."""
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def _check_names(path: Path, names: list[str]) -> None:
    """Raise :class:`FileError` for a column without a name, and for two columns of one name."""
    if not all(name.strip() for name in names):
        why = "has a column without a name, allowed: a name for each (to_csv(index=False) writes no row numbers)"
        raise _error(path, why)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise _error(path, f"has two columns '{twice[0]}', allowed: different names", "has two columns of one name")


def _header(path: Path) -> list[str]:
    """Return the names in the first line of a CSV file.

    Raises :class:`FileError` for a line of the file with more or fewer values than the header: pandas takes the first
    value of longer lines for the name of the row, so that all others move by one column.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        header: list[str] = []
        for values in lines:
            if len(values) < 2 and not "".join(values).strip():  # a blank line, which pandas skips
                continue
            header = header or values
            if len(values) != len(header):
                why = f"has {len(values)} values in line {lines.line_num}, allowed: {len(header)}, as in the header"
                raise _error(path, why, "has a line with more or fewer values than the header, allowed: as many")
    return header


def _text(value: object) -> str:
    """Return the text of a cell of Parquet: a missing cell elsewhere makes 1.0 of a column's 1."""
    return str(int(value)) if isinstance(value, float | np.floating) and value.is_integer() else str(value)


def _error(path: Path | None, why: str, told: str = "") -> FileError:
    """Return the error of a table; ``told`` says the same without a word of what is in the table."""
    assert path is not None
    return FileError(path, "a table", why, told)


def _features(
    path: Path | None, frame: pandas.DataFrame, features: Sequence[str], columns: Columns
) -> NDArray[np.float32]:
    """Return the features as float32 (N, F, 1, 1)."""
    for name in (columns.label, columns.owner):
        if name and name not in frame.columns:
            key = "label-column" if name == columns.label else "owner-column"
            why = f"has no column '{name}', which {key} names"
            raise _error(path, f"{why}, allowed: {', '.join(frame.columns)}", why)
    if frame.empty:
        raise _error(path, "has no rows, allowed: at least one")
    if missing_ones := [name for name in features if name not in frame.columns]:
        why = "which the training rows have"
        raise _error(path, f"has no column '{missing_ones[0]}', {why}", f"lacks a column {why}")
    for name in filter(None, (*features, columns.label)):
        if absent := int(frame[name].isna().sum()):
            why = f"has {absent} missing values in column '{name}', allowed: none"
            raise _error(path, why, "has missing values, allowed: none")
    for name in features:
        if frame[name].dtype.kind not in "iufb":
            allowed = "allowed: numbers (pandas.get_dummies makes columns of 0 and 1 from texts)"
            raise _error(path, f"has column '{name}' without numbers, {allowed}", f"has a column of texts, {allowed}")
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float32] = frame[list(features)].to_numpy(dtype=np.float32)
    if not np.isfinite(numbers).all():
        raise _error(path, "has a number that is infinite, or too large for float32")
    return numbers[:, :, None, None]


def _ordered(labels: set[str]) -> tuple[str, ...]:
    """Return labels in order: numbers by their value, texts by their letters."""
    by_letters = sorted(labels)  # which also orders 01 and 1
    try:
        values = {label: float(label) for label in by_letters}
    except ValueError:
        return tuple(by_letters)
    return tuple(by_letters if any(map(math.isnan, values.values())) else sorted(by_letters, key=values.__getitem__))


def _owners(frames: dict[str, pandas.DataFrame], column: str) -> tuple[Any, Any]:
    if not column:
        return None, None
    names = {part: frame[column].fillna("").astype(str).tolist() for part, frame in frames.items() if column in frame}
    owners, test_owners = owned_by(names["train"], names.get("test", []))
    return owners, test_owners if "test" in names else None
