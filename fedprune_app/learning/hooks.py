"""A system adds hooks on gradients and weights, and other losses, to each step of training."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.learning.parts import Network

# a gradient hook changes gradients in place, given all trained (parameters, gradients) by name
GradientHook = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
# a step hook changes all trained parameters in place, given by name, after an update
StepHook = Callable[[Mapping[str, Tensor]], None]
# an objective is the loss to differentiate, given the network, a batch's images and its labels
Objective = Callable[[Network, Tensor, Tensor], Tensor]


def cross_entropy(network: Network, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network(images), labels)


def proximal(anchor: Mapping[str, Tensor], strength: float) -> GradientHook:
    """Return a hook that adds the gradient of ``strength / 2 ‖w − anchor‖²``, over the tensors in ``anchor``."""

    def pull(values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        names = [name for name in values if name in anchor]
        differences = torch._foreach_sub([values[name] for name in names], [anchor[name] for name in names])
        torch._foreach_add_([gradients[name] for name in names], differences, alpha=strength)

    return pull


def adam(beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> GradientHook:
    """Return a hook that turns each gradient into Adam's step, ``m̂ / (√v̂ + ε)``.

    Plain SGD without momentum then does what Adam does. One hook serves one training, whose moments it holds.
    Source: Kingma and Ba, ICLR 2015, Algorithm 1.
    """
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    steps = 0

    def precondition(_: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        nonlocal steps
        steps += 1
        for name, gradient in gradients.items():
            if steps == 1:
                first[name], second[name] = torch.zeros_like(gradient), torch.zeros_like(gradient)
            m = first[name].mul_(beta1).add_(gradient, alpha=1 - beta1)
            v = second[name].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (v / (1 - beta2**steps)).sqrt_().add_(epsilon)
            gradient.copy_(m / (1 - beta1**steps) / scale)

    return precondition
