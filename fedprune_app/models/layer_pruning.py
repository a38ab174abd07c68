"""One decoder layer of a language model is pruned by the hidden states that enter it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedprune_app.core.payload import Payload
from fedprune_app.core.scores import NOfM, magnitude_mask, wanda_mask
from fedprune_app.core.sparsegpt import Hessian, InputNorms, sparsegpt
from fedprune_app.models.llm import LanguageModel

PRUNERS = ("sparsegpt", "wanda", "magnitude")


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

    def __call__(self, weight: Tensor, inputs: Hessian | InputNorms | None) -> tuple[Tensor, Tensor]:
        """Return (pruned weight, mask)."""
        density = None if self.n_of_m else self.density
        if self.method == "sparsegpt":
            assert isinstance(inputs, Hessian)
            return sparsegpt(weight, inputs.matrix, density, self.n_of_m, self.block_size, self.damping, self.count)
        if self.method == "wanda":
            assert inputs is not None
            mask = wanda_mask(weight, inputs.input_norms(), density, self.n_of_m)
        else:
            mask = magnitude_mask(weight, density, self.n_of_m)
        return torch.where(mask, weight, 0), mask


@dataclass(frozen=True)
class PrunedLayer:
    """A pruned layer holds its matrices with masks, the hidden states after it, and how far these states moved."""

    payload: Payload
    hidden: Tensor
    relative_error: float  # ‖outputs - outputs before‖² / ‖outputs before‖²
    input_rms: dict[str, Tensor]  # by matrix: each input's RMS (in,) over the tokens; empty with "magnitude"


def prune_layer(
    model: LanguageModel, layer: int, module: nn.Module, hidden: Tensor, pruner: Pruner, batch_size: int
) -> PrunedLayer:
    """Prune ``module``, decoder layer ``layer``, in place, from hidden states (sequences, length, width).

    All its matrices see the inputs of the layer as it was. The hidden states after it are the pruned layer's, in new
    memory. No more states than twice the size of ``hidden`` are held.
    Raises ``ValueError`` naming the matrix that cannot be pruned.
    """
    names = model.prunable(layer)
    outputs, statistics = _observe(model, module, names, hidden, pruner.method, batch_size)
    tensors, masks = {}, {}
    parameters = dict(module.named_parameters())
    for name in names:
        try:
            pruned, mask = pruner(parameters[name].data, statistics.get(name))
        except ValueError as error:
            raise ValueError(f"{model.prefix}.{layer}.{name}: {error}") from None
        parameters[name].data = pruned
        tensors[name], masks[name] = pruned.cpu(), mask.cpu()
    per_token = hidden.shape[1] ** -0.5  # statistics are means over sequences, not over tokens
    rms = {name: each.input_norms().cpu() * per_token for name, each in statistics.items()}
    del statistics
    moved, size = 0.0, 0.0
    for new, old in zip(model.run(module, hidden, batch_size), torch.split(outputs, batch_size), strict=True):
        moved += float((new.float() - old.float()).square().sum(dtype=torch.float64))
        size += float(old.float().square().sum(dtype=torch.float64))
        old.copy_(new)
    return PrunedLayer(Payload(tensors, masks), outputs, moved / size if size else 0.0, rms)


def _observe(
    model: LanguageModel, module: nn.Module, names: list[str], hidden: Tensor, method: str, batch_size: int
) -> tuple[Tensor, dict[str, Hessian | InputNorms]]:
    """Return the layer's outputs, and the statistics of each matrix' inputs.

    Matrices that are given one tensor share its statistics.
    """
    kinds: dict[str, type[Hessian] | type[InputNorms]] = {"sparsegpt": Hessian, "wanda": InputNorms}
    kind = kinds.get(method)
    found: dict[str, Hessian | InputNorms] = {}
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
