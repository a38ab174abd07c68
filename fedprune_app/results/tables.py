"""The final table compares many runs: one row per system and setting, mean ± standard deviation over seeds."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedprune_app.config import OPTIONS
from fedprune_app.config.common import PUBLISHED
from fedprune_app.files import replace_file
from fedprune_app.results import measures
from fedprune_app.results.measures import MEGABYTE
from fedprune_app.results.own_measures import OwnMeasure
from fedprune_app.results.reader import Row, Run
from fedprune_app.results.texts import own_models, tested_on, windows_of_text

NOT_MEASURED = "–"
_BEST = "Accuracy, best on validation (%)"
_DATA = ("dataset", "data-dir", "data", "partition", "clients", "model")

# Where a run lives and how it was executed; none of it changes what was computed.
_BOOKKEEPING = frozenset(key for key, option in OPTIONS.items() if not option.changes_results)


@dataclass(frozen=True)
class Statistic:
    """A statistic is the mean and the sample standard deviation (``ddof = 1``) of ``count`` seeds.

    A single seed has no ``std``.
    """

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Statistic | None:
        """Return the statistic over all seeds, or None if a seed lacks the number: a mean of fewer would mislead."""
        listed = list(values)
        known = [value for value in listed if value is not None]
        if not known or len(known) < len(listed):
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Group:
    """A group has runs that differ in their seed only; ``settings`` tell it from other groups of the same system."""

    label: str
    system: str
    settings: Mapping[str, Any]
    status: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Column:
    """A column of the final table says which value of a run it shows and how a number is written.

    ``place`` orders the columns. Those that are declared have theirs in ``results/measures.py``. The ``remark`` on the
    number of one run, or on the mean of several, stands behind the number where people read it.
    """

    key: str
    title: str
    value: Callable[[Run], float | None]
    scale: float = 1.0
    decimals: int = 1
    place: int = 0
    remark: Callable[[Sequence[Run]], str] = lambda runs: ""
    of_headline: bool = False  # it shows what each system is judged by, which is not the same for all


def outcome(groups: Sequence[Group]) -> tuple[Column, ...]:
    """Return the columns of the table of final numbers: those that are declared, and those made of several numbers.

    The systems of the ``groups`` may have declared numbers of their own.
    """
    standalone, own = own_models(1), own_models(2)
    of_some = partial(_last_remark, column=measures.MEASURES.columns["perplexity_personal_mean"])
    made = (
        Column("accuracy", "Accuracy, last round (%)", accuracy, 100, 2, 10, _headline_remark, of_headline=True),
        Column("best_accuracy", _BEST, best_on_validation, 100, 2, 20, _best_remark, of_headline=True),
        Column(
            "standalone_perplexity",
            f"Perplexity, {standalone}",
            partial(own_perplexity, name=standalone),
            1,
            2,
            60,
            of_some,
        ),
        Column("own_perplexity", f"Perplexity, {own}", partial(own_perplexity, name=own), 1, 2, 70, of_some),
    )
    return _in_order(*_declared(is_cost=False), *_own(groups), *made)


def cost() -> tuple[Column, ...]:
    """Return the columns of the table of what a run cost."""
    made = (
        Column("paper_megabytes", "MB, paper's formula", paper_bytes, 1 / MEGABYTE, 2, 30),
        Column("gigaflops", "GFLOPs per client and round", flops_per_client, 1e-9, 2, 80),
        Column("rounds", "Rounds", lambda run: float(len(run.rounds)), 1, 0, measures.LAST),
        Column("minutes", "Minutes", lambda run: float(run.info["seconds"]), 1 / 60, 1, measures.LAST),
    )
    return _in_order(*_declared(is_cost=True), *made)


def columns(groups: Sequence[Group]) -> tuple[Column, ...]:
    return (*outcome(groups), *cost())


def _declared(is_cost: bool) -> Iterator[Column]:
    for name, column in measures.MEASURES.columns.items():
        if (shown := column.table) and shown.is_cost == is_cost:
            value = partial(_OF_ROUNDS[shown.of_rounds], field=name)
            remark = partial(_last_remark, column=column)
            yield Column(shown.key, shown.title, value, shown.scale, shown.decimals, shown.place, remark)


def own_measures_of(groups: Sequence[Group]) -> dict[str, OwnMeasure]:
    """Return the numbers that the systems of these groups declared, each under a key of its own.

    Where systems declared different numbers of one name, the keys of the later ones end in ``_2`` and so on.
    """
    found = dict.fromkeys(each for group in groups for run in group.runs for each in run.own_measures)
    keys: dict[str, OwnMeasure] = {}
    for each in found:
        others = (f"{each.name}_{number}" for number in itertools.count(2))
        keys[next(key for key in itertools.chain([each.name], others) if key not in keys)] = each
    return keys


def _own(groups: Sequence[Group]) -> Iterator[Column]:
    for key, own in own_measures_of(groups).items():
        if shown := own.shown.table:
            value = partial(_own_value, own=own)
            yield Column(key, shown.title, value, shown.scale, shown.decimals, shown.place)


def _own_value(run: Run, own: OwnMeasure) -> float | None:
    """Return the number of a run whose system declared it so; another system may give the name another meaning."""
    return _OF_ROUNDS[own.over_rounds](run, own.column) if own in run.own_measures else None


def _last_remark(runs: Sequence[Run], column: measures.Column) -> str:
    """Return the remark on the last number that each run has in this column."""
    last = [[row for row in run.rounds if row.get(column.name) is not None][-1:] for run in runs]
    remark = column.remarked(*itertools.chain.from_iterable(last))
    if not column.name.startswith("accuracy"):
        return remark
    # a privacy budget may bear one accuracy of a client and no other
    judged = [max((round for round, _ in run.series(run.headline)), default=0) for run in runs]
    earlier = {row["round"] for rows, end in zip(last, judged, strict=True) for row in rows if row["round"] < end}
    return _together(remark, *(f"of round {round}" for round in sorted(earlier)))


def _together(remark: str, *more: str) -> str:
    """Return a remark in brackets with more of them, or an empty text."""
    said = [*filter(None, [remark[2:-1]]), *more]
    return f" ({', '.join(said)})" if said else ""


def _headline_remark(runs: Sequence[Run]) -> str:
    """Return the remark on the number that the runs are judged by."""
    column = measures.MEASURES.columns.get(runs[0].headline)
    return "" if column is None else _last_remark(runs, column)


def epsilon_remark(groups: Sequence[Group]) -> str:
    """Return what a reader must know of the epsilons of all these runs, to stand behind a title; empty if nothing."""
    (column,) = (column for column in _declared(is_cost=False) if column.key == "epsilon")
    return column.remark([run for group in groups for run in group.runs])


_OF_ROUNDS: Mapping[str, Callable[..., float | None]] = {"last": Run.last, "total": Run.total, "mean": Run.mean}


def _in_order(*columns: Column) -> tuple[Column, ...]:
    return tuple(sorted(columns, key=lambda column: column.place))


def accuracy(run: Run) -> float | None:
    """Return the last headline of a run, or None for a system that is judged by something else than accuracy."""
    return run.last(run.headline) if run.headline.startswith("accuracy") else None


def own_perplexity(run: Run, name: str) -> float | None:
    """Return the mean perplexity of the clients' own models, if these had this ``name`` when last measured."""
    measured = run.series("perplexity_personal_mean")
    return measured[-1][1] if measured and own_models(measured[-1][0]) == name else None


def best_on_validation(run: Run) -> float | None:
    """Return the headline (test) accuracy of the round that has the best validation accuracy.

    The round is chosen without a look at test accuracy; of equal rounds it is the earliest. Of all evaluations only
    those are compared in which most clients told both accuracies, since of fewer clients the luckiest would win. The
    result is None if validation was not measured.
    """
    best, _ = _best_round(run)
    return None if best is None else float(best[run.headline])


def _best_round(run: Run) -> tuple[Row | None, str]:
    """Return the row of the round that has the best validation accuracy, of the rounds that can be compared.

    Beside it is what a reader must know of the choice, or an empty text.
    """
    names = ("accuracy_validation_mean", run.headline)
    measured = [row for row in run.rounds if all(row.get(name) is not None for name in names)]
    most = max((_telling(row, names) for row in measured), default=(0, 0))
    rows = [row for row in measured if _telling(row, names) == most]
    if run.config.get("evaluate-clients") and most[0] < len(run.info.get("partition") or ()):
        return None, ""  # each evaluation asked clients of its own
    said = [f"best of {len(rows)} of {len(measured)} evaluations"] if len(rows) < len(measured) else []
    if any(row.get("accuracy_noise") is not None for row in rows):
        said.append("chosen by noised accuracies")
    return max(rows, key=lambda row: (row["accuracy_validation_mean"], -row["round"]), default=None), ", ".join(said)


def _telling(row: Row, names: Sequence[str]) -> tuple[int, int]:
    """Return how many clients were evaluated, and how many of them told all of these means."""
    evaluated = int(row.get("evaluated") or 0)
    fewer = row.get("clients_by_column") or {}
    return evaluated, min(int(fewer.get(name, evaluated)) for name in names)


def _best_remark(runs: Sequence[Run]) -> str:
    """Return the remarks on the headlines of the best rounds, and on how these rounds were chosen."""
    column = measures.MEASURES.columns.get(runs[0].headline)
    found = [_best_round(run) for run in runs]
    best = [row for row, _ in found if row is not None]
    said = sorted({text for row, text in found if row is not None and text})
    return _together("" if column is None else column.remarked(*best), *said)


def paper_bytes(run: Run) -> float | None:
    """Return the bytes that the paper's own formula charges for the whole run, in the directions that it counts.

    Between peers a link counts once: what one of them sends is what the other one receives.
    """
    if run.total("peer_bytes") is not None:
        return run.total("paper_bytes_up")
    directions = [run.total("paper_bytes_up"), run.total("paper_bytes_down")]
    counted = [value for value in directions if value is not None]
    return sum(counted) if counted else None


def traffic_of(run: Run) -> float | None:
    """Return the bytes of training, to and from the server, or over all links where models go from peer to peer."""
    peers, up, down = (run.total(name) for name in ("peer_bytes", "bytes_up", "bytes_down"))
    if peers is not None:  # up and down together would count relayed bytes twice
        return peers
    return None if up is None or down is None else up + down


def flops_per_client(run: Run) -> float | None:
    """Return the FLOPs of a client that trains in a round, as a mean over the rounds in which any client trained.

    Each of these rounds counts with the mean over its clients. The result is None if a round's FLOPs or the number of
    its clients were not measured.
    """
    counted = [(row.get("flops"), row.get("replies")) for row in run.rounds]
    if any(flops is None or replies is None for flops, replies in counted):
        return None
    means = [flops / replies for flops, replies in counted if replies]
    return statistics.fmean(means) if means else None


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in the seed only, in the order of their first run.

    A run that did not complete, or that went on without lost states, is never averaged with others, nor are two runs of
    the same seed: each stands alone. Labels are unique. A label has the system and the settings in which groups of that
    system differ (``target-rate 0.3``). It also has the run's flaw, if there is one, and, where nothing else tells two
    groups apart, the seed or the folder.
    """
    seeds = Counter((_identity(run), run.seed) for run in runs)
    members: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        alone = run.flaw or seeds[_identity(run), run.seed] > 1
        members[(_identity(run), str(run.folder) if alone else None)].append(run)
    groups = [tuple(alike) for alike in members.values()]
    settings = [_settings(group[0], [other[0] for other in groups]) for group in groups]
    labels = [_label(group[0], values) for group, values in zip(groups, settings, strict=True)]
    for distinctions in (
        [f"seed {alike[0].seed}" for alike in groups],
        [str(alike[0].folder) for alike in groups],
    ):
        count = Counter(labels)
        pairs = zip(labels, distinctions, strict=True)
        labels = [f"{label} · {distinction}" if count[label] > 1 else label for label, distinction in pairs]
    return [
        Group(label, group[0].system, values, group[0].status, group)
        for label, values, group in zip(labels, settings, groups, strict=True)
    ]


def statistics_of(group: Group, shown: Iterable[Column] = ()) -> dict[str, Statistic | None]:
    """Return a group's final numbers by the key of a column, of all columns or of those ``shown``.

    A number that a run did not measure is None.
    """
    return {column.key: Statistic.of(column.value(run) for run in group.runs) for column in shown or columns([group])}


def formatted(statistic: Statistic | None, column: Column) -> str:
    """Return a statistic as ``81.20 ± 0.35``, or ``81.20`` for one seed, or – (never 0) if it was not measured."""
    if statistic is None:
        return NOT_MEASURED
    mean = f"{statistic.mean * column.scale:.{column.decimals}f}"
    if statistic.std is None or column.decimals == 0:
        return mean
    return f"{mean} ± {statistic.std * column.scale:.{column.decimals}f}"


def final_rows(groups: Sequence[Group], shown: Sequence[Column] = ()) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the final table, of all columns or of those ``shown``, without empty columns."""
    shown = shown or columns(groups)
    numbers = [statistics_of(group, shown) for group in groups]
    measured = [column for column in shown if any(row[column.key] for row in numbers)]
    said = {
        c.key: {c.remark(group.runs) for group, row in zip(groups, numbers, strict=True) if row[c.key]}
        for c in measured
    }
    of_all = {key: found.pop() if len(found) == 1 < len(groups) else "" for key, found in said.items()}  # remarks
    header = ["System", "Dataset", "Partition", "Seeds", *(c.title + of_all[c.key] for c in measured)]
    judged_by = {group.label: accuracy_words(group.runs[0].headline) for group in groups}
    several = len(set(judged_by.values()) - {""}) > 1

    def cell(group: Group, statistic: Statistic | None, column: Column) -> str:
        words = f" ({judged_by[group.label]})" if several and column.of_headline else ""
        remark = "" if of_all[column.key] else column.remark(group.runs)
        return formatted(statistic, column) + (words + remark if statistic else "")

    rows = [
        [group.label, *_data(group), str(len(group.runs)), *(cell(group, row[c.key], c) for c in measured)]
        for group, row in zip(groups, numbers, strict=True)
    ]
    return header, rows


OWN = "accuracy_personal_mean"


def compared_by(groups: Sequence[Group]) -> dict[str, str]:
    """Return by label the number that groups are compared by: what each is judged by, if that is the same for all.

    Otherwise it is the accuracy of the clients' own models, if all groups have it.
    """
    judged_by = {group.label: group.runs[0].headline for group in groups}
    have_own = all(run.last(OWN) is not None for group in groups for run in group.runs)
    return dict.fromkeys(judged_by, OWN) if have_own and len(set(judged_by.values())) > 1 else judged_by


def accuracy_words(name: str) -> str:
    """Return whose accuracy a column of rounds.jsonl has, in words; empty for another column."""
    column = measures.MEASURES.columns.get(name)
    if column is None or column.view is None or not column.name.startswith("accuracy"):
        return ""
    return column.view.text.lower()


MODELS = ("dense", "personal_mean", "global")
"""Whose perplexity of a test text rounds.jsonl has: of the model before pruning, mean of the clients' own, global."""


def model_name(key: str, group: Group) -> str:
    """Return the name in words of one of the :data:`MODELS`."""
    if key != "personal_mean":
        return {"dense": "dense model", "global": "global model"}[key]
    measured = [row["round"] for run in group.runs for row in run.rounds if row.get("perplexity_by_text")]
    return own_models(max(measured, default=1))


def perplexity_tables(groups: Sequence[Group]) -> dict[str, dict[str, list[Mapping[str, float]]]]:
    """Return the last perplexities of all runs, by text with its windows, and then by a group's label."""
    found: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for group in groups:
        each = [run.last_table("perplexity_by_text") for run in group.runs]
        for text in (text for text in each[0] if all(text in other for other in each)):
            title = windows_of_text(text, each[0][text])
            found.setdefault(title, {})[group.label] = [other[text] for other in each]
    return found


def perplexity_rows(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of perplexities; there are no rows where no perplexity was measured."""
    columns: list[tuple[str, dict[str, str]]] = []
    named = {group.label: group for group in groups}
    for title, by_group in perplexity_tables(groups).items():
        by_model: dict[str, dict[str, str]] = {}
        for key, (label, found) in itertools.product(MODELS, by_group.items()):
            statistic = Statistic.of(row.get(key) for row in found)
            name = model_name(key, named[label])
            cell = formatted(statistic, Column(key, name, lambda run: None, 1, 2))
            if key == "personal_mean" and statistic:
                cell += _of_fewer(found)
            by_model.setdefault(name, {})[label] = cell
        for name, cells in by_model.items():
            if any(cell != NOT_MEASURED for cell in cells.values()):
                columns.append((f"{title}, {name}", cells))
    columns += _task_columns(groups)
    rows = [[g.label, *(cells.get(g.label, NOT_MEASURED) for _, cells in columns)] for g in groups] if columns else []
    return ["System", *(title for title, _ in columns)], rows


def _of_fewer(found: Sequence[Mapping[str, float]]) -> str:
    """Return how many clients' models a mean is of, ready to stand behind it; empty where nobody asked is missing."""
    counts = [(int(each["personal_models"]), int(each["asked"])) for each in found if each.get("asked")]
    few, asked = min(counts, key=lambda pair: pair[0] - pair[1], default=(0, 0))
    return f" ({few} of {asked} clients)" if few < asked else ""


def _task_columns(groups: Sequence[Group]) -> list[tuple[str, dict[str, str]]]:
    """Return the last zero-shot accuracies in percent, by task and model, and then by a group's label."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for group in groups:
        each = [run.last_table("accuracy_by_task") for run in group.runs]
        for task in (task for task in each[0] if all(task in other for other in each)):
            for key in ("dense", "global"):
                title = f"{task}: {each[0][task]['examples']} examples (%)"
                statistic = Statistic.of(other[task].get(key) for other in each)
                cell = formatted(statistic, Column(key, key, lambda run: None, 100, 1))
                found.setdefault((title, model_name(key, group)), {})[group.label] = cell
    return [(f"{title}, {name}", cells) for (title, name), cells in found.items()]


def markdown(groups: Sequence[Group]) -> str:
    """Return the final table in Markdown, for a README."""
    return _markdown(*final_rows(groups), num_texts=3)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int) -> str:
    alignment = ["---"] * num_texts + ["---:"] * (len(header) - num_texts)
    lines = [list(map(_markdown_cell, header)), alignment, *([_markdown_cell(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(groups: Sequence[Group]) -> str:
    """Return the final table in LaTeX with booktabs rules, everything escaped."""
    header, rows = final_rows(groups)
    lines = [f"\\begin{{tabular}}{{lll{'r' * (len(header) - 3)}}}", "\\toprule"]
    lines += [" & ".join(map(_latex_cell, header)) + " \\\\", "\\midrule"]
    lines += [" & ".join(map(_latex_cell, row)) + " \\\\" for row in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def comma_separated(groups: Sequence[Group]) -> str:
    """Return the final numbers for a program: accuracies as shares, bytes / 1e6, empty if not measured.

    ``epsilon_remark`` says of every ε of the row what its noise was, if it was not the operating system's.
    """
    shown = columns(groups)
    keys = [f"{column.key}_{part}" for column in shown for part in ("mean", "std")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", "system", "dataset", "partition", "status", "seeds", *keys, "epsilon_remark"])
    for group in groups:
        cells: list[object] = [_csv_text(cell) for cell in (group.label, group.system, *_data(group))]
        cells += [group.status, len(group.runs)]
        for column, statistic in zip(shown, statistics_of(group, shown).values(), strict=True):
            scale = 1.0 if column.scale == 100 else column.scale  # accuracies stay shares
            parts = (statistic.mean, statistic.std) if statistic else (None, None)
            cells += ["" if value is None else value * scale for value in parts]
        cells.append(epsilon_remark([group]).strip(" ()"))
        writer.writerow(cells)
    return text.getvalue()


def write_tables(runs: Sequence[Run], out_dir: Path) -> list[Path]:
    """Write the final numbers to ``table.md``, ``table.csv`` and ``table.tex``, and return the paths of all files.

    Where perplexities were measured, ``perplexity.md`` has those of every text.
    """
    groups = group_runs(runs)
    out_dir = Path(out_dir)
    texts = {"table.md": markdown(groups), "table.csv": comma_separated(groups), "table.tex": latex(groups)}
    header, rows = perplexity_rows(groups)
    if rows:
        texts["perplexity.md"] = _markdown(header, rows, num_texts=1)
    for name, text in texts.items():
        replace_file(out_dir / name, text.encode("utf-8", errors="replace"))
    return [out_dir / name for name in texts]


def compared_settings(run: Run) -> dict[str, Any]:
    """Return the number of clients, and the configuration without the seed and what does not change the result.

    Runs of a plug-in whose code has changed are runs of two systems. What tells a dataset that is no published one from
    another is not left out.
    """
    compared = {key: value for key, value in run.config.items() if key not in {"seed", *_BOOKKEEPING}}
    public = _place(run, "fedltp.public-dataset", "fedltp.public-data-dir")
    plugins = [*(run.info.get("plugins") or {}).values()]
    for since in run.info.get("plugins_since") or ():  # the run went on with other code
        plugins += [str(found) for name, found in dict(since).items() if name != "round"]
    code = sorted(told[:15] if told.startswith("sha256 ") else told for told in plugins)  # a version is told whole
    clients = len(run.info.get("partition") or ()) or None
    return compared | place_of_data(run) | public | {"clients": clients, **({"code": ", ".join(code)} if code else {})}


def place_of_data(run: Run) -> dict[str, Any]:
    """Return what tells the data of the clients from other data of the same dataset's name, by key.

    That is a digest of the data, or their folder where no digest was told. Nothing is returned for a published dataset,
    which is the same in every folder.
    """
    place, digest = _place(run, "dataset", "data-dir"), run.info.get("data_sha256")
    return {"data": str(digest)[:12]} if place and digest else place


def _place(run: Run, dataset: str, folder: str) -> dict[str, Any]:
    is_published = run.config.get(dataset) in {*PUBLISHED, None, ""}
    return {} if is_published or folder not in run.config else {folder: run.config[folder]}


def _identity(run: Run) -> str:
    return repr((run.system, sorted(compared_settings(run).items(), key=lambda item: item[0])))


def _settings(run: Run, others: Sequence[Run]) -> dict[str, Any]:
    """Return this run's values of the few keys that are needed to tell runs of the same system apart.

    A key that only varies together with an earlier one adds nothing. The keys of the data come first, then the system's
    own keys.
    """
    peers = [compared_settings(other) for other in others if other.system == run.system]
    keys = {key for peer in peers for key in peer}
    chosen: list[str] = []
    classes = 1
    for key in sorted(keys, key=lambda key: (_DATA.index(key) if key in _DATA else len(_DATA), "." not in key, key)):
        known = {repr(peer[key]) for peer in peers if peer.get(key) is not None}
        split = len({tuple(repr(peer.get(each)) for each in (*chosen, key)) for peer in peers})
        if len(known) > 1 and split > classes:
            chosen.append(key)
            classes = split
    mine = compared_settings(run)
    return {key: mine.get(key) for key in chosen}


def _label(run: Run, settings: Mapping[str, Any]) -> str:
    parts = [f"{key.rpartition('.')[2]} {_value(value)}" for key, value in settings.items()]
    state = f" ({run.flaw})" if run.flaw else ""
    return " · ".join([run.system, *parts]) + state


def _value(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else short_name(str(value))


def short_name(text: str) -> str:
    """Return ``file.py:function`` without the folders of the file; another text stays as it is."""
    file, colon, function = text.rpartition(":")
    return f"{Path(file).name}:{function}" if file.endswith(".py") and colon and function.isidentifier() else text


def _data(group: Group) -> tuple[str, str]:
    config, text = group.runs[0].config, measured_on(group.runs[0])
    dataset = _value(config.get("dataset")) + (f", tested on {text}" if text else "")
    is_dealt = not group.runs[0].headline.startswith("perplexity")  # texts have no labels, so no partition by them
    return dataset, _value(config.get("partition")) if is_dealt else NOT_MEASURED


def measured_on(run: Run) -> str:
    """Return the text that a run's perplexities were measured on, or an empty name where there are none."""
    return next((text for row in reversed(run.rounds) if (text := tested_on(row))), "")


def _markdown_cell(text: str) -> str:
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
    "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}",
    "–": "--", "±": "$\\pm$", "ε": "$\\varepsilon$", "δ": "$\\delta$",
    "·": "$\\cdot$", "×": "$\\times$", "\n": " ",
}  # fmt: skip


def _latex_cell(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _csv_text(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would run as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
