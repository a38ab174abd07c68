"""The initial model of a run, equal on the server and every client, and its shared tensors."""

import copy
from collections.abc import Mapping
from functools import lru_cache, partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedprune_app.core.flops import forward_flops
from fedprune_app.core.layers import layers_of
from fedprune_app.core.modules import module_mode
from fedprune_app.core.named import ImageShape
from fedprune_app.core.rng import generator
from fedprune_app.core.structured import (
    ChannelGroup,
    Slice,
    check_cut,
    coordinate_masks,
    hidden_groups,
    leading_masks,
    leading_part,
    of_leading_units,
    shrink,
)
from fedprune_app.models.names import chosen_name
from fedprune_app.models.vision import (
    architecture,
    buffer_names,
    build_model,
    builder_seed,
    named_tensors,
    parameter_names,
    prunable_names,
)


def channel_groups(model: nn.Module, image_shape: ImageShape) -> tuple[ChannelGroup, ...]:
    """Return the groups of channels that BatchNorm layers rank, in the model's order.

    Groups of a chain of layers are read off directly. For any other network (residual connections) torch-pruning traces
    the dependencies. Raises ``ValueError`` for a network without BatchNorm, if torch-pruning is needed and missing, and
    if removing channels computes something else than setting them to 0.
    """
    is_chain = all(isinstance(layer, nn.Sequential) or not list(layer.children()) for layer in model.modules())
    has_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    try:
        groups = tuple(_chain_groups(model) if is_chain else _traced_groups(model, image_shape)) if has_norm else ()
    except IndexError:  # torch-pruning's, for layers that it does not know
        raise ValueError("torch-pruning cannot follow the model's channels, allowed: layers that it can") from None
    if not groups:
        raise ValueError("the model has no BatchNorm to rank channels by, allowed: one whose name ends in -bn")
    draw = generator(0, "cut")
    kept = {group.name: torch.randperm(group.size, generator=draw) % 2 == 0 for group in groups}
    shapes = {name: tensor.shape for name, tensor in named_tensors(model).items()}
    cut = partial(shrink, groups=groups, kept=kept)
    check_cut(model, image_shape, partial(coordinate_masks, groups, kept, shapes), cut)
    return groups


def _chain_groups(model: nn.Module) -> list[ChannelGroup]:
    """Return the groups of a chain: a convolution, its norm, and the next convolution or linear layer.

    Layers between these have no channels.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    groups = []
    triples = zip(layers, layers[1:], layers[2:], strict=False)
    for (conv_name, conv), (norm_name, norm), (follower_name, follower) in triples:
        if not (isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)):
            continue
        slices = [*_slices(conv_name, conv), *_slices(norm_name, norm)]
        inputs = follower.weight.shape[1]
        slices.append(Slice(f"{follower_name}.weight", 1, inputs // conv.out_channels))
        groups.append(ChannelGroup(norm_name, conv.out_channels, (f"{norm_name}.weight",), tuple(slices)))
    return groups


def _slices(name: str, layer: nn.Module) -> list[Slice]:
    tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    return [Slice(f"{name}.{attribute}", 0) for attribute, tensor in tensors if tensor.dim()]


def _traced_groups(model: nn.Module, image_shape: ImageShape) -> list[ChannelGroup]:
    try:
        import torch_pruning
    except ImportError:
        raise ValueError(
            "channel dependencies of this model need the package torch-pruning: install the extra fedprune[structured]"
        ) from None
    with module_mode(model, training=False):
        example = torch.zeros(1, *image_shape, dtype=next(model.parameters()).dtype)
        graph = torch_pruning.DependencyGraph().build_dependency(model, example)
    names = {module: name for name, module in model.named_modules()}
    groups: list[ChannelGroup] = []
    grouped: set[nn.Module] = set()
    for norm in model.modules():
        if not isinstance(norm, nn.BatchNorm2d) or norm in grouped:
            continue
        size = norm.num_features
        group = graph.get_pruning_group(norm, torch_pruning.prune_batchnorm_out_channels, idxs=list(range(size)))
        slices: list[Slice] = []
        scales: list[str] = []
        for dependency, indices in group:
            layer = dependency.target.module
            if layer not in names:
                continue  # an operation, not a layer
            name = names[layer]
            if dependency.handler.__name__ == "prune_in_channels":
                slices.append(Slice(f"{name}.weight", 1, len(indices) // size))
                continue
            slices += _slices(name, layer)
            if isinstance(layer, nn.BatchNorm2d):
                scales.append(f"{name}.weight")
                grouped.add(layer)
        groups.append(ChannelGroup(names[norm], size, tuple(scales), tuple(dict.fromkeys(slices))))
    return groups


def initial_model(
    name: str, dataset: str, image_shape: ImageShape, num_classes: int, *, init: str, seed: int
) -> nn.Module:
    """Return the network with which all participants start, drawn from the run's seed alone.

    ``ValueError`` for a network that does not fit the dataset.
    """
    return copy.deepcopy(_initial_model(name, dataset, image_shape, num_classes, init, seed))


def seed_of_builder(name: str, dataset: str, init: str, seed: int) -> int:
    """Return the seed with which a plug-in's function built the initial model of a run with this ``seed``."""
    return builder_seed(chosen_name(name, dataset), init, generator(seed, "init"))


@lru_cache(maxsize=2)  # a process that simulates many clients builds it once
def _initial_model(
    name: str, dataset: str, image_shape: ImageShape, num_classes: int, init: str, seed: int
) -> nn.Module:
    return build_model(chosen_name(name, dataset), image_shape, num_classes, rng=generator(seed, "init"), init=init)


@lru_cache(maxsize=2)
def layer_flops(name: str, dataset: str, image_shape: ImageShape, num_classes: int) -> Mapping[str, int]:
    """Return the FLOPs of one example's forward pass through that network, by layer."""
    return forward_flops(architecture(chosen_name(name, dataset), image_shape, num_classes), image_shape)


@lru_cache(maxsize=2)
def trains_on_one(name: str, dataset: str, image_shape: ImageShape, num_classes: int) -> bool:
    """Return whether that network can be trained on a batch of one example.

    BatchNorm needs two values per channel, and one example may have only one.
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
def channels_of(name: str, dataset: str, image_shape: ImageShape, num_classes: int) -> tuple[ChannelGroup, ...]:
    """Return the groups of channels of that network that are removed together.

    ``ValueError`` for a network without BatchNorm, which is needed to rank channels.
    """
    model = _initial_model(name, dataset, image_shape, num_classes, "default", 0)
    return channel_groups(copy.deepcopy(model), image_shape)


@lru_cache(maxsize=4)
def units_of(
    name: str, dataset: str, image_shape: ImageShape, num_classes: int, alike: bool
) -> tuple[ChannelGroup, ...]:
    """Return the hidden units of that network, in groups whose leading units form a network by themselves.

    With ``alike`` all groups have one share. ``ValueError`` if such a network computes something else than the whole
    one with the other units at 0.
    """
    model = copy.deepcopy(_initial_model(name, dataset, image_shape, num_classes, "default", 0))
    shapes = {name: tensor.shape for name, tensor in named_tensors(model).items()}
    groups = hidden_groups(layers_of(list(shapes), prunable_names(model)), shapes)
    draw = generator(0, "units")
    for _ in range(3):
        shares = torch.rand(1 if alike else len(groups), generator=draw).expand(len(groups)).tolist()
        by_group = {group.name: share for group, share in zip(groups, shares, strict=True)}
        reach, norms = leading_part(model, groups, by_group)
        check_cut(
            model,
            image_shape,
            partial(leading_masks, reach, shapes),
            partial(of_leading_units, reach=reach, norm_groups=norms),
        )
    return groups


def clear_cache() -> None:
    """Drop all cached networks, because a plug-in builds others under their names."""
    for cached_function in (_initial_model, layer_flops, channels_of, units_of, trains_on_one):
        cached_function.cache_clear()


def shared_names(model: nn.Module, batch_norm: str) -> list[str]:
    """Return the names of the tensors exchanged between server and clients.

    * ``batch_norm="averaged"``: all parameters and running statistics. BatchNorm's scale, shift, running mean and
      variance are treated like any other weights, as in Sub-FedAvg's released code.
    * ``batch_norm="local"``: those outside BatchNorm layers. All four stay on the client (Li et al., "FedBN", ICLR
      2021).
    """
    names = parameter_names(model) + buffer_names(model)
    if batch_norm == "averaged":
        return names
    local = tuple(f"{name}." for name, layer in model.named_modules() if isinstance(layer, _BatchNorm))
    return [name for name in names if not name.startswith(local)] if local else names
