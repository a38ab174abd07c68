"""How FedSpaLLM's server makes a layer of Hessians, in place of the paper's mean of weights. This rule is ours.

SparseGPT moves the weights that stay to make up for those that it removes, for one client's text and one client's mask.
A mean over clients makes up for nobody's removals. With ``fedspallm.merge = "hessians"`` clients send Hessians alone,
and the server prunes each matrix once, by their sum: as SparseGPT would with all text in one place. Each layer follows
the pruned layers before it, which clients receive. SparseGPT goes from left to right and looks at each column once.
With ``fedspallm.refine`` the server solves ``min ‖(W - W₀) X‖²`` anew for SparseGPT's masks.

A Hessian tells more of a text than masks do: docs/systems/fedspallm.md says what. With ``dp.enabled`` clients send
noised sums of clipped second moments in place of Hessians, and the server takes out what noise it can before it prunes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedprune_app.config import Config
from fedprune_app.core import hessians
from fedprune_app.core.payload import Payload
from fedprune_app.core.sparsegpt import sparsegpt_together


class HessianMerge:
    """A merge adds up the Hessians of one layer at a time, and makes the layer.

    ``groups`` are the matrices of a layer that have the same inputs. ``sizes`` are the numbers of these inputs. The
    clients' sums have noise of ``noise_multiplier`` times ``dp.clip-norm``, with ``dp.enabled``.
    """

    def __init__(
        self,
        config: Config,
        groups: Sequence[Sequence[str]],
        sizes: Mapping[str, int],
        noise_multiplier: float,
        device: torch.device,
    ) -> None:
        self.options, self.density, self.device, self.dp = config.fedspallm, config.density, device, config.dp
        self.groups = groups
        self.sizes = {names[0]: sizes[names[0]] for names in groups}
        self._std = noise_multiplier * config.dp.clip_norm if config.dp.enabled else 0.0  # of a client's noise
        self._sums = self._none()

    def _none(self) -> dict[str, hessians.HessianSum]:
        return {name: hessians.HessianSum(size, self.dp.enabled) for name, size in self.sizes.items()}

    @property
    def is_empty(self) -> bool:
        """Whether no client's Hessians of the layer in work were added."""
        return all(total.num_added == 0 for total in self._sums.values())

    def _hessian(self, name: str) -> Tensor:
        """Return the Hessian of these inputs that all clients' sequences give together."""
        total = self._sums[name]
        hessian = total.matrix().to(self.device)
        if not self.dp.enabled:
            return hessian
        return hessians.denoised(hessian, self._std * math.sqrt(total.num_added) / max(1, total.weight))

    def like(self) -> dict[str, Tensor]:
        """Return what a client sends of a layer's Hessians, without values."""
        return hessians.like(self.sizes)

    def add(self, update: Payload, num_sequences: int) -> None:
        """Add a client's Hessians; ``ValueError`` for Hessians that cannot be, and then none of them is added."""
        for name, total in self._sums.items():
            total.check(name, update.tensors, num_sequences)
        for name, total in self._sums.items():
            total.add(name, update.tensors, num_sequences)

    def pruned(self, dense: Mapping[str, Tensor]) -> Payload:
        """Return a layer's matrices, pruned from these ``dense`` ones by the sum of the Hessians; begin a new sum."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        pattern = self.options.n_of_m()
        density = None if pattern else self.density
        how = density, pattern, self.options.block_size, self.options.damping, self.options.count
        for names in self.groups:
            hessian = self._hessian(names[0])
            whole = [dense[name].to(self.device) for name in names]
            done = sparsegpt_together(whole, hessian, *how)
            if self.options.refine:
                masks = [mask for _, mask in done]
                done = [(self._solved(weight, mask, hessian), mask) for weight, mask in zip(whole, masks, strict=True)]
            found |= {name: (weight.cpu(), mask.cpu()) for name, (weight, mask) in zip(names, done, strict=True)}
        self._sums = self._none()
        return Payload(
            {name: found[name][0] for name in dense if name in found},
            {name: found[name][1] for name in dense if name in found},
        )

    def _solved(self, weight: Tensor, mask: Tensor, hessian: Tensor) -> Tensor:
        return hessians.least_squares(weight, mask, hessian, self.options.damping)
