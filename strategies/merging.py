"""How FedSpaLLM's server makes a layer of what clients send: the paper's rule, FedPrLLM's, and one of ours.

SparseGPT moves the weights that stay to make up for those that it removes, for one client's text and one client's mask.
A mean over clients makes up for nobody's removals. With ``fedspallm.merge = "hessians"`` clients send Hessians alone,
and the server prunes each matrix once, by their sum: as SparseGPT would with all text in one place. Each layer follows
the pruned layers before it, which clients receive. SparseGPT goes from left to right and looks at each column once.
With ``fedspallm.refine`` the server prunes by ALPS in its place, which solves for a whole matrix at once.

A Hessian tells more of a text than masks do: docs/systems/fedspallm.md says what. With ``dp.enabled`` clients send
noised sums of clipped second moments in place of Hessians, and the server takes out what noise it can before it prunes.

With ``fedspallm.merge = "masks"`` clients send masks alone, and vote by these.

A merge adds up the replies to one layer at a time. ``clients_prune`` says whether these have a pruned model of their
own.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedprune_app.config import Config
from fedprune_app.config.fedspallm import CUT
from fedprune_app.core import hessians
from fedprune_app.core.aggregate import L0Mean
from fedprune_app.core.alps import alps
from fedprune_app.core.payload import Payload
from fedprune_app.core.sparsegpt import sparsegpt_together
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.clients import Roster
from fedprune_app.learning.language_models import observed_inputs
from fedprune_app.learning.planned_noise import segment_noise
from fedprune_app.models.cutting import Cut
from strategies.pruned_model import PrunedModel


class MeanMerge:
    """The paper's rule: each weight's mean over the clients that kept the weight, and masks expanded to the density."""

    clients_prune = True

    cut: Cut | None = None

    def __init__(self, config: Config, model: PrunedModel, clients: Roster) -> None:
        self.config, self.model = config, model
        self._mean = L0Mean(1)

    def answer(self, layer: int) -> Schema:
        """Return what a reply to a layer holds."""
        return self.model.schema(layer)

    def begin(self, layer: int, pruners: Iterable[int]) -> None:
        """Get ready for a layer that these clients prune."""
        self._mean = L0Mean(max(len([*pruners]), 1))

    def add(self, client: int, update: Payload) -> None:
        """Add a client's layer. ``ValueError`` for one that cannot be added, of which nothing counts."""
        self._mean.add(update)

    def made(self, layer: int, row: dict[str, Any]) -> Payload:
        """Return the layer (lines 18 to 20), empty if nobody sent it; ``row`` is what the record says of it."""
        mean = self._mean.mean()
        new = self._mean.expanded(self.config.density, n_of_m=self.config.fedspallm.n_of_m(), mean=mean)
        self._mean = L0Mean(1)
        if mean.masks:
            row |= {"weights": mean.num_elements(), "kept_before_expansion": mean.num_kept()}
        return new


class MaskMerge(MeanMerge):
    """FedPrLLM's rule: clients vote by their masks alone, and the weights that stay are the dense ones.

    Guo et al., "Exploring Federated Pruning for Large Language Models", 2025, arXiv 2505.13547, in the form that its
    experiments choose: one shot, votes compared over a whole matrix, weights not scaled. The text does not say which
    entries with equal votes stay: here those with the largest dense weights.
    """

    def answer(self, layer: int) -> Schema:
        schema = super().answer(layer)
        return replace(schema, dtypes=dict.fromkeys(schema.dtypes, torch.bool))

    def begin(self, layer: int, pruners: Iterable[int]) -> None:
        super().begin(layer, pruners)
        self._dense = self.model.dense.layer_tensors(layer)

    def add(self, client: int, update: Payload) -> None:
        super().add(client, self._weights(update.masks))

    def made(self, layer: int, row: dict[str, Any]) -> Payload:
        return self._weights(super().made(layer, row).masks)

    def _weights(self, masks: Mapping[str, Tensor]) -> Payload:
        return Payload.pruned({name: self._dense[name] for name in masks}, masks)


class HessianMerge:
    """Our rule: SparseGPT or ALPS by the sum of the clients' Hessians.

    ``groups`` are the matrices of a layer that have the same inputs. With ``dp.enabled`` the clients' sums have noise,
    whose standard deviation the server knows. With ``cut`` heads and units go, not weights.
    """

    clients_prune = False

    def __init__(self, config: Config, model: PrunedModel, clients: Roster) -> None:
        dense = model.dense
        self.config, self.options, self.dense, self.clients = config, config.fedspallm, dense, clients
        self.cut = Cut(dense, config.density) if config.fedspallm.pattern == CUT else None
        self.groups = observed_inputs(config, dense)
        shapes = dense.layer_like(0)
        self.sizes = {names[0]: shapes[names[0]].shape[1] for names in self.groups}
        self._std = segment_noise(config, dense.num_layers * len(self.groups)) * config.dp.clip_norm
        self._sums: dict[str, hessians.HessianSum] = {}

    def answer(self, layer: int) -> Schema:
        sums = hessians.like(self.sizes)
        return replace(Schema.like(sums), unscaled=frozenset(sums))

    def begin(self, layer: int, pruners: Iterable[int]) -> None:
        is_noised = self.config.dp.enabled
        self._sums = {name: hessians.HessianSum(size, is_noised) for name, size in self.sizes.items()}

    def add(self, client: int, update: Payload) -> None:
        """Add a client's Hessians. ``ValueError`` for Hessians that cannot be, of which none is added then."""
        num_sequences = self.clients[client].num_examples
        for name, total in self._sums.items():
            total.check(name, update.tensors, num_sequences)
        for name, total in self._sums.items():
            total.add(name, update.tensors, num_sequences)

    def made(self, layer: int, row: dict[str, Any]) -> Payload:
        if not any(total.num_added for total in self._sums.values()):
            return Payload({})
        dense, results = self.dense.layer_tensors(layer), dict[str, tuple[Tensor, Tensor]]()
        if self.cut is not None:
            payload = self.cut.layer(dense, {names[0]: self._hessian(names[0]) for names in self.groups})
            row["weights"] = payload.num_elements()
            return payload
        pattern = self.options.n_of_m()
        density = None if pattern else self.config.density
        for names in self.groups:
            hessian = self._hessian(names[0])
            weights = [dense[name].to(self.dense.device) for name in names]
            if self.options.refine:
                pairs = alps(weights, hessian, density, pattern)
            else:
                pairs = sparsegpt_together(weights, hessian, density, pattern, self.options.block_size)
            results |= {name: (weight.cpu(), mask.cpu()) for name, (weight, mask) in zip(names, pairs, strict=True)}
        self._sums = {}
        names = self.dense.prunable(layer)
        payload = Payload({name: results[name][0] for name in names}, {name: results[name][1] for name in names})
        row["weights"] = payload.num_elements()
        return payload

    def _hessian(self, name: str) -> Tensor:
        """Return the Hessian of these inputs that all clients' sequences give together."""
        total = self._sums[name]
        hessian = total.matrix().to(self.dense.device)
        if not self.config.dp.enabled:
            return hessian
        return hessians.denoised(hessian, self._std * math.sqrt(total.num_added) / max(1, total.weight))


MERGES: dict[str, type[MeanMerge] | type[HessianMerge]] = {
    "mean": MeanMerge,
    "masks": MaskMerge,
    "hessians": HessianMerge,
}
