"""Advice on somebody's own data: sweeps of a few methods within some minutes, and the answers that they give."""

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import yaml

from fedprune_app.config import ConfigError, Settings
from fedprune_app.config.toml import gallery_systems
from fedprune_app.core.named import ValueDict
from fedprune_app.data.splits import data_config, dataset_of
from fedprune_app.exports.formats import export_model
from fedprune_app.files import replace_file
from fedprune_app.plugins import names_in
from fedprune_app.preflight.describe import data_found
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.own_data import settings_of
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results import advice
from fedprune_app.results.advice import ALONE, FEDERATED, Advice, private
from fedprune_app.results.groups import Group, group_runs
from fedprune_app.results.ownership import mark
from fedprune_app.results.reader import Run
from fedprune_app.sweeps.matrix import matrix_of, to_yaml
from fedprune_app.sweeps.sweep import sweep
from fedprune_app.terminal import Terminal

SEEDS = (1, 2, 3)
_SEARCH_SEED = 0  # decides nothing but settings
_RATES = (0.01, 0.03, 0.1)
_PRIVATE_RATES = (0.1, 0.3, 1.0)
_PRIVATE = (ALONE, "fedavg")
_COMMON: ValueDict = {
    "batch-size": 32,
    "local-epochs": 2,
    "fraction-train": 1.0,
    "validation-fraction": 0.2,
    "evaluate-every": 0,
}
# by docs/evidence.md, section 6: the best with one mask for all, the best with own masks, and the smallest files
_SPARSE = ("feddst", "dispfl", "subfedavg-hy")
_GOSSIP: ValueDict = {"density": 0.5, "dispfl.growth": "random"}
_MOST_ROUNDS, _FEWEST_ROUNDS, _ROUNDS_OF_A_SEARCH = 100, 3, 8
_SHARE_OF_SEARCH = 3 / 4 + 2 / 2  # three rates for a quarter of the rounds, and two for half of them
_MOST_SITES = 10  # in a round of a method with a server
_MOST_FILES = 30
_RESERVE = 0.25  # of the time, for files and for what takes longer than it did at first
_OVERTIME = 1.5  # times the minutes, for a last seed: fewer than three tell next to nothing

Entries = dict[str, list[ValueDict]]  # by method: the settings that are tried


@dataclass(frozen=True)
class _Bench:
    """Sweeps of methods on the same data, in folders below ``out``."""

    common: Settings
    num_clients: int
    engine: str
    out: Path
    console: Terminal
    failed: dict[str, str]

    def document(self, entries: Entries, seeds: Sequence[int], rounds: int) -> ValueDict:
        data = {"dataset": self.common["dataset"]}
        common = {key: value for key, value in self.common.items() if key != "dataset"}
        return {
            "clients": self.num_clients,
            "common": {**common, "num-server-rounds": rounds},
            "systems": [entry for tried in entries.values() for entry in tried],
            "datasets": [data],
            "seeds": list(seeds),
        }

    def begun(self, name: str) -> ValueDict:
        """Return the document of a sweep that has begun; empty for one that has not."""
        file = self.out / f"{name}.yaml"
        found: ValueDict = yaml.safe_load(file.read_text()) if file.exists() else {}
        return found

    def rounds(self, name: str, planned: int) -> int:
        """Return the rounds that a sweep has begun with, or else those ``planned``."""
        common: ValueDict = self.begun(name).get("common", {})
        return int(common.get("num-server-rounds", planned))

    def runs(self, name: str, entries: Entries, seeds: Sequence[int], rounds: int) -> dict[str, list[Run]]:
        """Return by method the runs of a sweep, which goes on with what it lacks."""
        document, folder = self.document(entries, seeds, rounds), self.out / name
        replace_file(folder.with_suffix(".yaml"), to_yaml(document).encode())
        inputs = RunInputs(out=folder, resume=folder.exists())
        outcome = sweep(matrix_of(document, name), inputs, Placement(self.engine, self.num_clients), self.console)
        self.failed.update(outcome.failed)
        found: dict[str, list[Run]] = {method: [] for method in entries}
        for run in outcome.runs:
            found[method_of(run)].append(run)
        return {method: runs for method, runs in found.items() if runs}


def method_of(run: Run) -> str:
    return private(run.system) if run.config["dp.enabled"] else run.system


def advise(
    folder: Path,
    chosen: Settings,
    out: Path,
    console: Terminal,
    *,
    minutes: float = 20.0,
    epsilon: float = 0.0,
    engine: str = "inprocess",
) -> Advice:
    """Answer on the data in ``folder`` what a federation, pruning and privacy would bring, and write to ``out``.

    All choices are made by validation accuracy of a seed that no answer has. The answers are of test data. A folder
    ``out`` with unfinished advice is gone on with. Raises :class:`ConfigError` where the data do not say whose they
    are, where ``out`` holds anything else, or where ``minutes`` are too few.
    """
    start = time.monotonic()
    settings: ValueDict = settings_of(folder, chosen)
    config = prepare(RunInputs(settings)).config
    dataset, notes = dataset_of(data_config(config)), data_found(config)[1]
    names = dataset.owner_names
    entries = _entries(settings, len(names), epsilon, notes)
    decided = {"num-server-rounds"}.union(*(entry for tried in entries.values() for entry in tried)) - {"plugins"}
    for key in chosen:
        if key in decided:
            raise ConfigError(key, chosen[key], "other keys", which="is what advise decides")
    bench = _Bench({**_COMMON, **settings}, len(names), engine, out, console, {})
    measured = {method: tried[1:2] for method, tried in entries.items()}
    if out.exists() and any(out.iterdir()) and bench.begun("measured") != bench.document(measured, [_SEARCH_SEED], 2):
        raise ConfigError("--output", out, "a new folder", which="holds something else than advice with these settings")
    mark(out, "sweep")

    end = time.monotonic() + 60 * minutes * (1 - _RESERVE)  # reading the data does not count
    first = bench.runs("measured", measured, [_SEARCH_SEED], 2)
    if {run.info.get("data_sha256") for runs in first.values() for run in runs} - {None, dataset.content_sha256}:
        raise ConfigError(
            "--output", out, "a new folder", which="holds advice on other data, or on these before a change"
        )
    pace = _Pace.of(first)
    rounds = min(_MOST_ROUNDS, pace.rounds_until(end, _SHARE_OF_SEARCH + len(SEEDS)))
    entries = {method: entries[method] for method in first}
    if not bench.begun("search1") and (rounds < _ROUNDS_OF_A_SEARCH or bench.begun("runs")):
        notes.append(advice.NO_RATES)
        entries = {method: tried[1:2] for method, tried in entries.items()}
    else:
        notes.append(
            "learning rates were chosen by validation accuracy, of open methods after a last local phase, in runs of a "
            "quarter and a half of the rounds"
        )
        quarter = bench.rounds("search1", rounds // 4)
        for rung in (1, 2):
            found = bench.runs(f"search{rung}", entries, [_SEARCH_SEED], rung * quarter)
            entries = _best(found, entries, 3 - rung)
        pace = _Pace.of(found)  # of now: it may have become slower
    rounds = bench.rounds("runs", min(_MOST_ROUNDS, pace.rounds_until(end, len(SEEDS))))
    if rounds < _FEWEST_ROUNDS:
        needed = len(SEEDS) * (_FEWEST_ROUNDS * pace.of_rounds + pace.beside) / 60 / (1 - _RESERVE)
        allowed = f"at least {math.ceil(needed)}, by the first rounds on this machine"
        raise ConfigError("--minutes", minutes, allowed, hint="a second call goes on from here")
    notes.append(f"a round of all methods took {pace.of_rounds:.1f} s, so runs have {rounds} rounds")
    final: dict[str, list[Run]] = {}
    for count in range(len(bench.begun("runs").get("seeds", SEEDS[:1])), len(SEEDS) + 1):
        needed = time.monotonic() - start + pace.beside + rounds * pace.of_rounds
        if final and needed > 60 * minutes * _OVERTIME:
            notes.append(f"the minutes allowed {count - 1} of {len(SEEDS)} seeds: a second call adds the others")
            break
        final = bench.runs("runs", entries, SEEDS[:count], rounds)
    notes += [f"{name} failed: {reason}" for name, reason in bench.failed.items()]
    # a site that a seed leaves without training examples is missing in the runs of that seed alone
    methods = {method: replace(group_runs(runs)[0], runs=tuple(runs)) for method, runs in final.items()}
    left_out = {line for runs in final.values() for run in runs for line in run.info.get("clients_left_out", ())}
    notes += [f"left out of the runs of a seed: {line}" for line in sorted(left_out)]
    sparse = [method for method in _SPARSE if method in methods]
    shares, models = _files(methods, sparse, names, out / "models", notes)
    notes.append(f"all took {(time.monotonic() - start) / 60:.0f} minutes")
    summaries = {group.system: SYSTEMS[group.system].summary for group in methods.values()}
    return Advice(methods, summaries, names, epsilon, sparse, shares, models, notes, out / "runs.yaml")


def _entries(settings: ValueDict, num_sites: int, epsilon: float, notes: list[str]) -> Entries:
    """Return the settings that are tried, by method."""
    share: ValueDict = {"fraction-train": min(1.0, _MOST_SITES / num_sites)}
    plugins = ",".join([*names_in(settings), str(gallery_systems()["feddst"])])
    of_methods: dict[str, ValueDict] = {
        ALONE: {},
        "fedavg": share,
        FEDERATED: share,
        "dispfl": _GOSSIP,
        "feddst": {**share, "density": 0.5, "plugins": plugins},
    }
    if settings["dataset"] == "table" or epsilon:
        notes.append("Sub-FedAvg (Hy) prunes by BatchNorm, which networks for tables and for private training lack")
    else:
        of_methods["subfedavg-hy"] = share
        settings.setdefault("model", "auto-bn")  # one network for all methods, the one that Sub-FedAvg (Hy) needs
    entries = {
        method: [{"system": method, **own, "last-phase": True, "learning-rate": rate} for rate in _RATES]
        for method, own in of_methods.items()
    }
    if epsilon:
        dp = {"dp.enabled": True, "dp.target-epsilon": epsilon, "dp.accuracies": "open"}
        for method in _PRIVATE:
            entries[private(method)] = [{"system": method, **dp, "learning-rate": rate} for rate in _PRIVATE_RATES]
    return entries


@dataclass(frozen=True)
class _Pace:
    """The seconds of a round of each method, together, and of what is beside the rounds of a run of each."""

    of_rounds: float
    beside: float

    @classmethod
    def of(cls, runs_by_method: Mapping[str, Sequence[Run]]) -> Self:
        runs = [runs[-1] for runs in runs_by_method.values()]
        # the median: the first private run waits for the accountant's tables
        beside = [1 + run.info["seconds"] - sum(row["seconds"] for row in run.rounds) for run in runs]
        return cls(sum(run.rounds[-1]["seconds"] for run in runs), len(runs) * statistics.median(beside))

    def rounds_until(self, end: float, runs: float) -> int:
        """Return how many rounds each method has time for, in so many runs of them."""
        return int(((end - time.monotonic()) / runs - self.beside) / self.of_rounds)


def _best(found: Mapping[str, list[Run]], entries: Entries, count: int) -> Entries:
    """Return of each method so many settings, the best on validation data: a step of successive halving."""
    best: Entries = {}
    for method, runs in found.items():
        runs.sort(key=advice.validated, reverse=True)
        rates = [run.config["learning-rate"] for run in runs[:count]]
        best[method] = [entry for entry in entries[method] if entry["learning-rate"] in rates]
    return best


def _files(
    methods: Mapping[str, Group], sparse: Sequence[str], names: Sequence[str], folder: Path, notes: list[str]
) -> tuple[dict[str, str], list[tuple[str, Path]]]:
    """Write each site's model of the method that is best on validation data; measure a file of each sparse method."""
    shares: dict[str, str] = {}
    models: list[tuple[str, Path]] = []
    folder.mkdir(parents=True, exist_ok=True)

    def write(method: str, client: int, path: Path) -> str:
        run = methods[method].first
        _, full, small = export_model(run.folder, client, "onnx", path, force=True, trusted=names_in(run.config))
        size, time_taken = small.file_bytes / full.file_bytes, small.milliseconds[1] / full.milliseconds[1]
        return f"; ONNX file: {size:.0%} of the bytes, {time_taken:.0%} of the time"

    open_methods = [method for method, group in methods.items() if method == group.system]
    best = max(open_methods, key=lambda method: advice.validation_of(methods[method]))
    used = {f"{method}-{SEEDS[0]}" for method in sparse}
    try:
        for method in sparse:
            shares[method] = write(method, 0, folder / f"{method}-{SEEDS[0]}.onnx")
        for client, name in list(enumerate(names))[:_MOST_FILES]:
            stem = re.sub(r"[^\w.-]+", "_", name)[:60]
            while stem.lower() in used:
                stem += f"-{client}"
            used.add(stem.lower())
            path = folder / f"{stem}.onnx"
            write(best, client, path)
            models.append((name, path))
        notes.append(f"the sites' models are of {best}, the best by validation accuracy, seed {SEEDS[0]}")
    except ValueError as error:
        notes.append(f"not all models were written: {error}")
    return shares, models
