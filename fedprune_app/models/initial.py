"""The common initial model of a run, equal on the server and every client, and which of its tensors are shared."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache

from torch import nn

from fedprune_app.core.flops import forward_flops
from fedprune_app.core.rng import generator
from fedprune_app.core.structured import ChannelGroup
from fedprune_app.models.channels import channel_groups
from fedprune_app.models.vision import architecture, buffer_names, build_model, parameter_names

AUTO = {
    "digits": "cnn-small",
    "mnist": "cnn5",
    "fashion-mnist": "cnn5",
    "emnist-letters": "cnn5",
    "emnist-digits": "cnn5",
    "cifar10": "lenet5",
    "cifar100": "lenet5",
    "tiny-imagenet": "lenet5",
    "image-folder": "lenet5",
}
"""The network that ``model = "auto"`` means, by dataset: the papers' where they name one."""


def initial_model(
    name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int, *, init: str, seed: int
) -> nn.Module:
    """The network all participants start from, drawn from the run's seed alone. ``ValueError`` if it does not fit."""
    return copy.deepcopy(_initial_model(name, dataset, image_shape, num_classes, init, seed))


@lru_cache(maxsize=2)  # a process that simulates many clients makes it once
def _initial_model(
    name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int, init: str, seed: int
) -> nn.Module:
    return build_model(chosen_name(name, dataset), image_shape, num_classes, rng=generator(seed, "init"), init=init)


def chosen_name(name: str, dataset: str) -> str:
    """The network that the key ``model`` means."""
    return AUTO[dataset] if name == "auto" else name


@lru_cache(maxsize=2)
def layer_flops(name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int) -> Mapping[str, int]:
    """FLOPs of one example's forward pass through that network, by layer."""
    return forward_flops(architecture(chosen_name(name, dataset), image_shape, num_classes), image_shape)


@lru_cache(maxsize=2)
def channels_of(
    name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int
) -> tuple[ChannelGroup, ...]:
    """Which channels of that network are removed together. ``ValueError`` if it has no BatchNorm to rank them by."""
    model = _initial_model(name, dataset, image_shape, num_classes, "default", 0)
    return channel_groups(copy.deepcopy(model), image_shape)


def shared_names(model: nn.Module, batch_norm: str) -> list[str]:
    """Names of the tensors that travel: all parameters and running statistics, or with ``batch_norm="local"`` those
    outside BatchNorm layers.

    ``"averaged"`` treats BatchNorm's scale, shift, running mean and variance as weights like any other, as the released
    code of Sub-FedAvg does; ``"local"`` keeps all four on the client (Li et al., "FedBN", ICLR 2021).
    """
    names = parameter_names(model) + buffer_names(model)
    if batch_norm == "averaged":
        return names
    local = tuple(f"{name}." for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d))
    return [name for name in names if not name.startswith(local)] if local else names
