"""Figures of masks: the similarity of clients' masks, and the density of each layer."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedprune_app.results.figures.common import (
    HEATMAP_UP_TO,
    SHARE_TICKS,
    Trace,
    Variant,
    Variants,
    axis,
    group_lines,
    heatmap,
    number_of,
    run_name,
    text_of,
)
from fedprune_app.results.groups import Group, Groups, Statistic
from fedprune_app.results.similarity import Comparison, compare

_AXES = {"xaxis": {"type": "category"}, "yaxis": {"type": "category", "autorange": "reversed"}}


def similarity(groups: Groups) -> Variants:
    """Return Dis-PFL's Figure 5: a view for each run that compared its clients' masks."""
    comparisons = [(group, run, comparison) for group in groups for run in group.runs if (comparison := compare(run))]
    return [_mask_variant(run_name(group, run), comparison) for group, run, comparison in comparisons]


def _mask_variant(name: str, comparison: Comparison) -> Variant:
    names = [str(client) for client in comparison.clients]
    panels = {
        "Cosine of label counts": (comparison.label_cosine, "cosine of label counts"),
        "1 − Hamming distance of masks": (1 - comparison.mask_distance, "1 − Hamming distance"),
    }
    traces = [
        _matrix(names, values, f"clients %{{x}} and %{{y}}<br>{quantity} %{{z:.3f}}", panel)
        for panel, (values, quantity) in enumerate(panels.values(), start=1)
    ]
    note = (
        f"Over the {number_of(len(names) * (len(names) - 1) // 2, 'pair')} of clients after round {comparison.round}, "
        f"label similarity and mask distance have linear correlation {_signed(comparison.pearson)} (Pearson) and rank "
        f"correlation {_signed(comparison.spearman)} (Spearman): below zero, clients with alike labels have alike "
        f"masks.{_one_in(len(names))}"
    )
    return Variant(name, traces, _AXES, note, tuple(panels))


def _matrix(names: Sequence[str], values: NDArray[np.float64], template: str, panel: int = 1) -> Trace:
    """Return cells without the diagonal, whose trivial values would stretch the colours."""
    cells = values.round(4).astype(object)
    np.fill_diagonal(cells, None)
    step = -(-len(names) // HEATMAP_UP_TO)
    return heatmap(names[::step], names[::step], cells[::step, ::step].tolist(), template, panel)


def _one_in(clients: int) -> str:
    step = -(-clients // HEATMAP_UP_TO)
    return f" Shown is one client in {step}." if step > 1 else ""


def agreement(groups: Groups) -> Variants:
    variants = []
    for group in groups:
        for run in group.runs:
            rows = run.info.get("partition") or ()
            documents = {row["partition"]: row["documents"] for row in rows if isinstance(row.get("documents"), list)}
            if run.masks is None or not documents:
                continue
            names = [_client_name(client, documents.get(client, ())) for client in run.masks.clients]
            trace = _matrix(names, 1 - run.masks.distance, "clients %{x} and %{y}<br>agree on %{z:.2%}")
            variants.append(Variant(run_name(group, run), [trace], _AXES, panels=("Share of equal mask entries",)))
    return variants


def _client_name(client: int, documents: Sequence[str]) -> str:
    return text_of(f"{client} {documents[0]}" if len(documents) == 1 else str(client))


def _signed(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")


# --- density of each layer --------------------------------------------------------------------------------------------


def densities(groups: Groups) -> Variants:
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"tickformat": SHARE_TICKS, "hoverformat": ".1%", "rangemode": "tozero"},
    }
    return group_lines(groups, "Layers", _densities, layout, mode="markers")  # layers are unlike: nothing is between


def _densities(group: Group) -> dict[str, float]:
    tables = [run.last_table("density_by_layer") for run in group.runs]
    layers = dict.fromkeys(layer for densities in tables for layer in densities)  # an ordered set
    over_seeds = {layer: Statistic.of(densities.get(layer) for densities in tables) for layer in layers}
    return {text_of(layer): statistic.mean for layer, statistic in over_seeds.items() if statistic}


def decoder_layers(groups: Groups) -> Variants:
    layout = {
        "xaxis": axis("Decoder layer", dtick=1),
        "yaxis": {"tickformat": SHARE_TICKS, "hoverformat": ".2%"},
    }
    views = {
        "Agreement of masks": "mask_distance",
        "Density before expansion": "kept_before_expansion",
        "after": "kept",
    }
    variants = (group_lines(groups, title, partial(_by_layer, key=key), layout) for title, key in views.items())
    return list(itertools.chain.from_iterable(variants))


def _by_layer(group: Group, key: str) -> dict[int, float]:
    tables = [run.last_table("layers") for run in group.runs]
    layers = sorted(set.intersection(*(set(table) for table in tables)), key=int)
    means = {int(layer): Statistic.of(_share(table[layer], key) for table in tables) for layer in layers}
    return {layer: statistic.mean for layer, statistic in means.items() if statistic}


def _share(row: Mapping[str, float], key: str) -> float | None:
    if row.get(key) is None:
        return None
    return 1 - row[key] if key == "mask_distance" else row[key] / row["weights"]
