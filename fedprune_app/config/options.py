"""The declaration of an option: its default, help, range, and all else that the product knows of it."""

import math
import operator
import os.path
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

from fedprune_app.config.errors import ConfigError, not_allowed

Scalar = bool | int | float | str
Settings = Mapping[str, Scalar]  # by key
S = TypeVar("S", bool, int, float, str)


class PathKind(Enum):
    """Whether a value is a path, and how the path is used."""

    PLAIN = auto()  # no path
    FOLDER = auto()  # is read
    STATE_FOLDER = auto()  # is written in every round, and may be shared by runs
    RUN_FOLDER = auto()  # holds one run; a command line sets it with --out and --resume
    MODEL = auto()  # a folder or a .gguf file, or else a name, or code
    CODE = auto()  # names, or code as 'module', 'file.py', 'module:function' or 'file.py:function'
    NAMED_FILES = auto()  # 'name=path, name=path'

    @property
    def is_folder(self) -> bool:
        """Whether the value is always a folder, absolute once it is parsed."""
        return self in (PathKind.FOLDER, PathKind.STATE_FOLDER, PathKind.RUN_FOLDER)


# One end of a range: its words in an error, the limit, and the comparison of a value with the limit.
Bound = tuple[str, float, Callable[[float, float], bool]]


class NoneOf(tuple[Scalar, ...]):
    """The complement of the given values: ``value in NoneOf(("a", "b"))`` is false for "a" and "b"."""

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


# By key, the values of it with which an option has an effect. ".key" is a key of the same table.
Needs = Mapping[str, tuple[Scalar, ...]]


@dataclass(frozen=True)
class Option:
    """The declaration of one key of the configuration, made by :func:`option`."""

    default: Scalar
    help: str
    choices: Mapping[str, str] = field(default_factory=dict)  # choice -> what it means
    bounds: tuple[Bound, ...] = ()
    kind: PathKind = PathKind.PLAIN
    changes_results: bool = True
    resumable: bool = False
    needs: Needs = field(default_factory=dict)

    @property
    def range(self) -> str:
        """The bounds in words, "at least 0 and below 1"; empty without bounds."""
        return " and ".join(f"{words} {limit}" for words, limit, _ in self.bounds)

    def parse(self, key: str, value: object) -> Scalar:
        """Return ``value`` in the default's type, checked. Raises :class:`ConfigError` that names ``key``."""
        parsed = _as_type(key, value, type(self.default))
        if self.choices and parsed not in self.choices:
            raise not_allowed(key, parsed, self.choices)
        if not isinstance(parsed, str) and not all(holds(parsed, limit) for _, limit, holds in self.bounds):
            raise ConfigError(key, parsed, self.range)
        if isinstance(parsed, str) and parsed and self.kind.is_folder:
            expanded = os.path.expanduser(parsed)  # unlike pathlib's, accepts the folder of an unknown user
            if not os.path.isabs(expanded):
                raise ConfigError(key, parsed, "an absolute path")
            return str(Path(expanded))
        return parsed

    def from_here(self, value: Scalar) -> Scalar:
        """Return ``value``, if it is a path, as an absolute one: relative paths begin at the current folder.

        A run folder is not changed, because a command line sets it by --out and --resume.
        """
        if not isinstance(value, str) or not value or self.kind is PathKind.RUN_FOLDER:
            return value
        if self.kind.is_folder:
            return _real_path(value)
        if self.kind is PathKind.MODEL and (value.endswith(".gguf") or _is_folder(value)):
            return _real_path(value)
        if self.kind in (PathKind.CODE, PathKind.MODEL):
            return ",".join(_code_from_here(part.strip()) for part in value.split(","))
        if self.kind is PathKind.NAMED_FILES:
            parts = (part.partition("=") for part in value.split(","))
            return ",".join(f"{name.strip()}={_real_path(path.strip())}" if path else name for name, _, path in parts)
        return value


def option(
    default: S,
    help: str,
    *,
    choices: Mapping[str, str] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    kind: PathKind = PathKind.PLAIN,
    changes_results: bool = True,
    resumable: bool = False,
    needs: Needs | None = None,
) -> S:
    """Declare one option as a field of a frozen dataclass, the only place that lists it.

    * ``help``: one sentence for the user.
    * ``choices``: the allowed texts, each with its meaning in a few words.
    * ``least``, ``most``: inclusive bounds; ``above``, ``below``: exclusive ones.
    * ``kind``: whether the value is a path, and of what.
    * ``changes_results``: false for an option that only sets where or how a run is executed; runs that differ in it
      are compared as equal.
    * ``resumable``: true for an option that a resumed run may change.
    * ``needs``: the values of other keys with which the option has an effect.
    """
    ends = (
        ("at least", least, operator.ge),
        ("above", above, operator.gt),
        ("at most", most, operator.le),
        ("below", below, operator.lt),
    )
    bounds = tuple((words, limit, holds) for words, limit, holds in ends if limit is not None)
    declaration = Option(default, help, choices or {}, bounds, kind, changes_results, resumable, needs or {})
    return field(default=default, metadata={_OPTION: declaration})


def execution_option(default: S, help: str, **more: Any) -> S:
    """Declare an option that only sets where or how a run is executed, and that a resumed run may change."""
    return option(default, help, changes_results=False, resumable=True, **more)


_OPTION = "option"


def option_of(item: Field[Any]) -> Option:
    declaration: Option = item.metadata[_OPTION]
    return declaration


_TYPE_NAMES: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _as_type(key: str, value: object, kind: type[Scalar]) -> Scalar:
    if kind is float and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)  # YAML reads 1e-3 as a text, TOML .1
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) < 1e300:  # also excludes NaN
            raise ConfigError(key, value, "a finite number")
        if kind in (float, str):  # TOML and YAML read a list of one number, as in `layer-shares=0.5`, as a number
            value = kind(value)
    if not isinstance(value, bool | int | float | str) or type(value) is not kind:
        is_text_of_bool = kind is bool and str(value).lower() in ("true", "false")
        suggestion = f"did you mean {str(value).lower()}?" if is_text_of_bool else ""
        raise ConfigError(key, value, _TYPE_NAMES[kind], hint=suggestion)
    return value


def _code_from_here(code: str) -> str:
    """Return code in a file with the file's absolute path; a module or other name is returned unchanged."""
    file, colon, function = code.rpartition(":") if not code.endswith(".py") else (code, "", "")
    return f"{_real_path(file)}{colon}{function}" if file.endswith(".py") else code


def _is_folder(model: str) -> bool:
    """Whether a model is a folder; one that is called like a network, such as a run's, has to be a checkpoint."""
    folder = Path(os.path.expanduser(model))
    return folder.is_dir() and (os.sep in model or (folder / "config.json").exists())


def _real_path(path: str) -> str:
    return str(Path(os.path.expanduser(path)).resolve())


# --- lists in one text: names, and numbers that are dealt to the clients in turn ------------------------------------


def listed(text: str) -> tuple[str, ...]:
    """Return the names in ``text``, 'cat, dog'."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def share_in_turn(key: str, text: str, client: int, default: float) -> float:
    """Return the share of ``client`` from ``text``, '0.2 0.4'; ``default`` if ``text`` is empty.

    Raises :class:`ConfigError` that names ``key`` unless all shares are above 0 and at most 1.
    """
    texts = text.replace(",", " ").split()
    if not texts:
        return default
    try:
        values = [float(part) for part in texts]
    except ValueError:
        values = [math.nan]
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(key, text, "numbers above 0 and at most 1")
    return values[client % len(values)]
