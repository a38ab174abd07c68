"""Merge rules of FedSpaLLM's server, which make a layer from the replies: the paper's, FedPrLLM's, and one of ours.

SparseGPT adjusts the remaining weights to make up for the removed ones, for one client's text and mask. After a mean
over clients these adjustments fit no mask. With ``fedspallm.merge = "hessians"`` clients send only Hessians, and the
server prunes each matrix once, by their sum: as SparseGPT would with all text in one place. Clients compute a layer's
Hessians behind the pruned layers before it, which they receive. SparseGPT goes through the columns once, from left to
right; ALPS (``fedspallm.refine``) solves for a whole matrix at once.

A Hessian reveals more about a text than masks do: see docs/systems/fedspallm.md. With ``dp.enabled`` clients send
noised sums of clipped second moments in place of Hessians, and the server removes as much noise as it can before it
prunes. With ``fedspallm.merge = "masks"`` clients send only masks, which are votes.

A merge adds up the replies to one layer at a time. With ``clients_prune``, clients have pruned models of their own.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fedprune_app.config import Config
from fedprune_app.config.fedspallm import CUT
from fedprune_app.core import hessians
from fedprune_app.core.aggregate import L0Mean
from fedprune_app.core.alps import alps
from fedprune_app.core.gptq import gptq
from fedprune_app.core.grids import Quantized, grid_of
from fedprune_app.core.payload import Payload
from fedprune_app.core.scores import wanda_mask
from fedprune_app.core.sparsegpt import sparsegpt
from fedprune_app.engine.layers import LayerFiles
from fedprune_app.engine.wire import Schema
from fedprune_app.learning.language_models import observed_inputs
from fedprune_app.learning.planned_noise import segment_noise
from fedprune_app.models.cutting import Cut, narrowed
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import write_codes
from strategies.pruned_model import PrunedModel


class MeanMerge:
    """The paper's rule: average each weight over the clients that kept it, and expand masks to the density."""

    clients_prune = True

    cut: Cut | None = None

    def __init__(self, config: Config, model: PrunedModel) -> None:
        self.config, self.model = config, model
        self._mean = L0Mean(1)

    def answer(self, layer: int) -> Schema:
        """Return the schema of a reply to a layer."""
        return self.model.schema(layer)

    def begin(self, layer: int, pruners: Iterable[int]) -> None:
        """Prepare for a layer that these clients prune."""
        self._mean = L0Mean(max(len([*pruners]), 1))

    def add(self, update: Payload, num_examples: int) -> None:
        """Add a client's layer. An invalid one raises ``ValueError``, and nothing of it is added."""
        self._mean.add(update)

    def merged(self, layer: int, row: dict[str, Any]) -> Payload:
        """Return the layer (lines 18 to 20), empty if nobody sent it; add its metrics to ``row``."""
        mean = self._mean.mean()
        new = self._mean.expanded(self.config.density, n_of_m=self.config.fedspallm.n_of_m(), mean=mean)
        self._mean = L0Mean(1)
        if mean.masks:
            row |= {"weights": mean.num_elements(), "kept_before_expansion": mean.num_kept()}
        return new


class MaskMerge(MeanMerge):
    """FedPrLLM's rule: clients vote by their masks; the kept weights are the dense ones.

    Guo et al., "Exploring Federated Pruning for Large Language Models", 2025, arXiv 2505.13547, in the form that its
    experiments choose: one shot, votes compared over a whole matrix, weights not scaled. The released code breaks ties
    at random, and the text leaves them open. Here the largest dense weights stay, so that no draw decides.
    """

    def answer(self, layer: int) -> Schema:
        schema = super().answer(layer)
        return replace(schema, dtypes=dict.fromkeys(schema.dtypes, torch.bool))

    def begin(self, layer: int, pruners: Iterable[int]) -> None:
        super().begin(layer, pruners)
        self._dense = self.model.dense.layer_tensors(layer)

    def add(self, update: Payload, num_examples: int) -> None:
        super().add(self._weights(update.masks), num_examples)

    def merged(self, layer: int, row: dict[str, Any]) -> Payload:
        return self._weights(super().merged(layer, row).masks)

    def _weights(self, masks: Mapping[str, Tensor]) -> Payload:
        return Payload.pruned({name: self._dense[name] for name in masks}, masks)


class Compression:
    """Prunes or cuts a dense layer, and rounds it, by the Hessians of its inputs.

    ``groups`` are the matrices of a layer that have the same inputs. With ``dp.enabled`` the clients' sums have noise
    of a standard deviation that the server knows. ``cut`` removes heads and units in place of weights.
    """

    def __init__(self, config: Config, dense: LanguageModel) -> None:
        self.config, self.options, self.dense = config, config.fedspallm, dense
        self.cut = Cut(dense, config.density) if config.fedspallm.pattern == CUT else None
        self.groups = observed_inputs(config, dense)
        shapes = dense.layer_like(0)
        self.sizes = {names[0]: shapes[names[0]].shape[1] for names in self.groups}  # numbers of inputs
        self.std = 0.0  # of the clients' noise
        if config.dp.enabled:
            noise = segment_noise(config, dense.num_layers * len(self.groups))
            self.std = config.dp.own_part(noise) * config.dp.clip_norm

    def hessians_of(self, sums: Mapping[str, hessians.HessianSum]) -> dict[str, Tensor]:
        """Return the Hessians over all clients' sequences, on the model's device."""
        found = {}
        for name, total in sums.items():
            hessian = total.matrix().to(self.dense.device)
            if self.options.hessian_form == "diagonal":
                hessian.clamp_(min=0)  # what noise took below
            elif self.config.dp.enabled:
                std = self.std * math.sqrt(total.num_added) / max(1, total.weight)
                hessian = hessians.denoised(hessian, std)
            found[name] = hessians.shrunk(hessian, self.options.shrinkage())
        return found

    def pruned(self, layer: int, hessian_of: Mapping[str, Tensor]) -> Payload:
        """Return the layer's matrices with masks."""
        dense, results = self.dense.layer_tensors(layer), dict[str, tuple[Tensor, Tensor]]()
        if self.cut is not None:
            return self.cut.layer(dense, hessian_of)
        pattern = self.options.n_of_m()
        density = None if pattern else self.config.density
        if density == 1.0:  # zeros that a dense model has are weights as others
            kept = {name: dense[name] for name in self.dense.prunable(layer)}
            return Payload(kept, {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in kept.items()})
        for names in self.groups:
            weights = [dense[name].to(self.dense.device) for name in names]
            if self.options.hessian_form == "diagonal":
                norms = hessian_of[names[0]].diagonal().sqrt()
                masks = [wanda_mask(weight, norms, density, pattern) for weight in weights]
                pairs = [(torch.where(mask, weight, 0), mask) for weight, mask in zip(weights, masks, strict=True)]
            elif self.options.refine:
                pairs = alps(weights, hessian_of[names[0]], density, pattern)
            else:
                block_size = self.options.block_size
                pairs = sparsegpt(weights, hessian_of[names[0]], density, pattern, block_size)
            results |= {name: (weight.cpu(), mask.cpu()) for name, (weight, mask) in zip(names, pairs, strict=True)}
        names = self.dense.prunable(layer)
        return Payload({name: results[name][0] for name in names}, {name: results[name][1] for name in names})

    def rounded(self, payload: Payload, hessian_of: Mapping[str, Tensor]) -> tuple[Payload, dict[str, Quantized]]:
        """Return the layer with rounded weights, and by name the codes of these; pruned weights stay 0."""
        tensors, quantized_of = dict(payload.tensors), dict[str, Quantized]()
        left = tensors if self.cut is None else narrowed(tensors, payload.masks)
        for names in self.groups:
            masks = [payload.masks[name] for name in names]
            hessian = hessian_of[names[0]]
            if self.cut is not None:
                inputs = masks[0].any(dim=0).to(hessian.device)
                hessian, masks = hessian[inputs][:, inputs], [torch.ones_like(left[n], dtype=torch.bool) for n in names]
            has_zeros = not all(bool(mask.all()) for mask in masks)
            grid = grid_of(self.options.bits, keeps_zeros=has_zeros)
            on_device = [[each.to(hessian.device) for each in part] for part in ([left[n] for n in names], masks)]
            found = gptq(on_device[0], hessian, grid, on_device[1] if has_zeros else None)
            for name, mask, quantized in zip(names, masks, found, strict=True):
                weights = quantized.weights()[:, : mask.shape[1]].cpu().to(tensors[name].dtype)
                tensors[name] = tensors[name].masked_scatter(payload.masks[name], weights[mask])
                quantized_of[name] = quantized
        return Payload(tensors, payload.masks), quantized_of


class HessianMerge:
    """Our rule: prune once, by SparseGPT or ALPS with the sum of the clients' Hessians."""

    clients_prune = False

    def __init__(self, config: Config, model: PrunedModel) -> None:
        self.compression, self.model = Compression(config, model.dense), model
        self.cut, self.options = self.compression.cut, config.fedspallm
        self._sums: dict[str, hessians.HessianSum] = {}
        self._digests: list[str] = []

    def answer(self, layer: int) -> Schema:
        sums = hessians.like(self.compression.sizes, self.options.hessian_form)
        return replace(Schema.like(sums), unscaled=frozenset(sums))

    def begin(self, layer: int, pruners: Iterable[int]) -> None:
        is_noised = self.compression.config.dp.enabled
        self._digests = []
        self._sums = {name: hessians.HessianSum(size, is_noised) for name, size in self.compression.sizes.items()}

    def add(self, update: Payload, num_examples: int) -> None:
        """Add Hessians of so many sequences. Impossible ones raise ``ValueError``, and none is added."""
        for name, total in self._sums.items():
            total.check(name, update.tensors, num_examples)
        for name, total in self._sums.items():
            total.add(name, update.tensors, num_examples)
        self._digests.append(update.digest())

    def merged(self, layer: int, row: dict[str, Any]) -> Payload:
        if not any(total.num_added for total in self._sums.values()):
            return Payload({})
        if self.options.keep_sums:
            save_sums(self.model.sums, layer, KeptSums(self._sums, sorted(self._digests)))
        hessian_of = self.compression.hessians_of(self._sums)
        self._sums = {}
        payload = self.compression.pruned(layer, hessian_of)
        if self.options.bits < 16:
            payload, quantized_of = self.compression.rounded(payload, hessian_of)
            write_codes(self.model.codes, self.model.dense, layer, quantized_of)
        row["weights"] = payload.num_elements()
        return payload


@dataclass
class KeptSums:
    """The sums of a layer by the first matrix of their input, and a digest of what each client sent, in order."""

    sums: dict[str, hessians.HessianSum]
    digests: list[str]

    def include(self, other: Self, sign: int) -> None:
        """Add what other clients sent or, with a ``sign`` of -1, take it away. Raises ``ValueError``, of one line."""
        known = [digest for digest in other.digests if digest in self.digests]
        if sign > 0 and known:
            raise ValueError(f"what a client sent is in the sums already: digest {known[0][:16]}, allowed: once")
        if sign < 0 and len(known) < len(other.digests):
            raise ValueError("the sums are not of what the client sends now, allowed: the same bytes as then")
        if sign < 0 and len(known) == len(self.digests):
            raise ValueError("nothing would be left of the sums, allowed: to forget fewer than all clients")
        kept = [digest for digest in self.digests if digest not in known]
        self.digests = sorted(kept + (other.digests if sign > 0 else []))
        for name, total in self.sums.items():
            total.include(other.sums[name], sign)


def save_sums(files: LayerFiles, layer: int, kept: KeptSums) -> None:
    """Keep the sums of a layer, as integers, and digests as bytes (clients, 32)."""
    tensors = {name: tensor for part, total in kept.sums.items() for name, tensor in total.tensors(part).items()}
    tensors["digests"] = torch.tensor([list(bytes.fromhex(digest)) for digest in kept.digests], dtype=torch.uint8)
    files.save(layer, 1, Payload(tensors))


def load_sums(files: LayerFiles, layer: int, compression: Compression) -> KeptSums:
    """Return the sums of a layer that :func:`save_sums` kept. Raises ``ValueError`` where they are not there."""
    sizes, is_noised = compression.sizes, compression.config.dp.enabled
    most_bytes = sum(16 * (size + 1) ** 2 for size in sizes.values()) + _MOST_DIGESTS
    tensors = files.load(layer, 1, most_bytes).tensors
    sums = {name: hessians.HessianSum.of(name, tensors, size, is_noised) for name, size in sizes.items()}
    return KeptSums(sums, [bytes(row.tolist()).hex() for row in tensors["digests"]])


_MOST_DIGESTS = 2**25  # bytes, of a million clients


MERGES: dict[str, type[MeanMerge] | type[HessianMerge]] = {
    "mean": MeanMerge,
    "masks": MaskMerge,
    "hessians": HessianMerge,
}
