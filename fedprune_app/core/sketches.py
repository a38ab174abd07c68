"""FedP3's theory aggregates by permutation: each coordinate of a model is sent by one client, which chance chooses.

Yi, Gazagnadou, Richtárik, Lyu, "FedP3", ICLR 2024, Definition 2. Models are vectors (d,) of n clients.
"""

import torch
from torch import Tensor


def perm_k_owners(dimension: int, num_clients: int, rng: torch.Generator) -> Tensor:
    """Draw which client sends each coordinate, int64 (d,): a random permutation, cut into as many blocks as clients.

    Blocks are equal, or differ by one where n does not divide d. Each coordinate belongs to each client with
    probability 1/n. Source: Definition 2; Szlendak et al., "Permutation compressors", 2021.
    """
    clients = torch.randperm(num_clients, generator=rng)  # the first ones have the larger blocks
    return clients[torch.randperm(dimension, generator=rng) % num_clients]
