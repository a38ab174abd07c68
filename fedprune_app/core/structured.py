"""Groups of channels: choosing them, and converting between the full network and a smaller one.

Full coordinates are the server's; clients that removed different channels share them. A small network has
the removed channels physically gone. :func:`gather` converts a full network's tensors to a small one's,
:func:`scatter` converts them back, and :func:`coordinate_masks` returns which full coordinates a small network has.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedprune_app.core.modules import generic_copy, tensors_of
from fedprune_app.core.named import Shapes, TensorDict, Tensors

# Channel masks by group name: bool (size,), True = kept.
Kept = TensorDict


# The extents of leading units in tensors: name → dimension → number of indices.
Extents = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class Slice:
    """Where a group's channels lie in one tensor: along ``dim``, each as ``repeat`` neighbouring indices.

    A linear layer behind flattened h x w feature maps has ``repeat = h * w``.
    """

    tensor: str
    dim: int
    repeat: int = 1


@dataclass(frozen=True)
class ChannelGroup:
    """``size`` channels that can only be removed together, in all of ``slices``.

    ``scales`` are the BatchNorm scales that rank the channels. Channels joined by a residual connection have several
    scales.
    """

    name: str
    size: int
    scales: tuple[str, ...]
    slices: tuple[Slice, ...]


def full_channels(groups: Sequence[ChannelGroup]) -> Kept:
    return {group.name: torch.ones(group.size, dtype=torch.bool) for group in groups}


def choose_channels(
    groups: Sequence[ChannelGroup], tensors: Tensors, kept: Kept, fraction: float, floor: float
) -> Kept:
    """Return channel masks without the channels of smallest BatchNorm scale, in one step per group.

    Among the n channels that a group still has, the threshold is the scale at position ``int(n * fraction)`` of the
    sorted |γ|. Channels at or below the threshold are removed, so 6 become 3 and 16 become 8 at ``fraction`` 0.45. A
    group's floor is ``int(size * floor)`` and at least 1. A group at or below its floor, or that would fall below it,
    is not changed. ``fraction`` and ``floor`` are in [0, 1), else ``ValueError``.

    Source: Sub-FedAvg, section 3.5, and its released code, which ranks within each layer; the text can be read as
    ranking all scales together.
    """
    for key, value in (("fraction", fraction), ("floor", floor)):
        if not 0 <= value < 1:
            raise ValueError(f"{key} is {value}, allowed: 0 to below 1")
    new_masks = {}
    for group in groups:
        mask = kept[group.name]
        scale = torch.stack([tensors[name].detach().abs().cpu().double() for name in group.scales]).mean(0)  # (size,)
        minimum = max(1, int(group.size * floor + 1e-6))
        count = int(mask.sum())
        threshold = scale[mask].sort().values[int(count * fraction + 1e-6)] if count > minimum else None
        new_mask = mask if threshold is None else mask & (scale > threshold)
        new_masks[group.name] = new_mask if int(new_mask.sum()) >= minimum else mask.clone()
    return new_masks


def channel_distance(a: Kept, b: Kept) -> float:
    """Return the share of all groups' channels in which two choices differ; 0 without channels."""
    total = sum(mask.numel() for mask in a.values())
    return sum(int((a[name] != b[name]).sum()) for name in a) / total if total else 0.0


def _indices(groups: Sequence[ChannelGroup], kept: Kept) -> dict[str, dict[int, Tensor]]:
    """Return tensor → dimension → the kept indices, ascending, for tensors and dimensions that groups cut."""
    indices: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        for piece in group.slices:
            mask = kept[group.name].repeat_interleave(piece.repeat)
            indices.setdefault(piece.tensor, {})[piece.dim] = mask.nonzero().squeeze(1)
    return indices


def coordinate_masks(groups: Sequence[ChannelGroup], kept: Kept, shapes: Shapes) -> TensorDict:
    """Return masks of the full tensors that groups cut: a coordinate is kept if its channels are, in every dimension.

    A convolution's weight (o, i) is kept if both output channel o and input channel i are.
    """
    masks = {}
    for name, indices_by_dim in _indices(groups, kept).items():
        if name not in shapes:
            continue
        mask = torch.ones(tuple(shapes[name]), dtype=torch.bool)
        for dim, index in indices_by_dim.items():
            axis_mask = torch.zeros(mask.shape[dim], dtype=torch.bool)
            axis_mask[index] = True
            mask &= axis_mask.view(-1, *[1] * (mask.dim() - dim - 1))
        masks[name] = mask
    return masks


def gather(tensors: Tensors, groups: Sequence[ChannelGroup], kept: Kept) -> TensorDict:
    """Return a full network's tensors (or masks) in the small network's shapes.

    Tensors that no group cuts are not changed.
    """
    result = dict(tensors)
    for name, indices_by_dim in _indices(groups, kept).items():
        if name in result:
            for dim, index in indices_by_dim.items():
                result[name] = result[name].index_select(dim, index.to(result[name].device))
    return result


def scatter(
    small: Tensors,
    groups: Sequence[ChannelGroup],
    kept: Kept,
    shapes: Shapes,
) -> TensorDict:
    """Undo :func:`gather`: return full tensors of ``shapes``, 0 (or False) where channels are gone."""
    full_tensors = dict(small)
    for name, indices_by_dim in _indices(groups, kept).items():
        if name not in full_tensors:
            continue
        for dim, index in indices_by_dim.items():
            shape = list(full_tensors[name].shape)
            shape[dim] = shapes[name][dim]
            full_tensors[name] = torch.zeros(shape, dtype=full_tensors[name].dtype).index_copy(
                dim, index, full_tensors[name].cpu()
            )
    return full_tensors


def shrink(model: nn.Module, groups: Sequence[ChannelGroup], kept: Kept) -> nn.Module:
    """Remove channels from ``model`` in place and return ``model``.

    It gets new, smaller parameters and buffers, and its layers the new sizes. Layers may be convolutions (not grouped
    ones), batch normalisations and linear layers. The result computes the same as the masked full network, faster.
    Raises ``ValueError`` for a layer of another kind.
    """
    names = {piece.tensor for group in groups for piece in group.slices}
    state = tensors_of(model)
    small = gather({name: state[name].detach() for name in names if name in state}, groups, kept)
    for name, tensor in small.items():
        path, _, attribute = name.rpartition(".")
        layer = model.get_submodule(path)
        if attribute in layer._parameters:
            requires_grad = bool(state[name].requires_grad)
            layer._parameters[attribute] = nn.Parameter(tensor.clone(), requires_grad=requires_grad)
        else:
            layer._buffers[attribute] = tensor.clone()
        if attribute == "weight":
            _resize(path, layer, tensor.shape)
    return model


def _resize(path: str, layer: nn.Module, shape: torch.Size) -> None:
    if isinstance(layer, nn.Conv2d) and layer.groups == 1:
        layer.out_channels, layer.in_channels = shape[:2]
    elif isinstance(layer, nn.BatchNorm2d):
        layer.num_features = shape[0]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = shape
    else:
        raise ValueError(f"layer '{path}' is a {type(layer).__name__}, allowed: Conv2d, BatchNorm2d or Linear")


def of_leading_units(model: nn.Module, reach: Extents, norm_groups: Mapping[str, int]) -> Callable[[Tensor], Tensor]:
    """Return the network of the leading units of ``model``; changes the GroupNorms of ``model``."""
    for name, count in norm_groups.items():
        model.get_submodule(name).num_groups = count  # type: ignore[assignment]
    state = tensors_of(model)
    blocks = {name: leading_block(state[name], dims) for name, dims in reach.items() if name in state}
    return lambda images: torch.func.functional_call(model, blocks, (images,))


def check_cut(
    model: nn.Module,
    image_shape: Sequence[int],
    masks: Callable[[], Tensors],
    cut: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> None:
    """Raise ``ValueError`` unless ``cut(model)`` computes the same as the full network with 0 where masks are False.

    Both are compared on random images, with random weights and running statistics, in eval mode. The small one must
    have a gradient, too. ``model`` is not changed.
    """
    draw = torch.Generator().manual_seed(0)
    try:
        full = generic_copy(model, draw).cpu().eval()
        for name, buffer in full.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0, 0.5, generator=draw).add_(name.endswith("var"))
        images = torch.rand(4, *image_shape, generator=draw).to(next(full.parameters()).dtype)
        masked = copy.deepcopy(full)
        state = tensors_of(masked)
        with torch.no_grad():
            for name, mask in masks().items():
                state[name].mul_(mask)
            expected = masked(images.clone())
        outputs = cut(full)(images.clone())
        torch.autograd.backward(outputs.sum())
        if outputs.shape == expected.shape and torch.allclose(outputs, expected, 0.0, 1e-3 * float(expected.std())):
            return
        problem = "computes something else"
    except Exception as failure:  # a user's network may raise anything
        problem = f"fails: {type(failure).__name__}: {failure}"
    raise ValueError(
        "the model cannot be made smaller, allowed: one that with fewer units computes what it does with these units "
        f"at 0; with fewer units it {' '.join(problem.split())}"
    )


# --- leading units ----------------------------------------------------------------------------------------------------


def hidden_groups(layers: Mapping[str, Sequence[str]], shapes: Shapes) -> tuple[ChannelGroup, ...]:
    """Return the units between consecutive layers of a chain, each group named by the layer whose outputs they are.

    ``layers`` maps each layer, in order, to the names of its tensors (:func:`fedprune_app.core.layers.layers_of`); its
    ``weight`` is (out, in, ...). :func:`check_cut` checks whether a network is such a chain.
    """
    groups = []
    for (name, tensors), (follower, _) in pairwise(layers.items()):
        size, inputs = shapes[f"{name}.weight"][0], shapes[f"{follower}.weight"][1]
        slices = [Slice(tensor, 0) for tensor in tensors if shapes[tensor]]
        groups.append(ChannelGroup(name, size, (), (*slices, Slice(f"{follower}.weight", 1, inputs // size))))
    return tuple(groups)


def leading_count(size: int, share: float, multiple: int = 1) -> int:
    """Return ``ceil(share · size)``, at least 1, rounded up to a multiple (of a GroupNorm's channels per group).

    >>> leading_count(10, 0.25), leading_count(10, 0.25, multiple=2)
    (3, 4)
    """
    count = max(1, math.ceil(share * size - 1e-9))  # 0.28 * 25 is 7, not 8
    return min(size, -(-count // multiple) * multiple)


def extents(groups: Sequence[ChannelGroup], counts: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Return the extents of the first ``counts[group]`` units of each group; whole groups are left out."""
    result: dict[str, dict[int, int]] = {}
    for group in groups:
        if counts[group.name] < group.size:
            for piece in group.slices:
                result.setdefault(piece.tensor, {})[piece.dim] = counts[group.name] * piece.repeat
    return result


def leading_part(
    model: nn.Module, groups: Sequence[ChannelGroup], shares: Mapping[str, float]
) -> tuple[dict[str, dict[int, int]], dict[str, int]]:
    """Return the extents of the leading ``shares`` of each group's units, and the groups left in each GroupNorm.

    GroupNorm keeps whole groups, so that the small network computes the same as the masked one.
    """
    counts: dict[str, int] = {}
    norm_groups: dict[str, int] = {}
    for group in groups:
        layers = {piece.tensor.rpartition(".")[0] for piece in group.slices if piece.dim == 0}
        norms = {name: norm for name in layers if isinstance(norm := model.get_submodule(name), nn.GroupNorm)}
        multiple = max([1, *(norm.num_channels // norm.num_groups for norm in norms.values())])
        counts[group.name] = leading_count(group.size, shares[group.name], multiple)
        norm_groups |= {name: counts[group.name] * norm.num_groups // group.size for name, norm in norms.items()}
    return extents(groups, counts), norm_groups


def leading_block(tensor: Tensor, dims: Mapping[int, int] | None) -> Tensor:
    """Return a view of the leading block of ``tensor``: along each dimension of ``dims`` that number of indices."""
    for dim, count in (dims or {}).items():
        tensor = tensor.narrow(dim, 0, count)
    return tensor


def zero_padded(small: Tensors, shapes: Shapes) -> TensorDict:
    """Undo :func:`leading_block`: return tensors of the full ``shapes``, 0 beyond the leading blocks."""
    full_tensors = {}
    for name, tensor in small.items():
        full_tensors[name] = tensor
        if tensor.shape != shapes[name]:
            full_tensors[name] = tensor.new_zeros(tuple(shapes[name]))
            full_tensors[name][tuple(slice(size) for size in tensor.shape)] = tensor
    return full_tensors


def leading_masks(cut: Extents, shapes: Shapes) -> TensorDict:
    """Return masks of the full tensors that ``cut`` names: True in their leading blocks."""
    return {
        name: zero_padded({name: leading_block(torch.ones(tuple(shapes[name]), dtype=torch.bool), dims)}, shapes)[name]
        for name, dims in cut.items()
        if name in shapes
    }


class LeadingCounts:
    """Count the kept coordinates in any leading block of a mask (out, in, ...), from one pass over it."""

    def __init__(self, mask: Tensor) -> None:
        counts = mask.flatten(2).sum(2) if mask.dim() > 2 else mask.long()
        self.table = counts.cumsum(0).cumsum(1)  # (out, in)

    def within(self, dims: Mapping[int, int] | None) -> int:
        """Return the number of kept coordinates in the block of :func:`leading_block`."""
        rows, columns = ((dims or {}).get(dim, size) for dim, size in enumerate(self.table.shape))
        return int(self.table[rows - 1, columns - 1])
