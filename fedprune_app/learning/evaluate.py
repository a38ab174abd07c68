"""Evaluation of a network on data, and its loss' gradient; network and data are not changed.

A user's network may change its input, count its calls, or draw: so a copy of it computes on copies, and draws by one
seed.
"""

import math
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.named import TensorDict
from fedprune_app.core.rng import global_draws_of
from fedprune_app.learning.device import computing, fast_layout, move_to_device


@dataclass(frozen=True)
class Evaluation:
    """Correct predictions, examples and summed cross entropy of a network on some data.

    If groups are counted instead of examples, a group counts by its share of correct predictions. ``correct_by_class``
    counts the correct predictions of each class; it is empty without examples.
    """

    correct: float
    total: int
    loss_sum: float
    correct_by_class: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float:
        return self.correct / self.total if self.total else math.nan

    @property
    def loss_mean(self) -> float:
        return self.loss_sum / self.total if self.total else math.nan


def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    batch_size: int = 500,
    device: torch.device | str | None = None,
    precision: str = "float32",
    groups: Tensor | None = None,
) -> Evaluation:
    """Evaluate ``model`` in eval mode on ``device`` (default: the model's), where it then stays.

    ``precision`` is as in the key of that name. With ``groups`` (N,), numbers from 0 on, each group counts once,
    independent of its size. Without examples the :class:`Evaluation` is empty. Raises ``ValueError`` for unequal
    counts.
    """
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels, allowed: equally many")
    device = move_to_device(model, device)
    network = deepcopy(model).eval()
    sizes = torch.ones(1, dtype=torch.int64) if groups is None else groups.bincount()
    weights = torch.ones(len(labels), dtype=torch.int64) if groups is None else 1 / sizes[groups].double()
    correct = torch.zeros(0, dtype=weights.dtype, device=device)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    with fast_layout(network, images.shape[1:]), torch.inference_mode(), global_draws_of(0):
        for start in range(0, len(labels), batch_size):
            label_batch = labels[start : start + batch_size].to(device)
            with computing(device, precision):
                logits = network(images[start : start + batch_size].to(device, copy=True)).float()
            if not len(correct):
                correct = correct.new_zeros(logits.shape[1])
            # argmax treats NaN as the largest, which would predict the class of the first NaN
            hits = (logits.argmax(dim=1) == label_batch) & ~logits.isnan().any(dim=1)
            correct.index_add_(0, label_batch, hits * weights[start : start + batch_size].to(device))
            loss_sum += F.cross_entropy(logits, label_batch, reduction="sum")
    correct_by_class = tuple(correct.tolist())
    total = len(labels) if groups is None else len(sizes)
    return Evaluation(sum(correct_by_class), total, float(loss_sum), correct_by_class)


def dense_gradient(
    model: nn.Module, images: Tensor, labels: Tensor, *, device: torch.device | str | None = None
) -> TensorDict:
    """Return the gradient of the mean cross entropy on one batch by every parameter, without any masks.

    Dis-PFL grows weights by this gradient. There is no clipping and no weight decay, and the model is in eval mode. The
    model is moved to ``device`` and otherwise unchanged. The gradients, by name, are new contiguous CPU tensors, 0
    where the loss does not depend on a parameter. Raises ``ValueError`` for no examples or unequal counts.
    """
    check_examples(images, labels)
    device = move_to_device(model, device)
    network = deepcopy(model).eval().requires_grad_(True)
    network.zero_grad()
    with fast_layout(network, images.shape[1:]), global_draws_of(0):
        loss = F.cross_entropy(network(images.to(device, copy=True)), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]  # as in training: some networks fail with autograd.grad
    parameters = dict(network.named_parameters())
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
    return {name: gradient.cpu().contiguous() for name, gradient in gradients.items()}


def check_examples(images: Tensor, labels: Tensor) -> None:
    """Raise ``ValueError`` unless there are equally many images and labels, at least 1."""
    if len(images) != len(labels) or not len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels, allowed: equally many, at least 1")
