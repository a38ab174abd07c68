"""FedSpaLLM's server in a round of recovery: the mean of the kept weights that clients trained. This rule is ours.

After pruning, clients train the kept weights on their text, and the server averages them as FedAvg does, every client
alike (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017). Masks stay.
"""

import torch
from torch import Tensor

from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload
from fedprune_app.engine.wire import Schema
from strategies.pruned_model import PrunedModel


class Recovery:
    """A recovery adds up what clients answer, with one exchange for the whole model.

    The sums of all kept weights are in memory. ``num_clients`` answers at most are added.
    """

    def __init__(self, model: PrunedModel, num_clients: int) -> None:
        self._model, self._mean = model, MaskedMean(max(1, num_clients), 1)
        self._layers = [layer for layer in range(model.dense.num_layers) if layer not in model.never_pruned()]
        self.answer = Schema.like(dict(self._kept_weights()))

    def _kept_weights(self) -> list[tuple[str, Tensor]]:
        """Return what a client sends, without values: of each matrix the kept weights, in the mask's order."""
        return [
            (f"{layer}/{name}", torch.empty(int(mask.sum()), dtype=pruned.tensors[name].dtype, device="meta"))
            for layer in self._layers
            for pruned in [self._model.layer(layer)]
            for name, mask in pruned.masks.items()
        ]

    def add(self, update: Payload) -> None:
        self._mean.add(update, 1)

    def layers(self) -> dict[int, Payload]:
        """Return the pruned layers with the mean of the clients' weights."""
        means, payloads = self._mean.mixed(), {}
        for layer in self._layers:
            payload = self._model.layer(layer)
            tensors = {}
            for name, mask in payload.masks.items():
                tensors[name] = torch.zeros_like(payload.tensors[name])
                tensors[name][mask] = means[f"{layer}/{name}"].to(tensors[name].dtype)
            payloads[layer] = Payload.pruned(tensors, payload.masks)
        return payloads
