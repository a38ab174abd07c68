"""FedP3's theory aggregates by permutation: each coordinate of a model is sent by one client, which chance chooses.

Yi, Gazagnadou, Richtárik, Lyu, "FedP3", ICLR 2024, Definition 2. Models are vectors (d,) of n clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def perm_k_owners(dimension: int, num_clients: int, rng: torch.Generator) -> Tensor:
    """Draw which client sends each coordinate, int64 (d,): a random permutation, cut into as many blocks as clients.

    Blocks are equal, or differ by one where n does not divide d. Each coordinate belongs to each client with
    probability 1/n. Source: Definition 2; Szlendak et al., "Permutation compressors", 2021.
    """
    if dimension < 1 or num_clients < 1:
        raise ValueError(f"{dimension} coordinates of {num_clients} clients, allowed: at least 1 of each")
    clients = torch.randperm(num_clients, generator=rng)  # the first ones have the larger blocks
    return clients[torch.randperm(dimension, generator=rng) % num_clients]


def shared_out(layer_sizes: Sequence[int], num_clients: int, whole_layers: bool, rng: torch.Generator) -> Tensor:
    """Draw which client sends each coordinate of a model of these layers, int64 (d,), by :func:`perm_k_owners`.

    With ``whole_layers`` a layer's coordinates go together. Blocks then differ by a layer, which may be large. A
    coordinate still belongs to each client with probability 1/n. ``ValueError`` for more clients than there are layers
    or coordinates. Source: Definition 2, and its "layer selection over individual elements".
    """
    count = len(layer_sizes) if whole_layers else sum(layer_sizes)
    if num_clients > count:
        what = "layers" if whole_layers else "coordinates"
        raise ValueError(f"{count} {what} for {num_clients} clients, allowed: at least one for each")
    owners = perm_k_owners(count, num_clients, rng)
    return owners.repeat_interleave(torch.tensor(layer_sizes)) if whole_layers else owners
