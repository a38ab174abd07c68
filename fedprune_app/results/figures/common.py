"""The classes of figures and views, and the parts that several figures share."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedprune_app.core.named import ValueDict, Values
from fedprune_app.results.groups import Group, Groups, Statistic
from fedprune_app.results.reader import Run

Trace = ValueDict
_LONGEST_NAME = 24  # characters of a class
# Up to two decimals for ticks of shares, since an axis may span less than 1 %.
SHARE_TICKS = ".2~%"
HEATMAP_UP_TO = 200  # clients a side; with more a cell would be smaller than a pixel


@dataclass(frozen=True)
class Variant:
    """One view of a figure, which a reader selects by its ``name``.

    ``note`` is shown with the view, below the figure's caption. ``panels`` has the titles of several plots side by
    side; traces select theirs by plotly's ``xaxis`` and ``yaxis``.
    """

    name: str
    traces: list[Trace]
    layout: ValueDict = field(default_factory=dict)
    note: str = ""
    panels: tuple[str, ...] = ()


Variants = list[Variant]


@dataclass(frozen=True)
class Figure:
    """A titled plot with one or more views; with ``rows`` > 0 its height fits that many rows."""

    key: str
    title: str
    caption: str
    variants: Variants
    rows: int = 0
    wide: bool = False


def text_of(text: str) -> str:
    return html.escape(text, quote=False)


def axis(title: str, **more: Any) -> ValueDict:
    return {"title": {"text": title}, **more}


def group_lines(
    groups: Groups, title: str, points: Callable[[Group], Mapping[Any, float]], layout: Values, **style: Any
) -> Variants:
    """Return a view with a line through the points of each group; no view if no group has points."""
    curves = [(index, group, curve) for index, group in enumerate(groups) if (curve := points(group))]
    traces = [line(index, group, list(curve), list(curve.values()), **style) for index, group, curve in curves]
    return [Variant(title, traces, dict(layout))] if traces else []


def line(series: int, group: Group, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Trace:
    """Return a line of a group, with a marker at each point unless ``more`` overrides it."""
    trace: Trace = {"type": "scatter", "series": series, "name": text_of(group.label)}
    return trace | {"x": x, "y": y, "mode": "lines+markers"} | more


def joining(series: int, x: Sequence[float], y: Sequence[float], **more: Any) -> Trace:
    return {"type": "scatter", "series": series, "x": x, "y": y, "mode": "lines", "hoverinfo": "skip"} | more


def heatmap(x: Sequence[Any], y: Sequence[Any], z: Sequence[Any], template: str, panel: int = 1, **more: Any) -> Trace:
    """Return cells z (y, x) in one of a view's panels; ``template`` is the text under a pointer."""
    axes = {"xaxis": f"x{panel}", "yaxis": f"y{panel}"} if panel > 1 else {}
    return {"type": "heatmap", "x": x, "y": y, "z": z, "hovertemplate": f"{template}<extra></extra>"} | axes | more


def point(group: Group, series: int, x: float, outcome: Statistic, template: str) -> Trace:
    """Return a group's point at ``x`` with the mean ``outcome`` of its runs, and their deviation as a bar.

    ``template`` is the text under a pointer, in plotly's syntax.
    """
    trace: Trace = {
        "type": "scatter",
        "series": series,
        "name": text_of(group.label),
        "x": [x],
        "y": [outcome.mean],
        "mode": "markers",
        "marker": {"size": 10},
        "hovertemplate": f"{template}<extra>{text_of(group.label)}</extra>",
    }
    if outcome.std:
        trace["error_y"] = {"type": "data", "array": [outcome.std], "thickness": 1.25, "width": 4}
    return trace


def number_of(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def run_name(group: Group, run: Run) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label} · seed {run.seed}"


def class_name(run: Run, label: int) -> str:
    names = (run.info.get("model") or {}).get("class_names") or []
    return str(names[label])[:_LONGEST_NAME] if label < len(names) else str(label)


def row_axis(groups: Groups) -> ValueDict:
    return {
        "tickvals": list(range(len(groups))),
        "ticktext": ["<br>".join(text_of(part[:24]) for part in group.label.split(" · ")[:3]) for group in groups],
        "range": [len(groups) - 0.4, -0.6],
    }


def megabytes_text(megabytes: float) -> str:
    decimals = 0 if megabytes >= 100 else 1 if megabytes >= 10 else 2 if megabytes >= 0.1 else 4
    return f"{megabytes:,.{decimals}f}"
