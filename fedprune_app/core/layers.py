"""Layers of a network, by the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def last_layers(names: Sequence[str], weights: Collection[str], count: int) -> list[str]:
    """Of ``names``, in the model's order, those of the last ``count`` layers that have one of ``weights``.

    Norms that stand between or behind these layers come with them; parameters and buffers of one layer stay together.
    ``ValueError`` for fewer layers than asked for.
    """
    layers = list(dict.fromkeys(_layer(name) for name in names))
    weighted = [layer for layer in layers if any(_layer(weight) == layer for weight in weights)]
    if not 1 <= count <= len(weighted):
        raise ValueError(f"the last {count} layers of a model with {len(weighted)}, allowed: 1 to {len(weighted)}")
    last = set(layers[layers.index(weighted[-count]) :])
    return [name for name in names if _layer(name) in last]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
