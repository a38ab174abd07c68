"""Recovery trains the weights that pruning has left, on text, with the pruned ones held at zero.

Published pruning methods for language models recover accuracy so, with all data in one place; a federation of clients
does it here, by federated averaging over the weights that are kept (McMahan et al., 2017).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import global_draws_of
from fedprune_app.models.llm import LanguageModel


@dataclass(frozen=True)
class Schedule:
    """A schedule is so many ``steps`` of AdamW, each on ``batch_size`` segments.

    The learning rate rises over the first tenth of the steps to ``learning_rate``, and falls by half a cosine to a
    tenth of it.
    """

    steps: int
    batch_size: int
    learning_rate: float

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        rise = max(1, self.steps // 10)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        progress = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def recovered(
    model: LanguageModel, layers: Mapping[int, Payload], segments: Tensor, schedule: Schedule, draw: torch.Generator
) -> tuple[dict[int, Payload], float]:
    """Train the kept weights of the pruned ``layers`` on token ids (segments, length); return them and the mean loss.

    Embeddings, norms, biases and the head stay as they are, and so does a layer that is not in ``layers``. The whole
    model is in memory, in float32 on the model's device, with gradients and two moments of the kept matrices. The loss
    is the mean cross entropy of the next token, in nats, over all steps. Raises ``ValueError`` for a loss that is not
    finite.
    """
    network = model.whole(lambda layer: layers[layer].tensors if layer in layers else {}).float().requires_grad_(False)
    masks_by_name = {
        name: m for layer, pruned in layers.items() for name, m in model.named(layer, pruned.masks).items()
    }
    matrices = {name: network.get_parameter(name).requires_grad_(True) for name in masks_by_name}
    masks = {name: mask.to(model.device) for name, mask in masks_by_name.items()}
    optimizer = torch.optim.AdamW(matrices.values(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    with global_draws_of(draw):  # for dropout, which some families have
        for step, batch in zip(range(schedule.steps), _batches(segments, schedule.batch_size, draw), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            ids = batch.to(model.device)
            logits = network(ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in matrices.items():
                assert parameter.grad is not None
                parameter.grad.mul_(masks[name])  # a weight without gradients stays at zero
            nn.utils.clip_grad_norm_(matrices.values(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    mean = float(torch.stack(losses).mean())
    if not math.isfinite(mean):
        raise ValueError(f"the loss of recovery is {mean}, allowed: a finite one (fedspallm.recovery-learning-rate)")
    payloads: dict[int, Payload] = {}
    for layer, pruned in layers.items():
        prefix = f"{model.prefix}.{layer}."
        parameters = {
            name.removeprefix(prefix): parameter.detach()
            for name, parameter in matrices.items()
            if name.startswith(prefix)
        }
        weights = model.matrices[layer].apart(parameters)
        tensors = {name: weights[name].to("cpu", pruned.tensors[name].dtype) for name in pruned.masks}
        payloads[layer] = Payload.pruned(tensors, pruned.masks)
    return payloads, mean


def _batches(segments: Tensor, size: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Yield batches without end: all segments in a drawn order, then again in another."""
    while True:
        for batch in torch.split(torch.randperm(len(segments), generator=draw), size):
            yield segments[batch]
