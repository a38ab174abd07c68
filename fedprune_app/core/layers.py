"""Layers of a network, found by the names of their tensors, and choices of layers for a client."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np


def last_layers(names: Sequence[str], weights: Collection[str], count: int) -> list[str]:
    """Return those of ``names`` that belong to the last ``count`` layers with one of ``weights``, in the model's order.

    Norms between or after these layers are included. Parameters and buffers of one layer stay together. ``ValueError``
    if the model has fewer layers than ``count``.
    """
    layers = list(dict.fromkeys(_layer(name) for name in names))
    weighted = [layer for layer in layers if any(_layer(weight) == layer for weight in weights)]
    if not 1 <= count <= len(weighted):
        raise ValueError(f"the last {count} layers of a model with {len(weighted)}, allowed: 1 to {len(weighted)}")
    last = set(layers[layers.index(weighted[-count]) :])
    return [name for name in names if _layer(name) in last]


def layers_of(names: Sequence[str], weights: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the layers of a network in its order: name of each convolution or linear layer → names of its tensors.

    ``names`` are tensors in the model's order, ``weights`` those of convolutions and linear layers. Biases, and norms
    with their running statistics, belong to the layer before them, and so does the projection of a residual block
    (torchvision's ``downsample``), which gives ResNet-18 its 18 layers. Every name is in exactly one layer.
    ``ValueError`` if the first tensor belongs to no layer.
    """
    owner: dict[str, str] = {}  # module → layer
    layers: dict[str, list[str]] = {}
    weighted = {_layer(weight) for weight in weights}
    current = ""
    for name in names:
        module = _layer(name)
        if module not in owner:
            if module in weighted and "downsample" not in module.split("."):
                current = module
            if not current:
                raise ValueError(
                    f"tensor '{name}' comes before the first layer, allowed: a convolution or linear layer"
                )
            owner[module] = current
        layers.setdefault(owner[module], []).append(name)
    return {layer: tuple(tensors) for layer, tensors in layers.items()}


def consecutive(layers: Sequence[str], first: int, count: int) -> tuple[str, ...]:
    """Return ``count`` layers from position ``first`` on, in the model's order.

    After the last layer the first one follows.

    >>> consecutive(["conv1", "conv2", "fc1"], first=2, count=2)
    ('conv1', 'fc1')
    """
    selection = {layers[(first + i) % len(layers)] for i in range(_valid_count(count, layers))}
    return tuple(layer for layer in layers if layer in selection)


def drawn(layers: Sequence[str], counts: Sequence[int], rng: np.random.Generator) -> tuple[str, ...]:
    """Draw a number of layers uniformly from ``counts``, then that many layers uniformly without replacement."""
    count = _valid_count(counts[int(rng.integers(len(counts)))], layers)
    selection = {layers[i] for i in rng.permutation(len(layers))[:count]}
    return tuple(layer for layer in layers if layer in selection)


def _valid_count(count: int, layers: Sequence[str]) -> int:
    if not 1 <= count <= len(layers):
        raise ValueError(f"{count} of {len(layers)} layers, allowed: 1 to {len(layers)}")
    return count


def matching(layers: Sequence[str], pattern: str) -> tuple[str, ...]:
    """Return the layers that ``pattern`` names; its parts are separated by blanks or commas.

    * A name selects this layer and all layers below it: ``layer2`` includes ``layer2.0``.
    * A minus before a name removes these layers. A pattern that begins with a minus removes from all layers.

    ``ValueError`` for a part that names no layer, and for a pattern that leaves no layer.

    >>> layers = ["conv1", "layer2.0", "layer2.1"]
    >>> matching(layers, "layer2"), matching(layers, "-layer2.0")
    (('layer2.0', 'layer2.1'), ('conv1', 'layer2.1'))
    """
    parts = pattern.replace(",", " ").split()
    selection = set(layers) if parts and parts[0].startswith("-") else set()
    for part in parts:
        name = part.removeprefix("-")
        matches = {layer for layer in layers if layer == name or layer.startswith(f"{name}.")}
        if not matches:
            raise ValueError(f"'{name}' names no hidden layer, allowed: {', '.join(layers)}")
        selection = selection - matches if part.startswith("-") else selection | matches
    if not selection:
        raise ValueError(f"'{pattern}' names no hidden layer, allowed: at least one of {', '.join(layers)}")
    return tuple(layer for layer in layers if layer in selection)


def within_capacity(
    sizes: Mapping[str, int], prunable: Mapping[str, int], head: str, first: int, density: float, capacity: float
) -> tuple[tuple[str, ...], float]:
    """Return the hidden layers that a client of ``capacity`` trains, and the density of the others.

    The client has room for the share ``capacity`` of all parameters.

    Layers are selected in order from position ``first`` on, while the deployed model stays within the capacity. It
    consists of these layers and the head in full, and of ``density`` of the others' weights. If not even one layer
    fits, the client trains the smallest layer, and the others are as dense as there is room for. ``sizes`` are
    parameters per layer; ``prunable`` are those of them that may be pruned. ``ValueError`` if not even the head and the
    smallest layer fit.
    """
    room = capacity * sum(sizes.values()) + 1e-6
    hidden = [layer for layer in sizes if layer != head]
    selection: set[str] = set()
    for layer in hidden[first:] + hidden[:first]:
        if deployed(sizes, prunable, {*selection, layer, head}, density) <= room:
            selection.add(layer)
    if not selection:
        selection = {min(hidden, key=lambda layer: sizes[layer])}
        minimum = deployed(sizes, prunable, {*selection, head}, 0.0)
        remainder = deployed(sizes, prunable, {*selection, head}, 1.0) - minimum
        if room <= minimum:
            share = minimum / sum(sizes.values())
            raise ValueError(f"capacity is {capacity:g}, allowed: above {share:.3g}, the last and the smallest layer")
        density = min(density, (room - minimum) / remainder)
    return tuple(layer for layer in hidden if layer in selection), density


def deployed(sizes: Mapping[str, int], prunable: Mapping[str, int], dense: Collection[str], density: float) -> float:
    """Return how many parameters a client holds.

    ``dense`` layers count in full. Of each other layer's ``prunable`` parameters the share ``density`` counts.
    """
    return sum(
        size if layer in dense else size - prunable[layer] + density * prunable[layer] for layer, size in sizes.items()
    )


def assign_layers(
    num_layers: int, shares: Mapping[int, float], rng: np.random.Generator, first: Collection[int] = ()
) -> dict[int, list[int]]:
    """Return distinct layers for each client, dealt by a shuffled round-robin over shuffled clients.

    :func:`layer_counts` turns each client's share into a number of layers. If the shares add up to 1, every layer has a
    client. Two layers' numbers of clients differ by at most one, and layers in ``first`` then have the larger number.
    ``ValueError`` for a share outside (0, 1].
    """
    order = sorted(rng.permutation(num_layers).tolist(), key=lambda layer: layer not in first)
    clients = rng.permutation(sorted(shares)).tolist()
    layers_by_client, start = {}, 0
    for client, count in layer_counts(num_layers, {client: shares[client] for client in clients}).items():
        layers_by_client[client] = sorted(order[(start + i) % num_layers] for i in range(count))
        start += count
    return dict(sorted(layers_by_client.items()))


def layer_counts(num_layers: int, shares: Mapping[int, float]) -> dict[int, int]:
    """Return how many of ``num_layers`` each client gets: its share, rounded up or down, and at least one.

    The counts add up to the rounded sum of the shares, or to one layer per client if that is more. The shares with the
    largest remainders are rounded up; among equal remainders those listed first. ``ValueError`` for a share outside (0,
    1].

    >>> layer_counts(5, {0: 0.5, 1: 0.3, 2: 0.2})
    {0: 3, 1: 1, 2: 1}
    """
    if invalid_shares := [share for share in shares.values() if not 0 < share <= 1]:
        raise ValueError(f"a client's share of the layers is {invalid_shares[0]:g}, allowed: above 0 and at most 1")
    targets = {client: num_layers * share for client, share in shares.items()}
    counts = {client: max(1, math.floor(number + 1e-6)) for client, number in targets.items()}
    num_missing = math.floor(sum(targets.values()) + 0.5 + 1e-6) - sum(counts.values())
    order = sorted(targets, key=lambda client: round(counts[client] - targets[client], 6))  # stable
    return {client: counts[client] + (client in order[: max(num_missing, 0)]) for client in targets}


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
