"""The data behind docs/evidence.md, and a part of docs/results.md: finished runs become rows, and rows become tables.

    python benchmarks/evidence.py left dispfl-scarce configs/matrices/dispfl_scarce.yaml --out left
        # a matrix for each seed, with what has no row yet
    python benchmarks/evidence.py add dispfl-scarce runs/scarce/*     # rows of finished runs, each once
    python benchmarks/evidence.py write                               # the tables between the pages' marks

A run is a row of docs/data/evidence/NAME.csv, with its settings, hash and commit; NAME.clients.csv has the accuracies
of each client after the last round, and NAME.rounds.csv the course of the run. A claim compares two settings: client by
client of the same seed, with a paired bootstrap over all pairs, and seed by seed. For language models test texts take
the place of clients, and the negative logarithm of perplexity that of accuracy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from _rows import append_rows, read_rows, with_tables

from fedprune_app.config import DEFAULTS, OPTIONS
from fedprune_app.matrices import Matrix, matrix_of
from fedprune_app.results.differences import Difference, Paired, difference
from fedprune_app.results.measures import MEGABYTE
from fedprune_app.results.reader import Run, load_run

ROOT = Path(__file__).parents[1]
DATA, PAGES = ROOT / "docs" / "data" / "evidence", (ROOT / "docs" / "evidence.md", ROOT / "docs" / "results.md")
Row = dict[str, str]
COLUMNS = (
    "system", "settings", "seed", "clients", "rounds", "personal", "worst_decile", "received", "global",
    "megabytes_up", "megabytes_down", "peer_megabytes", "busiest_megabytes_per_round", "teraflops", "minutes",
    "final_sha256", "git_hash",
)  # fmt: skip


MEASURES = ("personal", "received")


@dataclass(frozen=True)
class Claim:
    """A claim says that ``better`` beats ``worse``, or with ``margin`` that it is no more than so many points behind.

    Both are settings that a row must have, such as ``{"system": "dispfl", "density": 0.5}``. ``seeds`` is the number of
    seeds that was decided on before the first run. ``measure`` says what a client tests: its ``personal`` model, or the
    ``received`` one. ``worse_measure`` does so for ``worse``, where that differs.
    """

    name: str
    source: str
    text: str
    data: str
    better: Mapping[str, Any]
    worse: Mapping[str, Any]
    seeds: int = 3
    margin: float = 0.0
    measure: str = "personal"
    worse_measure: str = ""


def _dispfl(**more: Any) -> dict[str, Any]:
    return {"system": "dispfl", **{key.replace("_", "."): value for key, value in more.items()}}


def _subfedavg(target: float) -> dict[str, Any]:
    return {"system": "subfedavg", "subfedavg.target-rate": target}


def _fedp3(density: float, layer_set: str = "lowerb", **more: Any) -> dict[str, Any]:
    return {"system": "fedp3", "density": density, "fedp3.layer-set": layer_set, **more}


def _fedltp(**more: Any) -> dict[str, Any]:
    return {"system": "fedltp", **{f"fedltp.{key}": value for key, value in more.items()}}


def _fedspallm(density: float, segments: int, merge: str = "mean", **more: Any) -> dict[str, Any]:
    options = {"segments": segments, "merge": merge, **more}
    return {"system": "fedspallm", "density": density, **{f"fedspallm.{key}": value for key, value in options.items()}}


def _of_language(name: str, source: str, text: str, better: Mapping[str, Any], **more: Any) -> Claim:
    """A claim about perplexity: the global model against the clients' own of the same run, or as ``more`` says."""
    how = {"worse": better, "worse_measure": "personal", **more}
    return Claim(name, source, text, LANGUAGE, better, seeds=5, measure="received", **how)


SCARCE, DPSGD_FT = "dispfl-scarce", {"system": "dpsgd-ft"}
ROUNDS, LAYERS, PRIVATE, LANGUAGE = "subfedavg-rounds", "fedp3-layers", "fedltp-rounds", "fedspallm-merges"
TEXTS = ("ptb", "stdlib", "wikitext-2")
COMMON = frozenset(
    {
        "dispfl.neighbours", "dpsgd.neighbours",
        "fedltp.public-dataset", "fedltp.tickets", "fedltp.ticket-iterations", "fedltp.validators",
        "fedspallm.deal", "fedspallm.block-size", "fedspallm.segment-length", "fedspallm.window",
        "fedspallm.test-windows", "fedspallm.evaluate-own",
    }
)  # fmt: skip
"""These settings of systems do not tell the rows of a data file apart."""
MERGES = {
    "the paper's mean": {"fedspallm.merge": "mean"},
    "least squares": {"fedspallm.merge": "least-squares"},
    "Hessians": {"fedspallm.merge": "hessians"},
    "Hessians, refined": {"fedspallm.merge": "hessians", "fedspallm.refine": True},
    "Hessians, refined, then recovery": {
        "fedspallm.merge": "hessians", "fedspallm.refine": True, "fedspallm.recovery-rounds": 1,
        "fedspallm.recovery-segments": 512, "fedspallm.recovery-steps": 32, "fedspallm.recovery-learning-rate": 0.001,
    },
}  # fmt: skip
"""The ways to make a layer that :func:`cells_table` compares."""
CELLS = tuple(product((4, 8, 16), (2, 32), (0.4, 0.2)))
"""The numbers of clients and of segments, and the density, of which a cell is."""
ELSEWHERE = ("seed", "data-dir", "fedltp.public-data-dir", "fedspallm.evaluation-texts")
CAPACITIES = "0.2 0.4 0.7 1.0"
ONE_SHOT = _fedltp(pruning="one-shot") | {"density": 0.53}
ITERATIVE = _fedltp(pruning="iterative", **{"further-pruned": 0.2}) | {"density": 0.99}
CLAIMS = (
    Claim(
        "1a", "Dis-PFL, Table 1", "Dis-PFL at density 0.5 is more accurate than training alone", SCARCE,
        _dispfl(density=0.5), {"system": "standalone"},
    ),
    Claim(
        "1b", "Dis-PFL, Table 1", "D-PSGD-FT is more accurate than training alone", SCARCE,
        DPSGD_FT, {"system": "standalone"},
    ),
    Claim(
        "1c", "Dis-PFL, Tables 1 and 3",
        "Dis-PFL at density 0.5, with half the traffic, is at most one point behind D-PSGD-FT", SCARCE,
        _dispfl(density=0.5), DPSGD_FT, margin=1.0,
    ),
    Claim(
        "1d", "Dis-PFL, Figure 4", "Dis-PFL at density 0.8 is at most one point behind D-PSGD-FT", SCARCE,
        _dispfl(density=0.8), DPSGD_FT, margin=1.0,
    ),
    Claim(
        "1e", "Dis-PFL, Algorithm 2", "Growth by gradient is more accurate than growth at random, density 0.5", SCARCE,
        _dispfl(density=0.5), _dispfl(density=0.5, dispfl_growth="random"),
    ),
    Claim(
        "2a", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 30 % is more accurate than training alone", ROUNDS,
        _subfedavg(30.0), {"system": "standalone"},
    ),
    Claim(
        "2b", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 50 % is at most half a point behind training alone", ROUNDS,
        _subfedavg(50.0), {"system": "standalone"}, margin=0.5,
    ),
    Claim(
        "2c", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 50 % is more accurate than LG-FedAvg", ROUNDS,
        _subfedavg(50.0), {"system": "lg-fedavg"},
    ),
    Claim(
        "2d", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 70 % is at most three points behind 30 %", ROUNDS,
        _subfedavg(70.0), _subfedavg(30.0), margin=3.0,
    ),
    Claim(
        "2e", "not in the paper", "Sub-FedAvg (Un) at 30 % is more accurate than FedAvg's clients after local training",
        ROUNDS, _subfedavg(30.0), {"system": "fedavg"},
    ),
    Claim(
        "3a", "FedP3, Figure 4", "With one layer per client, accuracy falls from density 1.0 to 0.9", LAYERS,
        _fedp3(1.0), _fedp3(0.9),
    ),
    Claim(
        "3b", "FedP3, Figure 4", "With one layer per client, accuracy falls from density 1.0 to 0.5", LAYERS,
        _fedp3(1.0), _fedp3(0.5),
    ),
    Claim(
        "3c", "FedP3, Figure 2",
        "FedP3 with three layers per client (OPU3) at 0.9 is at most two points behind FedAvg", LAYERS,
        _fedp3(0.9, "opu3"), {"system": "fedavg"}, margin=2.0,
    ),
    Claim(
        "3d", "FedP3, Figure 2",
        "Three layers per client (OPU3) are more accurate than one (LowerB), density 0.9", LAYERS,
        _fedp3(0.9, "opu3"), _fedp3(0.9),
    ),
    Claim(
        "3e", "not in the paper", "Layers by what a client can hold are more accurate than one layer each, density 0.9",
        LAYERS, _fedp3(0.9, "capacity", **{"fedp3.capacities": CAPACITIES}), _fedp3(0.9),
    ),
    Claim(
        "4a", "Fed-LTP, Table 3", "Fed-LTP's one-shot tickets are more accurate than DP-Fed, at equal noise", PRIVATE,
        ONE_SHOT, {"system": "dpfed"}, measure="received",
    ),
    Claim(
        "4b", "Fed-LTP, Table 3",
        "Fed-LTP's one-shot tickets are more accurate than Fed-SPA with p = 1, at equal noise", PRIVATE,
        ONE_SHOT, {"system": "fedspa", "fedspa.share": 1.0}, measure="received",
    ),
    Claim(
        "4c", "Fed-LTP, Table 3", "Iterative pruning, averaged over the holders, is at most two points behind one-shot",
        PRIVATE, ITERATIVE, ONE_SHOT, margin=2.0, measure="received",
    ),
    Claim(
        "4d", "Fed-LTP, Algorithm 2",
        "Iterative pruning is more accurate with line 9 as printed, divided by K, than averaged over the holders",
        PRIVATE,
        ITERATIVE | {"fedltp.average": "participants"}, ITERATIVE, measure="received",
    ),
    _of_language(
        "5a", "FedSpaLLM, Tables 1-3",
        "With 2 segments per client, the global model is better than the clients' own, 70 %",
        _fedspallm(0.3, 2),
    ),
    _of_language(
        "5b", "FedSpaLLM, Tables 1-3",
        "With 32 segments per client, the global model is better than the clients' own, 70 %",
        _fedspallm(0.3, 32),
    ),
    _of_language(
        "5c", "FedSpaLLM, Tables 1-3",
        "With 32 segments per client, the global model is better than the clients' own, 80 %",
        _fedspallm(0.2, 32),
    ),
    _of_language(
        "5d", "not in the paper",
        "Pruned by Hessians, the global model is better than by the mean, 32 segments, 50 %",
        _fedspallm(0.5, 32, "hessians", refine=True), worse=_fedspallm(0.5, 32), worse_measure="received",
    ),
    _of_language(
        "5e", "not in the paper",
        "Pruned by Hessians, the global model is better than by the mean, 32 segments, 80 %",
        _fedspallm(0.2, 32, "hessians", refine=True), worse=_fedspallm(0.2, 32), worse_measure="received",
    ),
    _of_language(
        "5f", "not in the paper",
        "Pruned by Hessians, the global model is better than the clients' own, 32 segments, 50 %",
        _fedspallm(0.5, 32, "hessians", refine=True), worse=_fedspallm(0.5, 32),
    ),
)  # fmt: skip


# --- from runs to rows ----------------------------------------------------------------------------------------------


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not the default, and change what is computed, but for the seed and places of files."""
    given = {key: value for key, value in config.items() if key in OPTIONS and OPTIONS[key].changes_results}
    return {key: value for key, value in given.items() if value != DEFAULTS[key] and key not in ELSEWHERE}


def row_of(run: Run) -> Row:
    """One finished run as a row; ``ValueError`` for one that did not complete."""
    if run.info["status"] != "completed":
        raise ValueError(f"{run.folder} is {run.info['status']}, allowed: a run that has completed")
    rows = run.rounds

    def total(key: str, scale: float = MEGABYTE) -> float:
        return sum(row.get(key) or 0 for row in rows) / scale

    settings = settings_of(run.config)
    found = {
        "system": run.info["system"],
        "settings": json.dumps(settings, sort_keys=True),
        "seed": run.seed,
        "clients": len(run.info["partition"]),
        "rounds": run.info["rounds_completed"],
        "personal": _percent(run.last("accuracy_personal_mean")),
        "worst_decile": _percent(run.last("accuracy_personal_worst_decile")),
        "received": _percent(run.last("accuracy_received_mean")),
        "global": _percent(run.last("accuracy_global")),
        "megabytes_up": f"{total('bytes_up'):.2f}",
        "megabytes_down": f"{total('bytes_down'):.2f}",
        "peer_megabytes": f"{total('peer_bytes'):.2f}",
        "busiest_megabytes_per_round": f"{total('busiest_node_bytes') / max(1, len(rows)):.4f}",
        "teraflops": f"{total('flops', 1e12):.2f}",
        "minutes": f"{run.info['seconds'] / 60:.1f}",
        "final_sha256": run.info["final_sha256"],
        "git_hash": run.info["git_hash"] or "",
    }
    return {key: str(found[key]) for key in COLUMNS}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _texts_of(run: Run) -> list[Row]:
    """What a run of language models says of each test text; texts take the place of clients, numbered as in TEXTS."""
    by_text = run.rounds[-1].get("perplexity_by_text") or {}
    return [
        {
            "client": str(TEXTS.index(text)),
            "personal": _number(None if found["personal_mean"] is None else -math.log(found["personal_mean"])),
            "received": _number(-math.log(found["global"])),
        }
        for text, found in sorted(by_text.items())
    ]


def add(name: str, folders: Iterable[Path]) -> int:
    """Add the runs that are not yet rows, and return how many there were."""
    known = {row["final_sha256"] + row["settings"] for row in read(name)}
    added = 0
    for folder in folders:
        run = load_run(folder)
        row = row_of(run)
        if row["final_sha256"] + row["settings"] in known:
            continue
        known.add(row["final_sha256"] + row["settings"])
        key = {"system": row["system"], "settings": row["settings"], "seed": row["seed"]}
        last = max((each["round"] for each in run.clients if each.get("accuracy_personal") is not None), default=0)
        clients = [
            {**key, "client": str(each["partition"]), **{name: _number(each[f"accuracy_{name}"]) for name in MEASURES}}
            for each in run.clients
            if each["round"] == last and each.get("accuracy_personal") is not None
        ] or [{**key, **text} for text in _texts_of(run)]
        course = [
            {**key, "round": str(each["round"]), "personal": _percent(each["accuracy_personal_mean"])}
            for each in run.rounds
            if each.get("accuracy_personal_mean") is not None
        ]
        _append(name, [row])
        _append(f"{name}.clients", clients)
        _append(f"{name}.rounds", course)
        added += 1
    return added


def left(name: str, path: Path) -> dict[int, dict[str, Any]]:
    """By seed: the matrix of a file with those systems alone of which the data file lacks a row."""
    document = yaml.safe_load(path.read_text())
    matrix = matrix_of(document, path)
    assert isinstance(matrix, Matrix)
    known = {(row["settings"], row["seed"]) for row in read(name)}
    found: dict[int, dict[str, Any]] = {}
    asked = product(document["systems"], document["datasets"], document["seeds"])  # the order of the cells
    for (system, _, seed), cell in zip(asked, matrix.cells(path.parent, {}, resume=False), strict=True):
        if (json.dumps(settings_of(cell.config.to_dict()), sort_keys=True), str(seed)) in known:
            continue
        systems = found.setdefault(seed, {**document, "systems": [], "seeds": [seed]})["systems"]
        if system not in systems:
            systems.append(system)
    return found


def _append(name: str, rows: Sequence[Row]) -> None:
    append_rows(DATA / f"{name}.csv", rows)


def read(name: str) -> list[Row]:
    """The rows of a data file, none where there is no file."""
    return read_rows(DATA / f"{name}.csv")


# --- from rows to the page ------------------------------------------------------------------------------------------


def chosen(rows: Iterable[Row], wanted: Mapping[str, Any]) -> list[Row]:
    """The rows of a system with these settings; a table's setting that is not wanted is at its default."""
    found = []
    for row in rows:
        settings = {**json.loads(row["settings"]), "system": row["system"]}
        own = {key for key in settings if key.partition(".")[0] == row["system"]} - COMMON
        if all(settings.get(key, DEFAULTS.get(key)) == value for key, value in wanted.items()) and own <= {*wanted}:
            found.append(row)
    return found


def paired(name: str, rows: Sequence[Row], measure: str) -> Paired:
    """By seed and client: the accuracies of the rows' clients by this measure."""
    wanted = {(row["settings"], row["system"], row["seed"]) for row in rows}
    return {
        (int(row["seed"]), int(row["client"])): float(row[measure])
        for row in read(f"{name}.clients")
        if (row["settings"], row["system"], row["seed"]) in wanted and row[measure]
    }


def verdict(claim: Claim, apart: Difference | None, by_seed: Sequence[float]) -> str:
    """Shown or refuted where the interval and every seed say so, else undecided; open while seeds are missing."""
    if apart is None or len(by_seed) < claim.seeds:
        return f"open: {len(by_seed)} of {claim.seeds} seeds"
    floor = -claim.margin / 100
    if apart.low > floor and min(by_seed) > floor:
        return "shown"
    if apart.high < floor and max(by_seed) < floor:
        return "refuted"
    return "undecided"


def compared(claim: Claim) -> tuple[Difference | None, list[float]]:
    """How far ``better`` is ahead, and the mean of each seed that both have."""
    rows = read(claim.data)
    first = paired(claim.data, chosen(rows, claim.better), claim.measure)
    second = paired(claim.data, chosen(rows, claim.worse), claim.worse_measure or claim.measure)
    seeds = sorted({seed for seed, _ in first} & {seed for seed, _ in second})
    means = []
    for seed in seeds:
        both = [key for key in first if key[0] == seed and key in second]
        means.append(sum(first[key] - second[key] for key in both) / len(both))
    return difference(first, second), means


def claims_table() -> str:
    """All claims with their differences and verdicts."""
    lines = [
        "| | claim | from | difference, points | 95 % | by seed | verdict |",
        "| --- | --- | --- | ---: | --- | --- | --- |",
    ]
    for claim in CLAIMS:
        apart, by_seed = compared(claim)
        numbers = ("–", "–", "–")
        if apart is not None:
            interval = f"{100 * apart.low:+.2f} to {100 * apart.high:+.2f}"
            numbers = f"{100 * apart.mean:+.2f}", interval, ", ".join(f"{100 * mean:+.2f}" for mean in by_seed)
        cells = [claim.name, claim.text, claim.source, *numbers, verdict(claim, apart, by_seed)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def runs_table(name: str) -> str:
    """All rows of a data file, with those settings in which the rows of one system differ."""
    rows = sorted(read(name), key=lambda row: (row["system"], row["settings"], int(row["seed"])))
    lines = [
        "| system | settings | seed | personal | worst tenth | received | busiest node, MB/round | minutes |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    numbers = ("seed", "personal", "worst_decile", "received", "busiest_megabytes_per_round", "minutes")
    for row in rows:
        of_system = [json.loads(other["settings"]) for other in rows if other["system"] == row["system"]]
        keys = sorted({key for settings in of_system for key in settings})
        values = {key: {json.dumps(each.get(key, DEFAULTS[key])) for each in of_system} for key in keys}
        own = json.loads(row["settings"])
        differing = [f"`{key}={own.get(key, DEFAULTS[key])}`" for key in keys if len(values[key]) > 1]
        cells = [row["system"], ", ".join(differing) or "–", *(row[number] or "–" for number in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def texts_table(name: str) -> str:
    """The perplexity of the global model and of the clients' own, by test text, for runs of language models."""
    rows = sorted(read(name), key=lambda row: (row["settings"], int(row["seed"])))
    by_run: dict[tuple[str, str], dict[int, str]] = {}
    for row in read(f"{name}.clients"):
        both = [f"{math.exp(-float(row[each])):.2f}" if row[each] else "–" for each in ("received", "personal")]
        by_run.setdefault((row["settings"], row["seed"]), {})[int(row["client"])] = " / ".join(both)
    lines = [
        f"| merge | density | segments | seed | {' | '.join(TEXTS)} | MB up | minutes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        own = {**DEFAULTS, **json.loads(row["settings"])}
        found = by_run[row["settings"], row["seed"]]
        texts = [found.get(number, "–") for number in range(len(TEXTS))]
        about = [own["fedspallm.merge"], own["density"], own["fedspallm.segments"], row["seed"]]
        lines.append(f"| {' | '.join(map(str, [*about, *texts, row['megabytes_up'], row['minutes']]))} |")
    return "\n".join(lines)


def cells_table(text: str) -> str:
    """The perplexities on one test text, by numbers of clients and segments and by what is kept, of each of MERGES.

    A cell is the mean of the seeds, with their standard deviation. The least value of a line is bold.
    """
    ways = ("standalone", *MERGES)
    lines = [
        f"| clients | segments | kept | seeds | {' | '.join(ways)} |",
        f"| ---: | ---: | ---: | ---: |{' ---: |' * len(ways)}",
    ]
    for clients, segments, density in CELLS:
        values = {
            way: [math.exp(-each) for (_, number), each in found.items() if TEXTS[number] == text]
            for way, found in _of_all_ways(clients, segments, density).items()
        }
        seeds = {len(each) for each in values.values()} - {0}
        if not seeds:
            continue
        best = min(fmean(each) for each in values.values() if each)
        cells = [_cell(values[way], best) for way in ways]
        number = str(min(seeds)) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
        lines.append(f"| {clients} | {segments} | {density:.0%} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def wins_table() -> str:
    """How often each of MERGES has a lower perplexity than others, over all cells, test texts and seeds."""
    against = ("standalone", "the paper's mean", "Hessians")
    won = {way: dict.fromkeys(against, 0) for way in MERGES}
    held = {way: dict.fromkeys(against, 0) for way in MERGES}
    for cell in CELLS:
        found = _of_all_ways(*cell)
        for way, other in product(MERGES, against):
            both = found[way].keys() & found[other].keys()
            held[way][other] += len(both)
            won[way][other] += sum(found[way][key] > found[other][key] for key in both)
    lines = [
        f"| better than | {' | '.join(against)} |",
        f"| --- |{' ---: |' * len(against)}",
    ]
    for way in MERGES:
        cells = [f"{won[way][other]} of {held[way][other]}" if way != other else "–" for other in against]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_all_ways(clients: int, segments: int, density: float) -> dict[str, Paired]:
    """By seed and text the values of the clients' own models, and of each of MERGES."""
    name = f"fedspallm-{clients}"
    rows = read(name)
    of = {way: chosen(rows, {**_fedspallm(density, segments), **merge}) for way, merge in MERGES.items()}
    alone = paired(name, of["the paper's mean"], "personal")
    return {"standalone": alone, **{way: paired(name, found, "received") for way, found in of.items()}}


def _cell(values: Sequence[float], best: float) -> str:
    if not values:
        return "–"
    mean = f"{fmean(values):.2f}"
    if fmean(values) == best:
        mean = f"**{mean}**"
    return f"{mean} ± {stdev(values):.2f}" if len(values) > 1 else mean


def written(text: str) -> str:
    """The page with its tables made anew."""

    def made(name: str) -> str:
        tables = {"runs": runs_table, "texts": texts_table, "cells": cells_table}
        kind, _, about = name.partition(" ")
        whole = {"claims": claims_table, "wins": wins_table}
        return whole[kind]() if kind in whole else tables[kind](about)

    return with_tables(text, r"claims|wins|(?:runs|texts|cells) [\w-]+", made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add")
    adding.add_argument("name")
    adding.add_argument("runs", nargs="+", type=Path)
    leaving = commands.add_parser("left")
    leaving.add_argument("name")
    leaving.add_argument("matrix", type=Path)
    leaving.add_argument("--out", type=Path, required=True, help="the folder for a matrix of each seed")
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "left":
        given.out.mkdir(parents=True, exist_ok=True)
        for seed, document in left(given.name, given.matrix).items():
            file = given.out / f"{given.name}-seed{seed}.yaml"
            file.write_text(yaml.safe_dump(document, sort_keys=False))
            print(f"{file}: {len(document['systems'])} runs")
        return
    if given.command == "add":
        print(f"{add(given.name, given.runs)} rows added")
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
