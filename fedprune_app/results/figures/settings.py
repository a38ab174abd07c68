"""Figures of settings: the effect of each on the headline, the costs of accuracy, and perplexity by sparsity."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

from fedprune_app.core.named import ValueDict, Values
from fedprune_app.results.columns import accuracy, epsilon_footnote, traffic_of
from fedprune_app.results.figures.common import (
    SHARE_TICKS,
    Trace,
    Variant,
    Variants,
    axis,
    joining,
    line,
    point,
    text_of,
)
from fedprune_app.results.groups import Groups, Statistic, compared_settings
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import Run
from fedprune_app.results.tables import accuracy_words, compared_by, model_name, perplexity_tables

_LOG_FROM = 30.0  # from this ratio of values on, a linear axis would press most points into a corner


@dataclass(frozen=True)
class _Point:
    value: float  # of the setting
    series: int
    outcome: Statistic


def _perplexity(run: Run) -> float | None:
    return None if run.headline.startswith("accuracy") else run.last(run.headline)


# The final numbers of a run, by the suffix of their views' names.
_NUMBERS: Mapping[str, Callable[[Run], float | None]] = {
    "": accuracy,
    ", validation": partial(Run.last, field="accuracy_validation_mean"),
    ", perplexity": _perplexity,
}


def by_setting(groups: Groups) -> Iterator[Variant]:
    settings = [compared_settings(group.first) for group in groups]
    for key in sorted({key for config in settings for key in config}):
        if len({repr(config.get(key)) for config in settings}) == 1:
            continue
        for suffix, number in _NUMBERS.items():
            lines = _lines(groups, settings, key, number)
            values = [{p.value for p in line} for line in lines]
            # some line has two values, or there are several values, as in a search
            if any(len(numbers) > 1 for numbers in values) or len(set().union(*values)) > 2:
                is_share = number is not _perplexity
                yield Variant(key + suffix, _traces(groups, key, lines, is_share), _layout(key, lines, is_share))


def _lines(
    groups: Groups, settings: Sequence[Values], key: str, number: Callable[[Run], float | None]
) -> list[list[_Point]]:
    """Return, for each line, the points of groups of a system that differ only in ``key``, in the order of its values.

    A system with only one value has no points.
    """
    lines: dict[tuple[str, str], list[_Point]] = {}
    values: dict[str, set[float]] = {}
    for index, (group, config) in enumerate(zip(groups, settings, strict=True)):
        value, outcome = config.get(key), group.over(number)
        if _is_number(value) and outcome:
            values.setdefault(group.system, set()).add(value)
            other_settings = sorted((name, repr(other)) for name, other in config.items() if name != key)
            line = lines.setdefault((group.system, repr(other_settings)), [])
            line.append(_Point(float(value), index, outcome))
    varied = [line for (system, _), line in lines.items() if len(values[system]) > 1]
    return [sorted(line, key=lambda p: (p.value, p.series)) for line in varied]


def _traces(groups: Groups, key: str, lines: Sequence[Sequence[_Point]], is_share: bool) -> list[Trace]:
    joined = [
        joining(line[0].series, [p.value for p in line], [p.outcome.mean for p in line], thin=True)
        for line in lines
        if len(line) > 1
    ]
    template = f"%{{y:{'.2%' if is_share else '.4~g'}}} with {text_of(key)} = %{{x:.4~g}}"
    points = [p for line in lines for p in line]
    return joined + [point(groups[p.series], p.series, p.value, p.outcome, template) for p in points]


def _layout(key: str, lines: Sequence[Sequence[_Point]], is_share: bool) -> ValueDict:
    values = [p.value for line in lines for p in line]
    x_axis = axis(text_of(key))
    if min(values) > 0 and max(values) / min(values) >= _LOG_FROM:
        x_axis["type"] = "log"
    y_axis = {"tickformat": SHARE_TICKS} if is_share else axis("Perplexity")
    return {"xaxis": x_axis, "yaxis": y_axis, "hovermode": "closest"}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def by_cost(groups: Groups) -> Variants:
    """Return a view for each cost with at least two settings; a single point shows no trade-off."""
    costs: dict[str, tuple[str, Callable[[Run], float | None], float]] = {
        "Privacy": (f"Largest ε of any client{epsilon_footnote(groups)}", lambda run: run.last("epsilon_max"), 1),
        "Traffic": ("Measured traffic (MB)", traffic_of, MEGABYTE),
    }
    by_label = compared_by(groups)
    variants = []
    for title, (cost_title, cost, unit) in costs.items():
        traces: list[Trace] = []
        for index, group in enumerate(groups):
            expense = group.over(cost)
            accuracy = by_label[group.label]
            outcome = group.last(accuracy) if accuracy_words(accuracy) else None
            if expense is None or outcome is None:
                continue
            traces.append(point(group, index, expense.mean / unit, outcome, "%{y:.2%} at %{x:.3~g}"))
        if len(traces) < 2:
            continue
        layout = {"xaxis": axis(cost_title, rangemode="tozero"), "yaxis": {"tickformat": SHARE_TICKS}}
        variants.append(Variant(title, traces, layout | {"hovermode": "closest"}))
    return variants


# --- perplexity of language models ------------------------------------------------------------------------------------


_MARKERS = {"personal_mean": ("circle-open", "dot"), "global": ("diamond", "solid")}  # and the line between them


def perplexity(groups: Groups) -> Variants:
    """Return a view for each test text and its measured windows."""
    layout = {
        "xaxis": axis("Sparsity of the global model's matrices", tickformat=SHARE_TICKS),
        "yaxis": axis("Perplexity", type="log"),
    }
    return [
        Variant(title, _perplexity_traces(groups, table), layout) for title, table in perplexity_tables(groups).items()
    ]


def _perplexity_traces(groups: Groups, rows_by_label: Mapping[str, list[Mapping[str, float]]]) -> list[Trace]:
    """Return a point for each group and model, and lines from the dense model through points that differ in density."""
    traces: list[Trace] = []
    curves: dict[tuple[str, str], list[tuple[float, float, int]]] = {}  # (sparsity, perplexity, series)
    for index, group in enumerate(groups):
        rows = rows_by_label.get(group.label, [])
        density = group.last("density_global")
        if not rows or density is None:
            continue
        sparsity = 1 - density.mean
        dense = Statistic.of(row.get("dense") for row in rows)
        settings = repr((group.system, [(key, value) for key, value in group.settings.items() if key != "density"]))
        for key, (symbol, _) in _MARKERS.items():
            if value := Statistic.of(row.get(key) for row in rows):
                start = [(0.0, dense.mean, index)] if dense else []
                curves.setdefault((key, settings), start).append((sparsity, value.mean, index))
                name = text_of(f"{group.label}, {model_name(key, group)}")
                marker = {"symbol": symbol, "size": 10}
                traces.append(line(index, group, [sparsity], [value.mean], name=name, mode="markers", marker=marker))
    lines: list[Trace] = []
    for (key, _), points in curves.items():
        x, y, _ = zip(*sorted(points), strict=True)
        dash = {"dash": _MARKERS[key][1], "width": 1.25}
        lines.append(joining(points[0][2], list(x), list(y), line=dash))
    return lines + traces
