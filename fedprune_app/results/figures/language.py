"""This figure shows what language models lose by pruning."""

from collections.abc import Mapping, Sequence

from fedprune_app.results.figures.common import SHARE_TICKS, Trace, Variant, joining, line, text_of
from fedprune_app.results.groups import Group, Statistic
from fedprune_app.results.tables import model_name, perplexity_tables

_MARKERS = {"personal_mean": ("circle-open", "dot"), "global": ("diamond", "solid")}  # and the line between them


def perplexity(groups: Sequence[Group]) -> list[Variant]:
    """Return a view for each test text; runs that measured other windows of it have a view of their own."""
    layout = {
        "xaxis": {"title": {"text": "Sparsity of the global model's matrices"}, "tickformat": SHARE_TICKS},
        "yaxis": {"type": "log", "title": {"text": "Perplexity"}},
    }
    return [
        Variant(title, _perplexity_traces(groups, table), layout) for title, table in perplexity_tables(groups).items()
    ]


def _perplexity_traces(groups: Sequence[Group], rows_by_label: Mapping[str, list[Mapping[str, float]]]) -> list[Trace]:
    """Return a point for each group and model, and lines that join points which differ in density alone.

    A line begins at the dense model.
    """
    traces: list[Trace] = []
    curves: dict[tuple[str, str], list[tuple[float, float, int]]] = {}  # (sparsity, perplexity, series)
    for index, group in enumerate(groups):
        rows = rows_by_label.get(group.label, [])
        density = Statistic.of(run.last("density_global") for run in group.runs)
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
