"""These figures show what is left of each layer."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from fedprune_app.results.figures.common import (
    SHARE_TICKS,
    Variant,
    group_lines,
    text_of,
)
from fedprune_app.results.groups import Group, Statistic


def densities(groups: Sequence[Group]) -> list[Variant]:
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"tickformat": SHARE_TICKS, "hoverformat": ".1%", "rangemode": "tozero"},
    }
    return group_lines(groups, "Layers", _densities, layout)


def _densities(group: Group) -> dict[str, float]:
    tables = [run.last_table("density_by_layer") for run in group.runs]
    layers = dict.fromkeys(layer for densities in tables for layer in densities)  # a set that keeps its order
    over_seeds = {layer: Statistic.of(densities.get(layer) for densities in tables) for layer in layers}
    return {text_of(layer): statistic.mean for layer, statistic in over_seeds.items() if statistic}


def decoder_layers(groups: Sequence[Group]) -> list[Variant]:
    layout = {
        "xaxis": {"title": {"text": "Decoder layer"}, "dtick": 1},
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
