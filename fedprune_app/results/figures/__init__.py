"""Figures are plain plotly.js traces that say what is drawn; the page decides on colours, theme and size.

Each module answers one question of the reader, and has a figure's title beside what is drawn. Every trace says which
``series`` (index into the groups) it belongs to. The page gives it that series' colour and dash, and hides it with the
legend. All text is escaped, since plotly reads a little HTML.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedprune_app.results.figures import (
    clients,
    curves,
    language,
    layers,
    losses,
    masks,
    partition,
    privacy,
    settings,
    tradeoff,
    traffic,
)
from fedprune_app.results.figures.common import Figure
from fedprune_app.results.tables import Group


def figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw all figures for which some run has data, in reading order."""
    drawn = [
        curves.accuracy(groups),
        curves.efficiency(groups),
        curves.privacy(groups),
        tradeoff.tradeoff(groups),
        settings.by_setting(groups),
        clients.accuracies(groups),
        language.perplexity(groups),
        layers.decoder_layers(groups),
        clients.by_class(groups),
        clients.density_groups(groups),
        traffic.measured(groups),
        traffic.layer_sets(groups),
        losses.losses(groups),
        layers.densities(groups),
        layers.by_round(groups),
        *curves.declared(groups),
        privacy.epsilon(groups),
        partition.partition(groups),
        masks.similarity(groups),
        masks.neighbourhood(groups),
        masks.agreement(groups),
    ]
    return [figure for figure in drawn if figure.variants]
