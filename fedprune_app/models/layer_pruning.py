"""One decoder layer of a language model is pruned by the hidden states that enter it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedprune_app.core.graphs import Recorder
from fedprune_app.core.hessians import ClippedMoments
from fedprune_app.core.payload import Payload
from fedprune_app.core.scores import NOfM, magnitude_mask, wanda_mask
from fedprune_app.core.sparsegpt import Hessian, InputNorms, sparsegpt_together
from fedprune_app.models.llm import LanguageModel

PRUNERS = ("sparsegpt", "wanda", "magnitude")


class _Statistics(Protocol):
    """Statistics of a matrix' inputs, which come in batches."""

    def add(self, inputs: Tensor) -> None:
        """Add the inputs (sequences, ..., in) of some sequences."""


Found = TypeVar("Found", bound=_Statistics)
Kind = Callable[[int, torch.device], Found]
_KINDS: Mapping[str, Kind[Hessian | InputNorms]] = {"sparsegpt": Hessian, "wanda": InputNorms}


@dataclass(frozen=True)
class Pruner:
    """A pruner says how a matrix is pruned.

    See :mod:`fedprune_app.core.sparsegpt` and :mod:`fedprune_app.core.scores`.
    """

    method: str = "sparsegpt"
    density: float = 0.5
    n_of_m: NOfM | None = None  # in place of density
    block_size: int = 128
    damping: float = 0.01
    count: str = "exact"
    recorder: Recorder | None = None

    def __call__(self, weights: Sequence[Tensor], inputs: Hessian | InputNorms | None) -> list[tuple[Tensor, Tensor]]:
        """Return (pruned weight, mask) of each matrix; the matrices have the same inputs."""
        density = None if self.n_of_m else self.density
        if self.method == "sparsegpt":
            assert isinstance(inputs, Hessian)
            how = density, self.n_of_m, self.block_size, self.damping, self.count, self.recorder
            return sparsegpt_together(weights, inputs.matrix, *how)
        if self.method == "wanda":
            assert inputs is not None
            masks = [wanda_mask(weight, inputs.input_norms(), density, self.n_of_m) for weight in weights]
        else:
            masks = [magnitude_mask(weight, density, self.n_of_m) for weight in weights]
        return [(torch.where(mask, weight, 0), mask) for weight, mask in zip(weights, masks, strict=True)]


@dataclass(frozen=True)
class PrunedLayer:
    """A pruned layer holds its matrices with masks, the hidden states after it, and how far these states moved."""

    payload: Payload
    hidden: Tensor
    relative_error: float  # ‖outputs - outputs before‖² / ‖outputs before‖²
    input_rms: dict[str, Tensor]  # by matrix: each input's RMS (in,) over the tokens; empty with "magnitude"
    hessians: dict[str, Tensor]  # by the first matrix with the same inputs; empty unless the method is "sparsegpt"


def prune_layer(
    model: LanguageModel, layer: int, module: nn.Module, hidden: Tensor, pruner: Pruner, batch_size: int
) -> PrunedLayer:
    """Prune ``module``, decoder layer ``layer``, in place, from hidden states (sequences, length, width).

    All its matrices see the inputs of the layer as it was. The hidden states after it are the pruned layer's, in new
    memory. No more states than twice the size of ``hidden`` are held.
    Raises ``ValueError`` naming the matrix that cannot be pruned.
    """
    names = model.prunable(layer)
    outputs, statistics = _observe(model, module, names, hidden, _KINDS.get(pruner.method), batch_size)
    parameters = dict(module.named_parameters())
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for together in _of_same_inputs(names, statistics):
        try:
            done = pruner([parameters[name].data for name in together], statistics.get(together[0]))
        except ValueError as error:
            raise ValueError(f"{model.prefix}.{layer}.{together[0]}: {error}") from None
        for name, (pruned, mask) in zip(together, done, strict=True):
            parameters[name].data = pruned
            found[name] = pruned.cpu(), mask.cpu()
    tensors, masks = {name: found[name][0] for name in names}, {name: found[name][1] for name in names}
    per_token = hidden.shape[1] ** -0.5  # statistics are means over sequences, not over tokens
    rms = {name: each.input_norms().cpu() * per_token for name, each in statistics.items()}
    hessians = {name: each.matrix for name, each in _by_first(names, statistics).items() if isinstance(each, Hessian)}
    del statistics
    moved, size = torch.zeros((2,), dtype=torch.float64, device=outputs.device).unbind()
    for new, old in zip(model.run(module, hidden, batch_size), torch.split(outputs, batch_size), strict=True):
        moved += (new.float() - old.float()).square().sum(dtype=torch.float64)
        size += old.float().square().sum(dtype=torch.float64)
        old.copy_(new)
    relative_error = float(moved / size) if size else 0.0
    return PrunedLayer(Payload(tensors, masks), outputs, relative_error, rms, hessians)


def input_hessians(
    model: LanguageModel, layer: int, module: nn.Module, hidden: Tensor, batch_size: int
) -> dict[str, Tensor]:
    """Return the Hessians (in, in) of the inputs of ``module``, decoder layer ``layer``, for these hidden states.

    Matrices that are given one tensor share a Hessian, under the name of the first of them. The module and the hidden
    states (sequences, length, width) stay as they are.
    """
    return _input_matrices(model, layer, module, hidden, batch_size, Hessian)


def input_moments(
    model: LanguageModel, layer: int, module: nn.Module, hidden: Tensor, batch_size: int, clip_norm: float
) -> dict[str, Tensor]:
    """Return :class:`ClippedMoments` (in, in) of the inputs, as :func:`input_hessians` returns Hessians."""
    return _input_matrices(model, layer, module, hidden, batch_size, partial(ClippedMoments, clip_norm=clip_norm))


def _input_matrices(
    model: LanguageModel,
    layer: int,
    module: nn.Module,
    hidden: Tensor,
    batch_size: int,
    kind: Kind[Hessian | ClippedMoments],
) -> dict[str, Tensor]:
    names = model.prunable(layer)
    found = _by_first(names, _observe(model, module, names, hidden, kind, batch_size)[1])
    return {name: each.matrix for name, each in found.items()}


_same_inputs: WeakKeyDictionary[LanguageModel, list[list[str]]] = WeakKeyDictionary()


def same_inputs(model: LanguageModel) -> list[list[str]]:
    """Return the matrices of a decoder layer in groups that have the same inputs, each in the order of the layer.

    The groups are found by a call of the first layer, once for each model; all layers are of one kind.
    """
    if model not in _same_inputs:
        hidden = model.embed(torch.zeros((1, 2), dtype=torch.int64), 1)
        module, names = model.layer(0, model.layer_tensors(0)), model.prunable(0)
        _same_inputs[model] = _of_same_inputs(names, _observe(model, module, names, hidden, InputNorms, 1)[1])
    return _same_inputs[model]


def _by_first(names: list[str], statistics: Mapping[str, Found]) -> dict[str, Found]:
    firsts = (together[0] for together in _of_same_inputs(names, statistics))
    return {name: statistics[name] for name in firsts if name in statistics}


def _of_same_inputs(names: list[str], statistics: Mapping[str, object]) -> list[list[str]]:
    """Return the matrices in groups that share their inputs' statistics, where there are any; else one by one."""
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(id(statistics[name]) if name in statistics else name, []).append(name)
    return list(groups.values())


def _observe(
    model: LanguageModel, module: nn.Module, names: list[str], hidden: Tensor, kind: Kind[Found] | None, batch_size: int
) -> tuple[Tensor, dict[str, Found]]:
    """Return the layer's outputs, and the statistics of this kind of each matrix' inputs, or none.

    Matrices that are given one tensor share its statistics.
    """
    found: dict[str, Found] = {}
    given: dict[int, str] = {}  # id of a tensor of the current batch -> the matrix that met it first
    alive: list[Tensor] = []  # so that no id is used twice within a batch

    def hook(name: str) -> object:
        linear = module.get_submodule(name.removesuffix(".weight"))

        def observe(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs = arguments[0]
            first = given.setdefault(id(inputs), name)
            if first != name:
                found[name] = found[first]
                return
            alive.append(inputs)
            if name not in found:
                assert kind is not None
                found[name] = kind(inputs.shape[-1], inputs.device)
            # some models flatten (sequences, length) before their matrices
            found[name].add(inputs.reshape(num_sequences, -1, inputs.shape[-1]))

        return linear.register_forward_pre_hook(observe)

    hooks = [hook(name) for name in names] if kind is not None else []
    outputs, done = torch.empty_like(hidden), 0
    num_sequences = min(batch_size, len(hidden))
    try:
        for output in model.run(module, hidden, batch_size):
            outputs[done : done + len(output)] = output
            done += len(output)
            given.clear()
            alive.clear()
            num_sequences = min(batch_size, len(hidden) - done)
    finally:
        for each in hooks:
            each.remove()  # type: ignore[attr-defined]
    if kind is not None and (unseen := [name for name in names if name not in found]):
        raise ValueError(f"{unseen[0]} was given no input, allowed: layers that use all their matrices")
    return outputs, found
