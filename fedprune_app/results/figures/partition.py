"""This figure shows which client has which classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedprune_app.results.figures.common import Figure, Trace, Variant, class_name
from fedprune_app.results.reader import Run
from fedprune_app.results.tables import Group


def partition(groups: Sequence[Group]) -> Figure:
    """The figure shows how many examples of each class each client trains on."""
    return Figure(
        "partition",
        "Who has which classes",
        "Training examples of each class at each client; an empty cell is none.",
        _partition_variants(groups),
        wide=True,
    )


def _partition_variants(groups: Sequence[Group]) -> list[Variant]:
    """Return one view for each distinct way in which the data were dealt out: compared systems usually share it."""
    views: dict[str, Variant] = {}
    titles: Counter[str] = Counter()
    for owner, run in ((group.label, run) for group in groups for run in group.runs):
        rows = [row for row in run.info.get("partition") or [] if row.get("train")]
        if not rows or repr(rows) in views:
            continue
        title = f"seed {run.seed}"
        titles[title] += 1
        if titles[title] > 1:
            title += f" · {owner}"
        classes = max(len(row["train"]) for row in rows)
        counts = [
            [(row["train"][label] or None) if label < len(row["train"]) else None for row in rows]
            for label in range(classes)
        ]
        trace: Trace = {
            "type": "heatmap",
            "x": [row["partition"] for row in rows],
            "y": _class_names(run, classes),
            "z": counts,  # (classes, clients)
            "hovertemplate": "client %{x}, class %{y}: %{z} examples<extra></extra>",
        }
        axis: dict[str, Any] = {"title": {"text": "Class"}} | ({"dtick": 1} if classes <= 20 else {})
        axis |= {"type": "category", "automargin": True} if _named(run, classes) else {}
        views[repr(rows)] = Variant(title, [trace], {"xaxis": {"title": {"text": "Client"}}, "yaxis": axis})
    return list(views.values())


def _named(run: Run, classes: int) -> list[str]:
    """Return the names of the classes, none where they are numbers."""
    names = (run.info.get("model") or {}).get("class_names") or []
    return [class_name(run, label) for label in range(classes)] if len(names) == classes else []


def _class_names(run: Run, classes: int) -> list[str] | list[int]:
    return _named(run, classes) or list(range(classes))
