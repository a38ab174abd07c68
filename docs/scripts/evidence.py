"""The data behind docs/evidence.md and the systems' pages: finished runs become rows, and rows become tables.

    python docs/scripts/evidence.py left dispfl-scarce --out left    # a matrix for each seed, of runs without a row
    python docs/scripts/evidence.py add dispfl-scarce runs/scarce/*  # rows of finished runs, each once
    python docs/scripts/evidence.py write                            # the tables of pages and docs/data, and figures

A run is a row of docs/data/evidence/NAME.csv, with its settings, hash and commit; NAME.clients.csv.gz has the
accuracies of each client after the last round, and NAME.rounds.csv.gz the course of the run. A claim compares two
settings, client by client of the same seed. Student's t interval of the seeds' means decides it: the clients of a seed
share a system, so a bootstrap over them speaks of these seeds alone. For language models test texts take the place of
clients, and the negative logarithm of perplexity that of accuracy.

Some tables are too long for a page: docs/data/tables has them. The other tables there were typed by hand from runs and
benchmarks that have no rows; a page shows some of their columns.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import _evidence_figures as drawn
import yaml
from _claims import (
    CELLS,
    CLAIMS,
    COMMON,
    ELSEWHERE,
    FEDAVG_FT,
    FIVE_HUNDRED,
    IN_PAPER,
    LANGUAGE,
    LEVEL,
    MARGIN,
    MATRICES,
    MERGES,
    OURS,
    SCARCE,
    SECTIONS,
    TEN,
    TEXTS,
    TUNED,
    TUNED_AGAIN,
    TUNED_GALLERY,
    TUNED_LAST,
    WATCH,
    Claim,
    of_merge,
)
from _rows import append_rows, as_csv, read_rows, with_tables
from _verdicts import chance, holm
from matplotlib.figure import Figure
from scipy.special import stdtrit

from fedprune_app.config import DEFAULTS, OPTIONS
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.results.differences import Difference, Paired, difference
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import Run, load_run
from fedprune_app.sweeps.matrix import matrix_of

ROOT = Path(__file__).parents[2]
DATA, FIGURES = ROOT / "docs" / "data" / "evidence", ROOT / "docs" / "assets" / "evidence"
TABLES = ROOT / "docs" / "data" / "tables"
SYSTEMS = ("dispfl", "subfedavg", "fedp3", "fedltp", "fedspallm")
NAMES = ("evidence", "choosing", "results", "speed", "privacy", *(f"systems/{system}" for system in SYSTEMS))
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in NAMES)
Row = dict[str, str]
COLUMNS = (
    "system", "settings", "seed", "clients", "rounds", "personal", "worst_decile", "received", "global", "kept",
    "megabytes_up", "megabytes_down", "peer_megabytes", "busiest_megabytes_per_round", "teraflops", "minutes",
    "final_sha256", "git_hash",
)  # fmt: skip


DECLARATIONS = ("personal", "received")
LAST = ("last_phase", "last_megabytes_down", "last_megabytes_up", "last_teraflops")
"""More columns of runs whose clients all train once more in the end; clients have the first one."""


# --- from runs to rows ----------------------------------------------------------------------------------------------


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not the default, and change what is computed, but for the seed and places of files.

    All options of a plug-in are among them, whose defaults are not known here, and none that an earlier version had.
    """
    of_plugins = {key for key in config if "." in key and key.partition(".")[0] not in SYSTEMS}
    known = {key: value for key, value in config.items() if key in OPTIONS or key in of_plugins}
    given = {key: value for key, value in known.items() if key not in OPTIONS or OPTIONS[key].changes_results}
    return {key: value for key, value in given.items() if value != DEFAULTS.get(key) and key not in ELSEWHERE}


def row_of(run: Run) -> Row:
    """One finished run as a row; ``ValueError`` for one that is not whole, or not of all clients in the end."""
    if run.flaw:
        raise ValueError(f"{run.folder} is {run.flaw}, allowed: a run that has completed and lost nothing")
    rows, clients = run.rounds, len(run.info["partition"])
    if (evaluated := run.last("evaluated")) is not None and evaluated < clients:
        raise ValueError(f"{run.folder}: the last evaluation has {evaluated:.0f} clients, allowed: all {clients}")

    def total(key: str, scale: float = MEGABYTE) -> float:
        return sum(row.get(key) or 0 for row in rows) / scale

    settings = settings_of(run.config)
    found = {
        "system": run.info["system"],
        "settings": json.dumps(settings, sort_keys=True),
        "seed": run.seed,
        "clients": clients,
        "rounds": run.info["rounds_completed"],
        "personal": _percent(run.last("accuracy_personal_mean")),
        "worst_decile": _percent(run.last("accuracy_personal_worst_decile")),
        "received": _percent(run.last("accuracy_received_mean")),
        "global": _percent(run.last("accuracy_global")),
        "kept": _number(run.last("density_mean")),
        "megabytes_up": f"{total('bytes_up'):.2f}",
        "megabytes_down": f"{total('bytes_down'):.2f}",
        "peer_megabytes": f"{total('peer_bytes'):.2f}",
        "busiest_megabytes_per_round": f"{total('busiest_node_bytes') / max(1, len(rows)):.4f}",
        "teraflops": f"{total('flops', 1e12):.2f}",
        "minutes": f"{run.info['seconds'] / 60:.1f}",
        "final_sha256": run.info["final_sha256"],
        "git_hash": run.info["git_hash"] or "",
    }
    if not run.config.get("last-phase"):
        return {key: str(found[key]) for key in COLUMNS}
    last = rows[-1]
    costs = (last["last_phase_bytes_down"], last["last_phase_bytes_up"], last["last_phase_flops"] or 0)
    spent = (f"{cost / unit:.2f}" for cost, unit in zip(costs, (MEGABYTE, MEGABYTE, 1e12), strict=True))
    found |= zip(LAST, (_percent(last["accuracy_last_phase_mean"]), *spent), strict=True)
    return {key: str(found[key]) for key in (*COLUMNS, *LAST)}


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
    """Add the runs that are not yet rows, and return how many there were.

    A seed has one row of the same settings: its repetition is left out. Raises ``ValueError`` as :func:`row_of`.
    """
    known = {(row["settings"], row["seed"]) for row in read(name)}
    added = 0
    for folder in folders:
        run = load_run(folder)
        row = row_of(run)
        if (row["settings"], row["seed"]) in known:
            continue
        known.add((row["settings"], row["seed"]))
        key = {"system": row["system"], "settings": row["settings"], "seed": row["seed"]}
        last = max((each["round"] for each in run.clients if each.get("accuracy_personal") is not None), default=0)
        measures = (*DECLARATIONS, LAST[0]) if run.config.get("last-phase") else DECLARATIONS
        clients = [
            {**key, "client": str(each["partition"]), **{name: _number(each[f"accuracy_{name}"]) for name in measures}}
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
        _append(f"{name}.spent", [{**key, **point} for point in _spent(run)])
        added += 1
    return added


def _spent(run: Run) -> list[Row]:
    """What a private run has spent and reached, by round: the largest ε, megabytes of training, the received model."""
    rows = run.rounds
    megabytes = accumulate((row["bytes_up"] + row["bytes_down"]) / MEGABYTE for row in rows)
    return [
        {
            "round": str(row["round"]),
            "epsilon": _number(row["epsilon_max"]),
            "megabytes": f"{spent:.2f}",
            "received": _percent(row["accuracy_received_mean"]),
        }
        for row, spent in zip(rows, megabytes, strict=True)
        if row.get("epsilon_max") is not None and row.get("accuracy_received_mean") is not None
    ]


def matrices_of(name: str) -> list[Path]:
    """The files of the matrices whose runs are the rows of a data file."""
    return [ROOT / "configs" / "matrices" / f"{matrix}.yaml" for matrix in MATRICES[name]]


def missing(name: str, path: Path) -> list[tuple[Any, int, str]]:
    """The runs of a matrix' file of which the data file lacks a row: the system as the file says, seed, settings."""
    document = yaml.safe_load(path.read_text())
    matrix = matrix_of(document, path)
    known = {(row["settings"], row["seed"]) for row in read(name)}
    asked = product(document["systems"], document["datasets"], document["seeds"])  # the order of the cells
    found = []
    for (system, _, seed), cell in zip(asked, matrix.cells(RunInputs(out=path.parent)), strict=True):
        settings = json.dumps(settings_of(cell.config.to_dict()), sort_keys=True)
        if (settings, str(seed)) not in known:
            found.append((system, seed, settings))
    return found


def left(name: str, path: Path) -> dict[int, dict[str, Any]]:
    """By seed: the matrix of a file with those systems alone of which the data file lacks a row."""
    document = yaml.safe_load(path.read_text())
    found: dict[int, dict[str, Any]] = {}
    for system, seed, _ in missing(name, path):
        systems = found.setdefault(seed, {**document, "systems": [], "seeds": [seed]})["systems"]
        if system not in systems:
            systems.append(system)
    return found


def _path(name: str) -> Path:
    """A data file; the long ones, of clients and rounds, are compressed."""
    return DATA / (f"{name}.csv.gz" if "." in name else f"{name}.csv")


def _append(name: str, rows: Sequence[Row]) -> None:
    if rows:  # language models have no course
        append_rows(_path(name), rows)


def read(name: str) -> list[Row]:
    """The rows of a data file, none where there is no file."""
    return read_rows(_path(name))


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


def verdict(claim: Claim, apart: Difference | None) -> str:
    """What the seeds' t interval says; a claim is open where it holds the limit, and while seeds are missing."""
    seeds = 0 if apart is None else len(apart.by_seed)
    if apart is None or seeds < claim.seeds:
        return f"open: {seeds} of {claim.seeds} seeds"
    if apart.low > claim.floor:
        return "shown"
    return "does not hold here" if apart.high < claim.floor else "open"


def within(claim: Claim, apart: Difference) -> tuple[float, float]:
    """The 90 % interval of the seeds' means. Where it lies within a margin, two one-sided tests at 5 % pass."""
    freedom, half = len(apart.by_seed) - 1, (apart.high - apart.low) / 2
    half *= float(stdtrit(freedom, 0.95) / stdtrit(freedom, 0.975))
    return apart.mean - half, apart.mean + half


def level_table() -> str:
    """The claims whose mean is near their limit: is the difference within :data:`MARGIN`, either way?"""
    lines = ["| claim | difference | 90 % | within ± 1 point |", "| --- | ---: | --- | --- |"]
    for claim in (claim for claim in CLAIMS if claim.name in LEVEL):
        apart = compared(claim)
        if apart is None or len(apart.by_seed) < claim.seeds:
            continue
        low, high = (100 * bound for bound in within(claim, apart))
        said = "level" if max(-low, high) < MARGIN else "open"
        lines.append(f"| {claim.name} | {100 * apart.mean:+.2f} | {low:+.2f} to {high:+.2f} | {said} |")
    return "\n".join(lines)


def left_by_holm() -> tuple[set[str], int]:
    """The names of the claims that Holm's correction leaves at 5 %, and of how many tests it is."""
    found = [(claim, apart) for claim in CLAIMS if (apart := compared(claim)) and len(apart.by_seed) >= claim.seeds]
    return holm({claim.name: chance(apart, claim.floor) for claim, apart in found}), len(found)


def compared(claim: Claim, *, of_other_seeds: bool = True) -> Difference | None:
    """How far ``better`` is ahead, with the interval for other seeds or for these alone.

    Rows of other seeds than the claim's do not count.
    """
    rows = [row for row in read(claim.data) if claim.counts(row)]
    first = paired(claim.data, chosen(rows, claim.better), claim.measure)
    second = paired(claim.data, chosen(rows, claim.worse), claim.worse_measure or claim.measure)
    return difference(first, second, of_other_seeds=of_other_seeds)


def claims_table(*, whole: bool = False) -> str:
    """Claims with differences and verdicts.

    The ``whole`` table has more columns, and the claims that lack runs or are in the file alone.
    """
    more = ["in these seeds", "by seed", "from", "known before"] if whole else []
    interval = ["difference", "95 %"] if whole else ["difference (95 %)"]
    lines = [
        f"| {' | '.join(['', 'claim', 'in the paper', *interval, 'verdict', *more])} |",
        f"| --- | --- | ---: |{' ---: |' * len(interval)} --- |{' --- |' * len(more)}",
    ]
    strong, tests = left_by_holm()
    verdicts, superseded, ranked = [], 0, 0
    for claim in CLAIMS:
        apart, of_these = compared(claim), compared(claim, of_other_seeds=False)
        said, numbers = verdict(claim, apart), ["–"] * 4
        if apart is not None and of_these is not None:
            wide = apart if len(apart.by_seed) > 1 else None
            intervals = [
                f"{100 * each.low:+.2f} to {100 * each.high:+.2f}" if each else "–" for each in (wide, of_these)
            ]
            by_seed = ", ".join(f"{100 * mean:+.2f}" for mean in apart.by_seed)
            numbers = [f"{100 * apart.mean:+.2f}", *intervals, by_seed]
        verdicts.append(said)
        said = f"**{said}**" if claim.name in strong else said
        waits = said.startswith("open: ")
        if not whole and (waits or claim.data in IN_FILE_ALONE or _is_ranked(claim)):
            superseded += claim.data in IN_FILE_ALONE and not waits
            ranked += _is_ranked(claim) and not waits
            continue
        between = numbers[:2] if whole else [f"{numbers[0]} ({numbers[1]})"]
        cells = [claim.name, claim.text, claim.in_paper, *between, said]
        cells += [*numbers[2:], claim.source, claim.known or "–"] if whole else []
        lines.append(f"| {' | '.join(cells)} |")
    shown, not_here = (verdicts.count(each) for each in ("shown", "does not hold here"))
    waiting = sum(said.startswith("open: ") for said in verdicts)
    left = len(CLAIMS) - shown - not_here - waiting
    apart_from = {
        "without all their runs yet": waiting,
        "of an earlier search or of watches": superseded,
        'in the first table\'s column "ahead"': ranked,
    }
    told = [f"{number} {which}" for which, number in apart_from.items() if number]
    runs = f" In the file alone: {', '.join(told)}." if told else ""
    of_papers = Counter(said for claim, said in zip(CLAIMS, verdicts, strict=True) if claim.source != OURS)
    own = "{} are shown, {} do not hold here, and {} are open".format(
        *(of_papers[each] for each in ("shown", "does not hold here", "open"))
    )
    lines += [
        "",
        f"{shown} claims are shown, {not_here} do not hold here, and {left} are open. Of the papers' own {own}; the "
        f"others are ours.{runs} Of the "
        f"{shown + not_here} verdicts Holm's correction for {tests} tests leaves {len(strong)} at 5 %: they are bold.",
    ]
    return "\n".join(lines)


def left_table() -> str:
    """The runs of all matrices that have no row, and their hours, judged by those of their kind that have one."""
    said = "Hours are estimated from rows. Runs of `gallery/again.yaml` are not in this table."
    lines = [
        said,
        "",
        "| runs | matrix | without a row | hours of one core |",
        "| --- | --- | ---: | ---: |",
    ]
    for name in (name for name in MATRICES if name != TUNED_LAST):  # again.yaml supersedes what that one lacks
        rows = read(name)
        by_settings: dict[str, list[float]] = {}
        for row in rows:
            by_settings.setdefault(row["settings"], []).append(float(row["minutes"]))
        every = [minutes for each in by_settings.values() for minutes in each]
        for path in matrices_of(name):
            found = missing(name, path)
            if not found:
                continue
            kind = [by_settings.get(settings) for _, _, settings in found]
            hours = sum(fmean(each or every) for each in kind) / 60 if any(kind) else None
            about = [f"`{name}`", f"`{path.name}`", len(found), "not measured" if hours is None else f"{hours:.1f}"]
            lines.append(f"| {' | '.join(map(str, about))} |")
    return "\n".join(lines) if len(lines) > 4 else "Every run of the tables above has a row."


def figures() -> Iterable[tuple[str, Figure]]:
    """The figures of the page by the names of their files."""
    sections: dict[str, list[drawn.Bar]] = {}
    for claim in CLAIMS:
        apart = compared(claim)
        if apart is None:
            continue
        points = [100 * value for value in (apart.mean, apart.low, apart.high)]
        by_seed = [100 * mean for mean in apart.by_seed]
        bar = drawn.Bar(claim.name, claim.text, *points, by_seed, -claim.margin, verdict(claim, apart))
        sections.setdefault(SECTIONS[claim.name[0]], []).append(bar)
    yield "claims", drawn.claims(sections)
    shown = {bar.name: bar for bars in sections.values() for bar in bars}
    papers = {name: float(points) for name, points in IN_PAPER.items() if re.fullmatch(r"[+-]?[\d.]+", points)}
    yield "papers", drawn.papers([(shown[name], points) for name, points in papers.items() if name in shown])
    yield "costs", drawn.costs(_costs("subfedavg-rounds"))
    yield "spent", drawn.spent(_budgets("fedltp-fashion"))
    yield TUNED, drawn.costs(_costs(TUNED))
    yield TUNED_AGAIN, drawn.ranks(_costs(TUNED_AGAIN, LAST[0]))
    for name in (name for name in MATRICES if name not in (TUNED, TUNED_AGAIN) and not name.startswith("fresh-")):
        is_shown = any(claim.data == name and claim.measure == "personal" for claim in CLAIMS)
        if is_shown and (found := _series(name)):
            yield name, drawn.course(found)


def _costs(name: str, measure: str = "personal") -> list[drawn.Cost]:
    """What the runs of a data file cost and reached, by setting."""
    rows = _whole(name)
    axes = {"MB sent up by all clients": "megabytes_up", "operations of training, 10¹²": "teraflops"}
    found: dict[str, drawn.Cost] = {}
    for row, settings in zip(rows, differing(rows), strict=True):
        label = _method(row) if name == TUNED_AGAIN else _label(row, settings)
        cost = drawn.Cost(label, {axis: [] for axis in axes}, [], prunes=float(row["kept"] or 1) < 1)
        cost = found.setdefault(row["settings"], cost)
        for axis, column in axes.items():
            cost.spent[axis].append(charged(row, column))
        cost.reached.append(float(row[measure]))
    return list(found.values())


def _whole(name: str) -> list[Row]:
    """The rows of a data file by setting, without those of settings that wait for seeds."""
    rows = sorted(read(name), key=_by_setting)
    seeds = Counter(_by_setting(row)[:2] for row in rows)
    most = max(seeds.values(), default=0)
    return [row for row in rows if seeds[_by_setting(row)[:2]] == most]


def _budgets(name: str) -> dict[str, dict[int, list[tuple[float, float, float]]]]:
    """ε, megabytes and accuracy of the seeds, by setting and round, of settings with the seeds of most."""
    rows = sorted(read(f"{name}.spent"), key=_by_setting)
    seeds: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        seeds.setdefault(_by_setting(row)[:2], set()).add(row["seed"])
    usual = max(seeds.values(), key=[*seeds.values()].count, default=None)
    rows = [row for row in rows if seeds[_by_setting(row)[:2]] == usual]
    found: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
    for row, settings in zip(rows, differing(rows), strict=True):
        label = _label(row, settings)
        point = float(row["epsilon"]), float(row["megabytes"]), float(row["received"])
        found.setdefault(label, {}).setdefault(int(row["round"]), []).append(point)
    return found


def _series(name: str) -> list[drawn.Series]:
    """The runs of a data file that have a course, by setting."""
    rows = sorted(read(name), key=_by_setting)
    found = {}
    for row, settings in zip(rows, differing(rows), strict=True):
        told = [(key, value) for key, value in settings if key not in OF_FEW_ROWS or key == "drop-probability"]
        shown = (f"{key.rpartition('.')[2]} {value}" for key, value in told if value != "")
        found[row["settings"]] = drawn.Series(", ".join([row["system"], *shown]))
    for row in read(f"{name}.rounds"):
        point = int(row["round"]), float(row["personal"])
        found[row["settings"]].course.setdefault(row["seed"], []).append(point)
    for row in rows:
        if row["personal"]:
            last = float(row["busiest_megabytes_per_round"]), float(row["personal"])
            found[row["settings"]].last[row["seed"]] = last
    return [series for series in found.values() if any(len(course) > 1 for course in series.course.values())]


def _label(row: Row, settings: Iterable[tuple[str, Any]]) -> str:
    return ", ".join([row["system"], *(f"{key.rpartition('.')[2]} {value}" for key, value in settings if value)])


def _method(row: Row) -> str:
    return "fedrep" if json.loads(row["settings"]).get("fedper.head-epochs") else row["system"]


def _by_setting(row: Row) -> tuple[str, str, int]:
    return row["system"], row["settings"], int(row["seed"])


OF_FEW_ROWS = {"dispfl.dropped", "dispfl.topology", "drop-probability"}
"""These settings are left out of the names of rows that have their defaults."""


def differing(rows: Sequence[Row]) -> list[list[tuple[str, Any]]]:
    """Of each row those settings in which the rows of its system differ."""
    found = []
    for row in rows:
        of_system = [json.loads(other["settings"]) for other in rows if other["system"] == row["system"]]
        keys = sorted({key for settings in of_system for key in settings})
        values = {key: {json.dumps(each.get(key, DEFAULTS.get(key))) for each in of_system} for key in keys}
        own = json.loads(row["settings"])
        shown = [key for key in keys if len(values[key]) > 1 and not (key in OF_FEW_ROWS and key not in own)]
        found.append([(key, own.get(key, DEFAULTS.get(key))) for key in shown])
    return found


COLUMNS_OF_SETTINGS = {
    "personal": ("personal, %", 2), "worst_decile": ("worst tenth, %", 2), "received": ("received, %", 2),
    "kept": ("kept at the end", 2), "busiest_megabytes_per_round": ("busiest node, MB a round", 3),
    "megabytes_up": ("MB up", 1), "teraflops": ("FLOPs, 10¹²", 1),
}  # fmt: skip
"""The title of a measure in a table, and its decimal digits."""
FINE_TUNED = ("fedavg-ft", "dpsgd-ft", "lpft")
"""The systems whose clients fine-tune when they are tested, which the run does not count."""
COSTS = ("megabytes_up", "busiest_megabytes_per_round", "teraflops", "personal")


def settings_table(name: str, measures: Sequence[str] = tuple(COLUMNS_OF_SETTINGS), rising: str = "") -> str:
    """Each setting of a data file with the mean of its seeds, and their standard deviation.

    The settings are those in which the rows of one system differ, and the seeds where settings have other ones. If a
    measure is ``rising``, it orders the lines.
    """
    rows = sorted(read(name), key=_by_setting)
    if rising:
        rows = [row for row in rows if not OF_FEW_ROWS & json.loads(row["settings"]).keys()]
    if not rows:
        return "No run has been made yet."
    titles = ["system", "settings", *(COLUMNS_OF_SETTINGS[measure][0] for measure in measures)]
    lines = [f"| {' | '.join(titles)} |", f"| --- | --- |{' ---: |' * len(measures)}"]
    of_settings = list(_of_settings(rows).items())
    if rising:
        of_settings.sort(key=lambda each: fmean(float(row[rising]) for row in each[1]))
    of_seeds = {", ".join(row["seed"] for row in found) for _, found in of_settings}
    for (system, shown), found in of_settings:
        seeds = f" (seeds {', '.join(row['seed'] for row in found)})" if len(of_seeds) > 1 else ""
        cells = [_spread([row[key] for row in found], COLUMNS_OF_SETTINGS[key][1]) for key in measures]
        lines.append(f"| {' | '.join([system, shown + seeds, *cells])} |")
    return "\n".join(lines)


def costs_table(name: str) -> str:
    """What each setting of a data file costs, from the fewest bytes to the most; without those that few rows have."""
    return settings_table(name, COSTS, rising=COSTS[0])


IN_FILE_ALONE = (TUNED, TUNED_LAST, WATCH)


def _is_ranked(claim: Claim) -> bool:
    """Whether a claim is a system's distance to FedAvg-FT, which the ranked table has."""
    return claim.data == TUNED_AGAIN and not claim.margin and FEDAVG_FT in (claim.better, claim.worse)


RANKED = {
    TUNED: ((TUNED, TUNED_GALLERY), {"personal": "personal, %", "received": "received, %"}),
    TUNED_AGAIN: (
        (TUNED_AGAIN,),
        {LAST[0]: "after a last phase, %", "personal": "own model before, %", "received": "received, %"},
    ),
}
"""By name of a table: its data files, of which the first has FedAvg-FT, the measure that ranks, and others."""


def charged(row: Row, column: str) -> float:
    """What a run cost: its megabytes or ``teraflops``, with what its clients do before the last test.

    A system that fine-tunes is charged the operations of its clients' last fine-tuning, which is one round of all
    clients, and D-PSGD-FT the bytes of the round in which all models travel for their mean. The others are charged the
    operations of their last phase, if they have one: like a fine-tuning, it has to send nothing back.
    """
    own, again = {**DEFAULTS, **json.loads(row["settings"])}, 1 / int(row["rounds"])
    if column == "teraflops":
        more = again / float(own["fraction-train"]) if row["system"] in FINE_TUNED else 0
        return (1 + more) * float(row[column]) + float(row.get(f"last_{column}") or 0)
    return (1 + (again if row["system"] == "dpsgd-ft" else 0)) * float(row[column])


def _epochs(row: Row) -> str:
    """A client's local epochs in a round: where it trains twice, both."""
    own = {**DEFAULTS, **json.loads(row["settings"])}
    if row["system"] == "ditto":
        return f"{own['ditto.global-epochs']}+{own['ditto.personal-epochs']}"
    of_head = own.get("fedper.head-epochs") or own.get("lpft.head-epochs")
    return f"{of_head}+{own['local-epochs']}" if of_head else str(own["local-epochs"])


def ranked_table(table: str) -> str:
    """The systems from the most accurate, how far each is ahead of FedAvg-FT with ten clients, and its costs.

    Costs are as :func:`charged`. A distance is bold where Holm's correction leaves its claim.
    """
    left = left_by_holm()[0]
    strong = [claim for claim in CLAIMS if claim.data == table and _is_ranked(claim) and claim.name in left]
    sides = [side for claim in strong for side in (claim.better, claim.worse)]
    names, ((measure, title), *others) = RANKED[table][0], RANKED[table][1].items()
    by_name = {name: _whole(name) for name in names}
    costs = {"megabytes_up": "MB up", "megabytes_down": "MB down", "teraflops": "FLOPs, 10¹²"}
    titles = ("clients a round", "epochs", title, "ahead (95 %)", *dict(others).values(), "kept", *costs.values())
    lines = [f"| system | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    reference = paired(names[0], chosen(by_name[names[0]], TEN), measure)

    found = [(name, each) for name, rows in by_name.items() for each in _of_settings(rows).values()]
    found.sort(key=lambda each: -fmean(float(row[measure]) for row in each[1]))
    for name, of_setting in found:
        own = {**DEFAULTS, **json.loads(of_setting[0]["settings"])}
        apart = difference(paired(name, of_setting, measure), reference, of_other_seeds=True)
        points = [100 * value for value in (apart.mean, apart.low, apart.high)] if apart else []
        ahead = "{:+.2f} ({:+.2f} to {:+.2f})".format(*points) if points and any(points) else "–"
        is_strong = ahead != "–" and any(chosen(of_setting, side) for side in sides)
        cells = [
            _method(of_setting[0]),
            f"{float(own['fraction-train']) * int(of_setting[0]['clients']):.0f}",
            _epochs(of_setting[0]),
            _spread([row[measure] for row in of_setting], 2),
            f"**{ahead}**" if is_strong else ahead,
            *(_spread([row[other] for row in of_setting], 2).partition(" ±")[0] for other, _ in others),
            _spread([row["kept"] for row in of_setting], 2),
            *(f"{fmean(charged(row, cost) for row in of_setting):.1f}" for cost in costs),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def passes_table(name: str) -> str:
    """By setting and seed: the tested round from which personal models stay above training alone, and bytes till then.

    The bytes are the run's mean megabytes of the busiest node in a round, times the rounds.
    """
    rows = sorted(read(name), key=_by_setting)
    course: dict[tuple[str, str], dict[int, float]] = {}
    for row in read(f"{name}.rounds"):
        course.setdefault((row["settings"], row["seed"]), {})[int(row["round"])] = float(row["personal"])
    alone = {row["seed"]: course[row["settings"], row["seed"]] for row in rows if row["system"] == "standalone"}
    if not alone:
        return "No run has been made yet."
    lines = [
        "| system | settings | seeds | ahead from round | busiest node till then, MB |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    compared_rows = [row for row in rows if row["system"] != "standalone" and row["seed"] in alone]
    for key, of_setting in _of_settings(compared_rows).items():
        since = [_ahead_since(course[row["settings"], row["seed"]], alone[row["seed"]]) for row in of_setting]
        megabytes = [float(row["busiest_megabytes_per_round"]) for row in of_setting]
        columns = (
            [row["seed"] for row in of_setting],
            [str(number or "never") for number in since],
            [f"{number * each:.1f}" if number else "–" for number, each in zip(since, megabytes, strict=True)],
        )
        lines.append(f"| {' | '.join([*key, *map(', '.join, columns)])} |")
    return "\n".join(lines)


def _ahead_since(own: Mapping[int, float], other: Mapping[int, float]) -> int | None:
    """The first round of ``own`` from which it is above ``other`` to the end."""
    behind = max((number for number in own if own[number] <= other[number]), default=0)
    return min((number for number in own if number > behind), default=None)


def _of_settings(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows by system and by those settings in which the rows of that system differ."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row, settings in zip(rows, differing(rows), strict=True):
        shown = ", ".join(f"`{key}={value}`" for key, value in settings if value != "")
        found.setdefault((row["system"], shown or "–"), []).append(row)
    return found


def _spread(texts: Sequence[str], digits: int) -> str:
    """The mean of numbers, with their standard deviation where it can be seen."""
    values = [float(text) for text in texts if text]
    if not values:
        return "–"
    mean, apart = f"{fmean(values):.{digits}f}", f"{stdev(values) if len(values) > 1 else 0:.{digits}f}"
    return f"{mean} ± {apart}" if digits and float(apart) else mean


def texts_table(name: str) -> str:
    """The perplexity of the global model and of the clients' own, by test text, for runs of language models."""
    rows = sorted(read(name), key=lambda row: (row["settings"], int(row["seed"])))
    by_run: dict[tuple[str, str], dict[int, str]] = {}
    for row in read(f"{name}.clients"):
        both = [f"{math.exp(-float(row[each])):.2f}" if row[each] else "–" for each in ("received", "personal")]
        by_run.setdefault((row["settings"], row["seed"]), {})[int(row["client"])] = " / ".join(both)
    lines = [
        f"| merge | kept at the end | segments | seed | {' | '.join(TEXTS)} | MB up |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        own = {**DEFAULTS, **json.loads(row["settings"])}
        found = by_run[row["settings"], row["seed"]]
        texts = [found.get(number, "–") for number in range(len(TEXTS))]
        about = [own["fedspallm.merge"], own["density"], own["fedspallm.segments"], row["seed"]]
        lines.append(f"| {' | '.join(map(str, [*about, *texts, row['megabytes_up']]))} |")
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
    of = {way: chosen(rows, {**of_merge(density, segments), **merge}) for way, merge in MERGES.items()}
    alone = paired(name, of["the paper's mean"], "personal")
    return {"standalone": alone, **{way: paired(name, found, "received") for way, found in of.items()}}


def _cell(values: Sequence[float], best: float) -> str:
    if not values:
        return "–"
    mean = f"{fmean(values):.2f}"
    if fmean(values) == best:
        mean = f"**{mean}**"
    return f"{mean} ± {stdev(values):.2f}" if len(values) > 1 else mean


def data_table(about: str) -> str:
    """A table of docs/data/tables, by its name; with ``NAME: COLUMN; COLUMN`` these columns alone."""
    name, _, columns = about.partition(": ")
    rows = read_rows(TABLES / f"{name}.csv")
    titles = columns.split("; ") if columns else list(rows[0])
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row[title] for title in titles)} |" for row in rows)])


def written(text: str) -> str:
    """The page with its tables made anew; ``settings NAME: MEASURE MEASURE`` is a table of these measures alone."""

    def made(name: str) -> str:
        tables = {"costs": costs_table, "data": data_table}
        kind, _, about = name.partition(" ")
        if kind == "settings":
            data, _, measures = about.partition(": ")
            return settings_table(data, measures.split() or tuple(COLUMNS_OF_SETTINGS))
        whole = {"claims": claims_table, "wins": wins_table, "level": level_table, "left": left_table}
        if kind in RANKED:
            return ranked_table(kind)
        return whole[kind]() if kind in whole else tables[kind](about)

    return with_tables(text, r"claims|wins|left|level|again|costs [\w-]+|(?:settings|data) [^>]+?", made)


def files() -> Iterable[tuple[str, str]]:
    """The tables that are files of docs/data/tables, by their names."""
    yield "claims", claims_table(whole=True)
    yield TUNED, ranked_table(TUNED)
    for name in (SCARCE, FIVE_HUNDRED):
        yield f"{name}-ahead", passes_table(name)
    yield "fedspallm-claims", texts_table(LANGUAGE)
    for text in TEXTS:
        yield f"fedspallm-merges-{text}", cells_table(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add")
    adding.add_argument("name")
    adding.add_argument("runs", nargs="+", type=Path)
    leaving = commands.add_parser("left")
    leaving.add_argument("name", choices=MATRICES)
    leaving.add_argument("--out", type=Path, required=True, help="the folder for a matrix of each seed")
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "left":
        given.out.mkdir(parents=True, exist_ok=True)
        by_path = {path: left(given.name, path) for path in matrices_of(given.name)}
        for path, by_seed in by_path.items():
            for seed, document in by_seed.items():
                file = given.out / f"{path.stem}-seed{seed}.yaml"
                file.write_text(yaml.safe_dump(document, sort_keys=False))
                print(f"{file}: {len(document['systems'])} runs")
        if not any(by_path.values()):
            print(f"every run of {given.name} has a row")
        return
    if given.command == "add":
        print(f"{add(given.name, given.runs)} rows added")
    for name, table in files():
        (TABLES / f"{name}.csv").write_text(as_csv(table))
    for page in PAGES:
        page.write_text(written(page.read_text()))
    for name, figure in figures():
        drawn.save(figure, FIGURES / f"{name}.svg")


if __name__ == "__main__":
    main()
