"""This figure shows what language models lose by pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedprune_app.results.figures.common import SHARE_TICKS, Trace, Variant, joining, line, text_of
from fedprune_app.results.groups import Group, Statistic
from fedprune_app.results.perplexity_tables import model_name, perplexity_tables

_MARKERS = {"personal_mean": ("circle-open", "dot"), "global": ("diamond", "solid")}  # and the line between them


def perplexity(groups: Sequence[Group]) -> list[Variant]:
    """Return a view for each test text; runs that measured other windows of it have a view of their own."""
    layout = {
        "xaxis": {"title": {"text": "Sparsity of the global model's matrices"}, "tickformat": SHARE_TICKS},
        "yaxis": {"type": "log", "title": {"text": "Perplexity"}},
    }
    tables = perplexity_tables(groups)
    return [Variant(title, _perplexity_traces(groups, table), layout) for title, table in tables.items()]


def _perplexity_traces(groups: Sequence[Group], rows_by_label: Mapping[str, list[Mapping[str, float]]]) -> list[Trace]:
    """Return a point for each group and model, and lines that join points which differ in density alone.

    A line begins at the dense model.
    """
    traces: list[Trace] = []
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (sparsity, perplexity)
    series: dict[tuple[str, str], int] = {}  # of the first point of each curve
    for index, group in enumerate(groups):
        rows = rows_by_label.get(group.label, [])
        densities = Statistic.of(run.last("density_global") for run in group.runs)
        if not rows or densities is None:
            continue
        sparsity = 1 - densities.mean
        settings = repr((group.system, [(key, value) for key, value in group.settings.items() if key != "density"]))
        for key, (symbol, _) in _MARKERS.items():
            value = Statistic.of(row.get(key) for row in rows)
            if value is None:
                continue
            dense = Statistic.of(row.get("dense") for row in rows)
            curve = curves.setdefault((key, settings), [(0.0, dense.mean)] if dense else [])
            curve.append((sparsity, value.mean))
            series.setdefault((key, settings), index)
            name = text_of(f"{group.label}, {model_name(key, group)}")
            marker = {"symbol": symbol, "size": 10}
            traces.append(line(index, group, [sparsity], [value.mean], name=name, mode="markers", marker=marker))
    lines: list[Trace] = []
    for (key, settings), points in curves.items():
        if len(points) > 1:
            x, y = zip(*sorted(points), strict=True)
            dash = {"dash": _MARKERS[key][1], "width": 1.25}
            lines.append(joining(series[key, settings], list(x), list(y), line=dash))
    return lines + traces
