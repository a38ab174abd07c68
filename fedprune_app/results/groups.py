"""Groups of runs that differ only in their seed, each with a unique label."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedprune_app.config import OPTIONS, is_used
from fedprune_app.config.common import PUBLISHED
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.results.reader import Run

NOT_MEASURED = "–"


_DATA = ("dataset", "data-dir", "data", "partition", "clients", "model")
_PRIVACY = {"dp.target-epsilon": "ε {:g}", "dp.noise-multiplier": "noise {:g}", "dp.enabled": "private"}
_FIRST = (*_DATA, *_PRIVACY)


# Keys for a run's folders and execution, which do not change its results.
_BOOKKEEPING = frozenset(key for key, option in OPTIONS.items() if not option.changes_results)


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation (``ddof = 1``) over seeds; None for the deviation of a single seed."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Statistic | None:
        """Return the statistic over all seeds, or None if a seed lacks the number: a mean of fewer would mislead."""
        measurements = list(values)
        numbers = [value for value in measurements if value is not None]
        if not numbers or len(numbers) < len(measurements):
            return None
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed; ``settings`` distinguish them from other groups of the same system."""

    label: str
    system: str
    settings: Values
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    def over(self, number: Callable[[Run], float | None]) -> Statistic | None:
        return Statistic.of(map(number, self.runs))

    def last(self, field: str) -> Statistic | None:
        return self.over(partial(Run.last, field=field))


Groups = Sequence[Group]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed, in the order of their first run.

    A run that did not complete, that continued after it lost states, or that has the seed of another run is a group of
    its own. Labels are unique: the system, the settings in which groups of that system differ (``target-rate 0.3``),
    the run's flaw, if it has one, and the seed or the folder if two groups still have the same label.
    """
    seeds = Counter((_identity(run), run.seed) for run in runs if not run.flaw)
    members: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        is_alone = run.flaw or seeds[_identity(run), run.seed] > 1
        members[(_identity(run), str(run.folder) if is_alone else None)].append(run)
    groups = [tuple(group) for group in members.values()]
    settings = [_settings(group[0], [peer[0] for peer in groups]) for group in groups]
    labels = [_label(group[0], values) for group, values in zip(groups, settings, strict=True)]
    for distinctions in (
        [f"seed {', '.join(str(run.seed) for run in group)}" for group in groups],
        folder_names([group[0].folder for group in groups]),
    ):
        count = Counter(labels)
        pairs = zip(labels, distinctions, strict=True)
        labels = [f"{label} · {distinction}" if count[label] > 1 else label for label, distinction in pairs]
    return [
        Group(label, group[0].system, values, group)
        for label, values, group in zip(labels, settings, groups, strict=True)
    ]


def compared_settings(run: Run) -> ValueDict:
    """Return the number of clients, and the configuration without the seed and keys that do not change results.

    The versions of a plug-in's code are included, and for private datasets the keys that identify the data.
    """
    compared = {key: value for key, value in run.config.items() if key not in {"seed", *_BOOKKEEPING}}
    public = _place(run, "fedltp.public-dataset", "fedltp.public-data-dir")
    codes = [run.info.get("plugins") or {}, *(run.info.get("plugins_since") or ())]  # code may change on resume
    versions = [str(version) for code in codes for name, version in code.items() if name != "round"]
    code = ", ".join(sorted(text[:15] if text.startswith("sha256 ") else text for text in versions))
    clients = len(run.info.get("partition") or ()) or None
    return compared | place_of_data(run) | public | {"clients": clients, **({"code": code} if code else {})}


def place_of_data(run: Run) -> ValueDict:
    """Return, by key, the identity of data that have the same dataset's name.

    It is a digest of the data, or their folder if no digest was reported; empty for a published dataset, which is the
    same in every folder.
    """
    place, digest = _place(run, "dataset", "data-dir"), run.info.get("data_sha256")
    return {"data": str(digest)[:12]} if place and digest else place


def _place(run: Run, dataset: str, folder: str) -> ValueDict:
    is_published = run.config.get(dataset) in {*PUBLISHED, None, ""}
    return {} if is_published or folder not in run.config else {folder: run.config[folder]}


def _identity(run: Run) -> str:
    return repr((run.system, sorted(compared_settings(run).items(), key=lambda item: item[0])))


def _settings(run: Run, runs: Sequence[Run]) -> ValueDict:
    """Return this run's values of the fewest keys that distinguish runs of the same system.

    A key that only varies together with earlier ones is left out. Keys of the data come first, then the system's own.
    """
    peers = [compared_settings(peer) for peer in runs if peer.system == run.system]
    keys = {key for peer in peers for key in peer}
    chosen_keys: list[str] = []
    classes = 1
    for key in sorted(keys, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), "." not in key, key)):
        values = {repr(peer[key]) for peer in peers if peer.get(key) is not None}
        split = len({tuple(repr(peer.get(name)) for name in (*chosen_keys, key)) for peer in peers})
        if len(values) > 1 and split > classes:
            chosen_keys.append(key)
            classes = split
    return {key: compared_settings(run).get(key) for key in chosen_keys}


def _label(run: Run, settings: Values) -> str:
    parts = dict.fromkeys(_words(key, value, run.config) for key, value in settings.items())
    return " · ".join(filter(None, [run.system, *parts])) + (f" ({run.flaw})" if run.flaw else "")


def _words(key: str, value: Any, config: Values) -> str:
    if key in _PRIVACY:
        if not config.get("dp.enabled"):
            return "not private"
        return _PRIVACY[key].format(value) if value else ""
    name = key.rpartition(".")[2]
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value_text(value)}"


def differing_settings(groups: Groups) -> list[tuple[str, list[str]]]:
    """Return each setting that is not the same for all groups, with its value in each; – where it has no effect."""
    settings = [
        {key: value_text(value) for key, value in compared_settings(group.first).items() if has_effect(key, group)}
        for group in groups
    ]
    keys = sorted({key for values in settings for key in values} - {"system"})
    varied = [key for key in keys if len({values[key] for values in settings if key in values}) > 1]
    return [(key, [values.get(key, NOT_MEASURED) for values in settings]) for key in varied]


def has_effect(key: str, group: Group) -> bool:
    systems = OPTIONS[key].needs.get("system") if key in OPTIONS else None
    return systems is None or group.system in systems or is_used(group.system, key)


def folder_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders without what all of their paths begin with, which would tell of one's machine."""
    common = os.path.commonpath([folder.absolute().parent for folder in folders]) if folders else ""
    return [os.path.relpath(folder, common) for folder in folders]


def value_text(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else short_name(str(value))


def short_name(text: str) -> str:
    """Return ``file.py:function`` without the folders of the file; another text unchanged."""
    file, colon, function = text.rpartition(":")
    return f"{Path(file).name}:{function}" if file.endswith(".py") and colon and function.isidentifier() else text
