"""A run has one initial model, equal on the server and every client, of which some tensors are shared."""

import copy
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedprune_app.core.flops import forward_flops
from fedprune_app.core.rng import generator
from fedprune_app.core.structured import ChannelGroup
from fedprune_app.models.channels import channel_groups
from fedprune_app.models.names import chosen_name
from fedprune_app.models.vision import architecture, buffer_names, build_model, parameter_names


def initial_model(
    name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int, *, init: str, seed: int
) -> nn.Module:
    """Return the network from which all participants start, drawn from the run's seed alone.

    ``ValueError`` for a network that does not fit the dataset.
    """
    return copy.deepcopy(_initial_model(name, dataset, image_shape, num_classes, init, seed))


@lru_cache(maxsize=2)  # a process that simulates many clients makes it once
def _initial_model(
    name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int, init: str, seed: int
) -> nn.Module:
    return build_model(chosen_name(name, dataset), image_shape, num_classes, rng=generator(seed, "init"), init=init)


@lru_cache(maxsize=2)
def layer_flops(name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int) -> Mapping[str, int]:
    """Return the FLOPs of one example's forward pass through that network, by layer."""
    return forward_flops(architecture(chosen_name(name, dataset), image_shape, num_classes), image_shape)


@lru_cache(maxsize=2)
def trains_on_one(name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int) -> bool:
    """Return whether that network can be trained on a batch of one example.

    BatchNorm needs two values of each channel: it cannot where one example has one value of a channel.
    """
    network = architecture(chosen_name(name, dataset), image_shape, num_classes).train()
    if not any(isinstance(layer, _BatchNorm) for layer in network.modules()):
        return True
    try:
        network(torch.zeros(1, *image_shape, device=next(network.parameters()).device))
    except ValueError as error:
        return "more than 1 value per channel" not in str(error)
    return True


@lru_cache(maxsize=2)
def channels_of(
    name: str, dataset: str, image_shape: tuple[int, int, int], num_classes: int
) -> tuple[ChannelGroup, ...]:
    """Return the groups of channels of that network that are removed together.

    ``ValueError`` for a network without BatchNorm, which would rank the channels.
    """
    model = _initial_model(name, dataset, image_shape, num_classes, "default", 0)
    return channel_groups(copy.deepcopy(model), image_shape)


def forget() -> None:
    """Drop all networks that are kept, since a plug-in makes others under their names."""
    for cached_function in (_initial_model, layer_flops, channels_of, trains_on_one):
        cached_function.cache_clear()


def shared_names(model: nn.Module, batch_norm: str) -> list[str]:
    """Return the names of the tensors that travel between server and clients.

    * ``batch_norm="averaged"``: all parameters and running statistics travel. This treats BatchNorm's scale, shift,
      running mean and variance as weights like any other, as the released code of Sub-FedAvg does.
    * ``batch_norm="local"``: those outside BatchNorm layers travel. This keeps all four on the client (Li et al.,
      "FedBN", ICLR 2021).
    """
    names = parameter_names(model) + buffer_names(model)
    if batch_norm == "averaged":
        return names
    local = tuple(f"{name}." for name, layer in model.named_modules() if isinstance(layer, _BatchNorm))
    return [name for name in names if not name.startswith(local)] if local else names
