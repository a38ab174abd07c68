"""A report is one self-contained HTML page that compares runs: it needs no server and no network."""

import base64
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from fedprune_app.config import ConfigError
from fedprune_app.core.named import ValueDict
from fedprune_app.core.texts import one_line
from fedprune_app.files import replace_file
from fedprune_app.results.columns import ACCURACIES, Column, cost, last_footnote, outcome, table_key, traffic_of
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.differences import OWN, between, difference_tables, measure_of, of_the_same_data
from fedprune_app.results.figures import figures
from fedprune_app.results.figures.common import number_of
from fedprune_app.results.groups import (
    NOT_MEASURED,
    Group,
    Groups,
    Statistic,
    differing_settings,
    group_runs,
    short_name,
)
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.ownership import check_report_file
from fedprune_app.results.reader import Run, load_run, read_info
from fedprune_app.results.tables import MODELS, accuracy_words, compared_by, final_rows, formatted, perplexity_rows
from fedprune_app.results.texts import windows_of_text


def filled(package: str, template: str, **values: Any) -> str:
    """Return the page of a ``template``, a file in ``package``. JSON goes through tojson in the template.

    tojson keeps '<' out of script elements, and escaping covers all else.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = resources.files(package).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(**values)


# On a light page; the template has them for a dark one.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5569a", "#c28800", "#3f9fd6", "#6b5b95", "#6f7780")
# Places in the palette that systems have in every report.
_OWN_PLACES = ("fedavg", "subfedavg", "dispfl", "fedp3", "fedltp", "fedavg-ft", "ditto", "standalone")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_CARDS_UP_TO = 12
_FOLDERS = re.compile(r"(?<![^=, ])/([^/,=]+/)+")  # of a path of this machine
_HUNDREDTHS = Column("", "", lambda run: None, 1, 2)
_PERCENT = replace(_HUNDREDTHS, scale=100)


@dataclass(frozen=True)
class Series:
    """A series gives a group the same colour (index into the palette) and the same dash in every figure."""

    label: str
    seeds: int
    colour: int
    dash: str


def check_page_name(out: Path, option: str = "--output") -> None:
    """Raise :class:`ConfigError` for the name of a file that is no page; an error calls the name by this ``option``."""
    if out.suffix.lower() not in ("", ".html", ".htm"):
        raise ConfigError(option, out, "a file that ends in .html")


def each_once(folders: Iterable[Path]) -> list[Path]:
    """Return each folder by its first name alone: ``runs/latest`` is a link to a run that has a number, too."""
    folder_by_path: dict[str, Path] = {}
    for folder in folders:
        folder_by_path.setdefault(os.path.realpath(folder), folder)
    return list(folder_by_path.values())


def run_folders(folder: Path) -> list[Path]:
    """Return the folder, if it holds a run, or else the run folders in it.

    Raises :class:`ConfigError` where there is none.
    """
    if (folder / "run.json").exists():
        return [folder]
    folders = sorted(path.parent for path in folder.glob("*/run.json"))
    if not folders:
        raise ConfigError("run folder", folder, which="is none, nor does it hold any (no run.json)")
    return folders


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    force: bool = False,
    on_left_out: Callable[[str], object] | None = None,
    refresh_seconds: int = 0,
) -> Path:
    """Write the page that compares the runs in ``folders`` to ``out`` in one step, and return ``out``.

    A folder without a readable run is left out. The page says so in one line that names the file, and ``on_left_out``
    is called with the same line. With ``refresh_seconds`` a browser loads the page anew as often. Raises ``ValueError``
    for no folders, where no folder is readable, for an ``out`` that is no name of a page, and for one that exists and
    is no report, unless ``force`` says to replace it.
    """
    check_page_name(Path(out))
    folders = each_once(folders)
    if not folders:
        raise ValueError("a report needs at least one run folder")
    if not force:
        check_report_file(Path(out))
    runs, left_out = [], []
    for folder in folders:
        try:
            runs.append(load_run(folder))
        except (ValueError, OSError) as error:
            left_out.append(one_line(error))
    if not runs:
        raise ValueError(f"no run folder can be read: {left_out[0]}")
    if on_left_out is not None:
        for reason in left_out:
            on_left_out(reason)
    page = render(runs, left_out, refresh_seconds)
    replace_file(Path(out), page.encode("utf-8", errors="replace"))  # JSON may hold half of a surrogate pair
    return Path(out)


def is_any_running(folders: Sequence[Path]) -> bool:
    for folder in folders:
        with suppress(ValueError, OSError):
            if read_info(folder)["status"] == "running":
                return True
    return False


def render(runs: Sequence[Run], left_out: Sequence[str] = (), refresh_seconds: int = 0) -> str:
    """Return the page as HTML; the same runs give the same text."""
    groups = group_runs(runs)
    series = appearance(groups)
    all_figures = figures(groups)
    return filled(
        __package__,
        "templates/report.html",
        title=_title(runs),
        refresh_seconds=refresh_seconds,
        facts=_facts(runs),
        words=comparison(groups) if len(groups) <= _CARDS_UP_TO else [],
        series=series,
        cards=_cards(groups) if len(groups) <= _CARDS_UP_TO else [],
        problems=[run for run in runs if run.flaw or run.info.get("clients_left_out")],
        left_out=left_out,
        runs_asked=len(runs) + len(left_out),
        tables={
            "Final numbers": _table(groups, outcome(groups), is_first=True),
            "Perplexity": _perplexity_table(groups),
            "What it cost": _table(groups, cost()),
        },
        differences=[(accuracy_words(measure), *table) for measure, *table in difference_tables(groups)],
        settings=differing_settings(groups),
        figures=all_figures,
        formulas={run.system: text for run in runs if (text := run.info.get("paper_bytes_formula"))},
        lost_titles=list(DECLARATIONS.losses.values()),
        losses=_losses(runs),
        details=[_details(run) for run in runs],
        palette=COLOURS,
        data={"series": [asdict(each) for each in series], "figures": [asdict(each) for each in all_figures]},
        plotly=packed_plotly(),
    )


@cache
def packed_plotly() -> str:
    """Return plotly.js for the page: compressed, in the letters of base 85, with a comma for the one that HTML reads.

    That is 1.8 MB in place of 4.8; the page unpacks it.
    """
    from plotly.offline import get_plotlyjs

    return base64.b85encode(zlib.compress(get_plotlyjs().encode(), 9)).decode().replace("<", ",")


def appearance(groups: Groups) -> list[Series]:
    """Return a series for each group: colours tell systems apart, and dashes tell settings apart.

    A system that has a place in the palette has it in every report. With a single system, colours tell the settings
    apart.
    """
    systems = list(dict.fromkeys(group.system for group in groups))
    places = [(group.system if len(systems) > 1 else group.label) for group in groups]
    slots = _slots(list(dict.fromkeys(places)))
    series = []
    for index, group in enumerate(groups):
        slot, earlier = slots[places[index]], places[:index].count(places[index])
        dash = DASHES[(earlier + slot // len(COLOURS)) % len(DASHES)]
        series.append(Series(group.label, len(group.runs), slot % len(COLOURS), dash))
    return series


def _slots(names: Sequence[str]) -> dict[str, int]:
    """Return a slot for each name: its own one, if it has one, or else the first free one."""
    slots: dict[str, int] = {}
    for name in sorted(names, key=lambda name: name not in _OWN_PLACES):
        free = (slot for slot in itertools.count() if slot not in slots.values())
        slots[name] = _OWN_PLACES.index(name) if name in _OWN_PLACES else next(free)
    return slots


def _table(groups: Groups, shown_columns: Sequence[Column], *, is_first: bool = False) -> ValueDict:
    """Return a part of the final table, without what the line under the title or the first part already tells."""
    header, rows = final_rows(groups, shown_columns)
    compared = set(compared_by(groups).values())
    main = table_key(compared.pop()) if len(compared) == 1 else "accuracy"
    others = {column.title for column in shown_columns if column.key in ACCURACIES - {main}}
    common_titles = {header[i] for i in (1, 2) if len({row[i] for row in rows}) == 1}
    redundant_titles = common_titles if is_first else {"Dataset", "Partition", "Seeds"}
    indices = [i for i, title in enumerate(header) if title not in redundant_titles]
    return {
        "header": [header[i] for i in indices],
        "rows": [[row[i] for i in indices] for row in rows],
        "texts": len({"System", "Dataset", "Partition"} - redundant_titles),
        "others": [place for place, i in enumerate(indices) if header[i] in others],  # behind a switch
        "measured": len(header) > 4,  # there are columns beside those that name the row
    }


def _perplexity_table(groups: Groups) -> ValueDict:
    header, rows = perplexity_rows(groups)
    return {"header": header, "rows": rows, "texts": 1, "others": [], "measured": bool(rows)}


def _title(runs: Sequence[Run]) -> str:
    num_systems = len({run.system for run in runs})
    return runs[0].system if num_systems == 1 else f"{num_systems} systems compared"


def _facts(runs: Sequence[Run]) -> list[str]:
    # texts have no labels, so no partition by labels
    by_label = all(run.headline.startswith("accuracy") for run in runs)
    values = {
        "dataset": {run.config.get("dataset") for run in runs},
        "partition": {run.config.get("partition") if by_label else None for run in runs},
        "model": {(run.info.get("model") or {}).get("name") for run in runs},
        "clients": {len(run.info.get("partition") or ()) or None for run in runs},
    }
    common = {title: found.pop() for title, found in values.items() if len(found) == 1}
    facts = [f"{title} {short_name(str(value))}" for title, value in common.items() if value is not None]
    return [number_of(len(runs), "run"), *facts]


def _cards(groups: Groups) -> list[ValueDict]:
    by_label = compared_by(groups)
    return [
        _language_card(group) if group.first.headline.startswith("perplexity") else _card(group, by_label[group.label])
        for group in groups
    ]


def _language_card(group: Group) -> ValueDict:
    text, dense, own, pruned = _perplexities(group)
    facts = {
        "Dense model": dense,
        "Clients' own, mean": own,
        "Density, pruned matrices": group.last("density_global"),
    }
    return {
        "number": formatted(pruned, _HUNDREDTHS),
        "unit": "",
        "main": f"perplexity, global model; {text}".removesuffix("; "),
        "facts": {title: _short(statistic, _HUNDREDTHS) for title, statistic in facts.items()} | _traffic(group),
    }


def _perplexities(group: Group) -> tuple[str, Statistic | None, Statistic | None, Statistic | None]:
    """Return the first text on which the global model was measured, and the perplexities there of :data:`MODELS`."""
    tables = [run.last_table("perplexity_by_text") for run in group.runs]
    text = next((text for text, entry in tables[0].items() if entry.get("global") is not None), "")
    words = windows_of_text(text, tables[0][text]) if text else ""
    dense, own, pruned = (Statistic.of(table.get(text, {}).get(key) for table in tables) for key in MODELS)
    return words, dense, own, pruned


def _short(statistic: Statistic | None, column: Column) -> str:
    """Return a mean alone: a card is short, and the table tells spread and remarks."""
    return NOT_MEASURED if statistic is None else formatted(replace(statistic, std=None), column)


def _traffic(group: Group) -> dict[str, str]:
    total, is_of_peers = traffic(group), group.first.total("peer_bytes") is not None
    text = NOT_MEASURED if total is None else f"{total.mean / MEGABYTE:,.1f} MB"
    return {"Traffic, peer to peer" if is_of_peers else "Traffic": text}


def _card(group: Group, accuracy: str) -> ValueDict:
    return {
        "number": formatted(group.last(accuracy), _PERCENT),
        "unit": "%",
        "main": f"accuracy, {accuracy_words(accuracy)}{last_footnote(group.runs, accuracy)}",
        "facts": {"Density": _short(group.last("density_mean"), _HUNDREDTHS), **_traffic(group)},
    }


def _losses(runs: Sequence[Run]) -> list[ValueDict]:
    counts = [[sum(n for _, n in run.series(name)) for name in ("replies", *DECLARATIONS.losses)] for run in runs]
    run_counts = zip(runs, counts, strict=True)
    return [{"run": run, "used": used, "lost": lost} for run, (used, *lost) in run_counts if any(lost)]


def _details(run: Run) -> ValueDict:
    info = run.info
    facts = {
        "Status": run.status,
        "Rounds": len(run.rounds),
        "Minutes": f"{info['seconds'] / 60:.1f}",
        "Final models, SHA-256": info.get("final_sha256"),
        "Git commit": info.get("git_hash"),
        "Model": info.get("model"),
        "Resumed after rounds": info.get("resumed_after_rounds"),
    }
    return {
        "run": run,
        "facts": {key: value for key, value in facts.items() if value is not None},
        "versions": info.get("versions") or {},
        "config": {
            key: _FOLDERS.sub("…/", value) if isinstance(value, str) else value for key, value in run.config.items()
        },
    }


# What the others are compared with, if it is there: the dense method that everybody knows.
REFERENCE = "fedavg"


def comparison(groups: Groups) -> list[str]:
    """Return sentences on the accuracy of each group, beside that of FedAvg or of the most accurate group.

    Groups whose clients have the same data, of the same seeds, are compared. Of a language model a sentence says what
    pruning cost. Runs that did not complete are left out.
    """
    complete_groups = [group for group in groups if not group.first.flaw]
    families = of_the_same_data([group for group in complete_groups if accuracy_words(group.first.headline)])
    lines = [line for family in families for line in _sentences(family, measure_of(family))]
    alone = [family[0].label for family in families if len(family) == 1 < len(families)]
    lines += [f"{label} is compared with nothing: no other has the same data and seeds." for label in alone]
    return lines + list(_on_text(complete_groups))


def traffic(group: Group) -> Statistic | None:
    return group.over(traffic_of)


def _sentences(groups: Groups, measure: str) -> Iterator[str]:
    accuracy = {group.label: 100 * statistic.mean for group in groups if (statistic := group.last(measure))}
    groups = [group for group in groups if group.label in accuracy]
    if len(groups) < 2:
        return
    federated_groups = [group for group in groups if group.system != "standalone"] or groups
    best = max(federated_groups, key=lambda group: accuracy[group.label])
    reference = next((group for group in federated_groups if group.system == REFERENCE), best)
    footnote = last_footnote(reference.runs, measure)
    models, they = ("clients' own models have", "they have") if measure == OWN else ("the global model has", "it has")
    yield f"With {reference.label}, {models} {accuracy[reference.label]:.1f} %{footnote}."
    for group in groups:
        if group is not reference:
            beside = f"{_distance(group, reference, measure)}{_cost(group, reference)}"
            yield f"With {group.label} {they} {accuracy[group.label]:.1f} %, {beside}."
    count = "One seed" if len(reference.runs) == 1 else f"{len(reference.runs)} seeds"
    yield f"{count}, {len(reference.runs[0].info.get('partition') or ())} clients: another seed may differ."


def _distance(group: Group, reference: Group, measure: str) -> str:
    distance = between(group, reference, measure)
    if distance is None or distance.doubt:
        return f"not told apart from {reference.label} ({distance.doubt if distance else 'one client'})"
    return f"{abs(100 * distance.mean):.1f} points {'above' if distance.mean > 0 else 'below'} {reference.label}"


def _cost(group: Group, reference: Group) -> str:
    operations = [Statistic.of(run.total("flops") for run in side.runs) for side in (group, reference)]
    pairs = (("traffic", traffic(group), traffic(reference)), ("computation", operations[0], operations[1]))
    shares = [
        _times(ours.mean / theirs.mean, quantity) for quantity, ours, theirs in pairs if ours and theirs and theirs.mean
    ]
    return f", with {' and '.join(shares)}" if shares else ""


def _times(ratio: float, quantity: str) -> str:
    if ratio < 0.005:
        return f"next to no {quantity}"
    if 0.995 <= ratio < 1.005:
        return f"the same {quantity}"
    if ratio < 1.95:
        return f"{abs(100 * (1 - ratio)):.0f} % {'less' if ratio < 1 else 'more'} {quantity}"
    return f"{ratio:.{0 if ratio >= 9.95 else 1}f} times the {quantity}"


def _on_text(groups: Groups) -> Iterator[str]:
    for group in groups:
        text, dense, own, pruned = _perplexities(group)
        density = group.last("density_global")
        if dense and pruned and density:
            alone = f", and the clients' own models have {own.mean:.2f}" if own else ""
            yield (
                f"{group.label}: with {100 * density.mean:.0f} % of the weights in its pruned matrices, the global "
                f"model has perplexity {pruned.mean:.2f} on {text}; the dense model has {dense.mean:.2f}{alone}."
            )
