"""These figures show how alike the clients' masks are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedprune_app.results.figures.common import (
    HEATMAP_UP_TO,
    Trace,
    Variant,
    class_name,
    heatmap,
    number_of,
    run_name,
    text_of,
)
from fedprune_app.results.groups import Group
from fedprune_app.results.reader import Masks, Run
from fedprune_app.results.similarity import Comparison, compare, projected

_NAMED = 12  # neighbours of a client


def similarity(groups: Sequence[Group]) -> list[Variant]:
    """Return Dis-PFL's Figure 5: a view for each run that compared its clients' masks."""
    comparisons = [(group, run, comparison) for group in groups for run in group.runs if (comparison := compare(run))]
    return [_mask_variant(run_name(group, run), comparison) for group, run, comparison in comparisons]


def _mask_variant(name: str, comparison: Comparison) -> Variant:
    clients = len(comparison.clients)
    step = -(-clients // HEATMAP_UP_TO)
    names = [str(client) for client in comparison.clients[::step]]
    panels = {
        "Cosine of label counts": (comparison.label_cosine, "cosine of label counts"),
        "1 − Hamming distance of masks": (1 - comparison.mask_distance, "1 − Hamming distance"),
    }
    traces: list[Trace] = []
    for panel, (values, quantity) in enumerate(panels.values(), start=1):
        template = f"clients %{{x}} and %{{y}}<br>{quantity} %{{z:.3f}}"
        traces.append(heatmap(names, names, _without_diagonal(values)[::step, ::step].tolist(), template, panel))
    note = (
        f"Over the {number_of(clients * (clients - 1) // 2, 'pair')} of clients after round {comparison.round}, "
        f"label similarity and mask distance have linear correlation {_signed(comparison.pearson)} (Pearson) and rank "
        f"correlation {_signed(comparison.spearman)} (Spearman): below zero, clients with alike labels have alike "
        f"masks."
    )
    if step > 1:
        note += f" Shown is one client in {step}."
    axes = {"xaxis": {"type": "category"}, "yaxis": {"type": "category", "autorange": "reversed"}}
    return Variant(name, traces, axes, note, tuple(panels))


def _without_diagonal(values: NDArray[np.float64]) -> NDArray[np.object_]:
    """Return cells without those of a client with itself, which say nothing and would stretch the colours."""
    cells = values.round(4).astype(object)
    np.fill_diagonal(cells, None)
    return cells


def neighbourhood(groups: Sequence[Group]) -> list[Variant]:
    """Return a map for each run of its clients by their masks, with the links over which they exchange models."""
    return [_map(group, run, run.masks) for group in groups for run in group.runs if run.masks and _differ(run.masks)]


def _differ(masks: Masks) -> bool:
    return len(masks.clients) > 2 and bool(masks.distance.any())


def _map(group: Group, run: Run, masks: Masks) -> Variant:
    """Return a view of a run: points for clients, and lines for the links of the last round."""
    places, explained = projected(masks.distance)
    spot = dict(zip(masks.clients, places.round(4).tolist(), strict=True))
    x: list[float | None] = []
    y: list[float | None] = []
    pairs = {tuple(sorted((client, sender))) for client, senders in masks.links.items() for sender in senders}
    for first, second in sorted(pairs):
        if first in spot and second in spot:
            x += [spot[first][0], spot[second][0], None]
            y += [spot[first][1], spot[second][1], None]
    lines: list[Trace] = [{"type": "scatter", "link": True, "x": x, "y": y, "mode": "lines", "hoverinfo": "skip"}]
    partition = {int(row["partition"]): row.get("train") or [] for row in run.info.get("partition") or ()}
    points: Trace = {
        "type": "scatter",
        "node": True,
        "x": [place[0] for place in spot.values()],
        "y": [place[1] for place in spot.values()],
        "mode": "markers+text",
        "text": [str(client) for client in spot],
        "textposition": "top center",
        "customdata": [text_of(_about(run, client, masks, partition.get(client, []))) for client in spot],
        "hovertemplate": "client %{text}%{customdata}<extra></extra>",
    }
    hidden = {"showticklabels": False, "showgrid": False, "showline": False}
    layout = {"xaxis": hidden, "yaxis": hidden | {"scaleanchor": "x"}, "hovermode": "closest"}
    note = f"Two dimensions hold {explained:.0%} of the distances between masks after round {masks.round}."
    if pairs:
        note += " A line joins two clients of which one received the other's model in that round."
    return Variant(run_name(group, run), [*(lines if x else []), points], layout, note)


def _about(run: Run, client: int, masks: Masks, counts: Sequence[int]) -> str:
    """Return what the map says of a client: its most frequent class, its nearest client, and its neighbours."""
    words = ""
    if any(counts):
        words += f", mostly class {class_name(run, int(np.argmax(counts)))}"
    index = masks.clients.index(client)
    distances = masks.distance[index].copy()
    distances[index] = np.inf
    nearest = int(distances.argmin())
    words += f", nearest: client {masks.clients[nearest]} at {distances[nearest]:.3f}"
    if senders := masks.links.get(client):
        words += f", received from {', '.join(map(str, senders[:_NAMED]))}{' ...' if len(senders) > _NAMED else ''}"
    return words


def agreement(groups: Sequence[Group]) -> list[Variant]:
    """Return a view for each run on a language model that compared its clients' masks."""
    variants = []
    for group in groups:
        for run in group.runs:
            rows = run.info.get("partition") or ()
            documents = {row["partition"]: row["documents"] for row in rows if isinstance(row.get("documents"), list)}
            if run.masks is None or not documents:
                continue
            names = []
            for client in run.masks.clients:
                own_documents = documents.get(client) or []
                names.append(text_of(f"{client} {own_documents[0]}" if len(own_documents) == 1 else str(client)))
            step = -(-len(names) // HEATMAP_UP_TO)
            cells = _without_diagonal(1 - run.masks.distance)[::step, ::step].tolist()
            template = "clients %{x} and %{y}<br>agree on %{z:.2%}"
            trace = heatmap(names[::step], names[::step], cells, template)
            axes = {"xaxis": {"type": "category"}, "yaxis": {"type": "category", "autorange": "reversed"}}
            variants.append(Variant(run_name(group, run), [trace], axes, panels=("Share of equal mask entries",)))
    return variants


def _signed(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")
