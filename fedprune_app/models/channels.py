"""Channels of a network with BatchNorm depend on each other; this module finds the groups."""

from itertools import pairwise

import torch
from torch import nn

from fedprune_app.core.computation import module_mode
from fedprune_app.core.structured import ChannelGroup, Slice

ImageShape = tuple[int, int, int]


def channel_groups(model: nn.Module, image_shape: ImageShape) -> tuple[ChannelGroup, ...]:
    """Return the groups of channels that BatchNorm layers rank, in the model's order.

    A chain of layers is read off directly. For any other network (residual connections) torch-pruning traces the
    dependencies. Raises ``ValueError`` for a network without BatchNorm, or where torch-pruning is needed and missing.
    """
    if not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()):
        raise ValueError("the model has no BatchNorm to rank channels by, allowed: one whose name ends in -bn")
    return tuple(_chain_groups(model) if isinstance(model, nn.Sequential) else _traced_groups(model, image_shape))


def _chain_groups(model: nn.Sequential) -> list[ChannelGroup]:
    """Return the groups of a chain: a convolution, its norm, and the next convolution or linear layer.

    Layers between these have no channels.
    """
    layers = [(name, m) for name, m in model.named_children() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    groups = []
    for i, ((conv_name, conv), (norm_name, norm)) in enumerate(pairwise(layers)):
        if not (isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)):
            continue
        slices = [*_slices(conv_name, conv), *_slices(norm_name, norm)]
        follower_name, follower = layers[i + 2]
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
