"""This figure shows what was lost when: replies that failed or came too late, and clients that dropped out."""

from __future__ import annotations

from collections.abc import Sequence

from fedprune_app.results.declarations import MEASURES
from fedprune_app.results.figures.common import Trace, Variant, number_of, text_of
from fedprune_app.results.groups import Group
from fedprune_app.results.reader import Run

_HATCHES = ("/", "x", ".", "-", "+")
_WORDS = {"/": "hatched", "x": "crossed", ".": "dotted", "-": "striped", "+": "checked"}


def by_reason(groups: Sequence[Group]) -> list[Variant]:
    """Return a view for each run in which something was lost, with bars for each round."""
    variants = []
    for index, group in enumerate(groups):
        for run in group.runs:
            name = group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}"
            if variant := _variant(name, index, run):
                variants.append(variant)
    return variants


def _variant(name: str, index: int, run: Run) -> Variant | None:
    kinds = MEASURES.losses
    traces: list[Trace] = []
    notes = []
    for (column, title), hatch in zip(kinds.items(), _HATCHES, strict=False):
        losses = [(round, count) for round, count in run.series(column) if count]
        if not losses:
            continue
        rounds, counts = zip(*losses, strict=True)
        traces.append(
            {
                "type": "bar",
                "series": index,
                "name": text_of(title),
                "x": list(rounds),
                "y": list(counts),
                "marker": {"pattern": {"shape": hatch}},
                "hovertemplate": f"round %{{x}}: %{{y}} {title.lower()}<extra></extra>",
            }
        )
        notes.append(f"{title.lower()} {_WORDS[hatch]}, {int(sum(counts)):,}")
    if not traces:
        return None
    last = run.rounds[-1]["round"]
    most = max(sum(row.get(column) or 0 for column in kinds) for row in run.rounds)
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "Round"}, "range": [0.5, last + 0.5]},
        "yaxis": {"title": {"text": "Clients"}, "rangemode": "tozero"} | ({"dtick": 1} if most <= 10 else {}),
    }
    return Variant(name, traces, layout, note=f"In {number_of(len(run.rounds), 'round')}: {'; '.join(notes)}.")
