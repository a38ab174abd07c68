"""FedP3's own arithmetic: which client sends which coordinate, and the mean of a layer by attention."""

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_mean(tensors: Sequence[Sequence[Tensor]], temperature: float) -> list[Tensor]:
    """Return the mean of one layer over its clients, weighted ``softmax(-d_i / (temperature · mean d))``.

    ``d_i`` is the squared L2 distance of client i's layer (all its tensors together) from the plain mean. Where all
    distances are equal, all weights are equal. The rule is ours: FedP3's Algorithm 3 names "an attention mapping
    layer", but no signal from which it could learn. The arithmetic is in float64. The last bit depends on the order of
    the clients, so the caller sorts them.
    """
    layers = [[tensor.double() for tensor in layer] for layer in tensors]
    mean = [torch.stack(parts).mean(0) for parts in zip(*layers, strict=True)]
    distances = torch.stack(
        [torch.stack([(t - m).square().sum() for t, m in zip(layer, mean, strict=True)]).sum() for layer in layers]
    )
    weights = torch.softmax(-distances / (temperature * distances.mean().clamp(min=1e-300)), dim=0)
    return [
        torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(0).to(first.dtype)
        for parts, first in zip(zip(*layers, strict=True), tensors[0], strict=True)
    ]


def perm_k_owners(dimension: int, num_clients: int, rng: torch.Generator) -> Tensor:
    """Draw which client sends each coordinate, int64 (d,): a random permutation, cut into as many blocks as clients.

    Block sizes are equal, or differ by one where n does not divide d. Each coordinate belongs to each client with
    probability 1/n. Source: FedP3, Definition 2; Szlendak et al., "Permutation compressors", 2021.
    """
    clients = torch.randperm(num_clients, generator=rng)  # the first ones have the larger blocks
    return clients[torch.randperm(dimension, generator=rng) % num_clients]
