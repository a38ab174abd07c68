"""Pruning of one decoder layer by the hidden states that enter it, and recovery training of the kept weights.

Published pruning methods for language models recover accuracy by training the kept weights on text, with all data in
one place. Here a federation of clients does it, by federated averaging (McMahan et al., 2017).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedprune_app.core.graphs import CudaGraphs
from fedprune_app.core.named import TensorDict, Tensors, ValueDict
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import global_draws_of
from fedprune_app.core.scores import NOfM, magnitude_mask, wanda_mask
from fedprune_app.core.sparsegpt import Hessian, InputNorms, sparsegpt
from fedprune_app.models.llm import LanguageModel

# Creates empty statistics for a matrix with that number of inputs.
MakeStatistic = Callable[[int, torch.device], Any]
_KINDS: Mapping[str, MakeStatistic] = {"sparsegpt": Hessian, "wanda": InputNorms}


@dataclass(frozen=True)
class Pruner:
    """The pruning method with its options, applied to matrices that share their inputs.

    See :mod:`fedprune_app.core.sparsegpt` and :mod:`fedprune_app.core.scores`.
    """

    method: str = "sparsegpt"
    density: float = 0.5
    n_of_m: NOfM | None = None  # instead of density
    block_size: int = 128
    recorder: CudaGraphs | None = None

    def __call__(self, weights: Sequence[Tensor], inputs: Any) -> list[tuple[Tensor, Tensor]]:
        """Return (pruned weight, mask) of each matrix; the matrices share their inputs.

        An expert without tokens is pruned by the magnitude of its weights.
        """
        density = None if self.n_of_m else self.density
        is_seen = inputs is not None and bool(inputs.input_norms().any())
        if self.method == "sparsegpt" and is_seen:
            options = density, self.n_of_m, self.block_size
            return sparsegpt(weights, inputs.matrix, *options, recorder=self.recorder)
        if self.method == "wanda" and is_seen:
            masks = [wanda_mask(weight, inputs.input_norms(), density, self.n_of_m) for weight in weights]
        else:
            masks = [magnitude_mask(weight, density, self.n_of_m) for weight in weights]
        return [(torch.where(mask, weight, 0), mask) for weight, mask in zip(weights, masks, strict=True)]


@dataclass(frozen=True)
class PrunedLayer:
    """A layer's matrices with masks, the hidden states after it, and how far these states moved."""

    payload: Payload
    hidden: Tensor
    relative_error: float  # ‖outputs - outputs before‖² / ‖outputs before‖²


def prune_layer(
    model: LanguageModel, layer: int, module: nn.Module, hidden: Tensor, pruner: Pruner, batch_size: int
) -> PrunedLayer:
    """Prune ``module``, decoder layer ``layer``, in place, by hidden states (sequences, length, width).

    All its matrices use the inputs of the unpruned layer. The returned hidden states are the pruned layer's, in new
    memory. At most twice the size of ``hidden`` is in memory. Raises ``ValueError`` naming a matrix that cannot be
    pruned.
    """
    names = model.prunable(layer)
    outputs, statistics = _observe(model, module, names, hidden, _KINDS.get(pruner.method), batch_size)
    parameters = dict(module.named_parameters())
    matrices = model.matrices[layer].apart(parameters)
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for group in _group_by_inputs(names, statistics):
        try:
            pairs = pruner([matrices[name].data for name in group], statistics.get(group[0]))
        except ValueError as error:
            raise ValueError(f"{model.prefix}.{layer}.{group[0]}: {error}") from None
        results |= dict(zip(group, pairs, strict=True))
    for name, weight in model.matrices[layer].joined({name: results[name][0] for name in names}).items():
        parameters[name].data = weight
    tensors, masks = {name: results[name][0].cpu() for name in names}, {name: results[name][1].cpu() for name in names}
    del statistics
    change, size = torch.zeros((2,), dtype=torch.float64, device=outputs.device).unbind()
    for new_outputs, old_outputs in zip(
        model.run(module, hidden, batch_size), torch.split(outputs, batch_size), strict=True
    ):
        change += (new_outputs.float() - old_outputs.float()).square().sum(dtype=torch.float64)
        size += old_outputs.float().square().sum(dtype=torch.float64)
        old_outputs.copy_(new_outputs)
    relative_error = float(change / size) if size else 0.0
    return PrunedLayer(Payload(tensors, masks), outputs, relative_error)


def input_matrices(
    model: LanguageModel,
    module: nn.Module,
    names: Sequence[str],
    hidden: Tensor,
    batch_size: int,
    kind: MakeStatistic = Hessian,
) -> TensorDict:
    """Return the Hessians (in, in) of the inputs of these matrices of a decoder layer, for these hidden states.

    ``kind`` makes the statistic, such as :class:`~fedprune_app.core.hessians.ClippedMoments`. Matrices with the same
    input tensor share a Hessian, under the name of the first of them. The module and the hidden states (sequences,
    length, width) are not changed.
    """
    statistics = _observe(model, module, names, hidden, kind, batch_size)[1]
    first_names = [group[0] for group in _group_by_inputs(names, statistics) if group[0] in statistics]
    return {name: statistics[name].matrix for name in first_names}


def check_layers(model: LanguageModel) -> None:
    """Raise ``ValueError`` for a model with a decoder layer that cannot be pruned.

    One layer of each shape is run. The inputs of its matrices must be observable, and its output must be deterministic.
    """
    hidden = model.embed(torch.arange(4).view(2, 2), 2)
    for layer in {str(_shapes(model, layer)): layer for layer in reversed(range(model.num_layers))}.values():
        module, names = model.layer(layer, model.layer_tensors(layer)), model.prunable(layer)
        outputs = [_observe(model, module, names, hidden, InputNorms, 2)[0] for _ in range(2)]
        if not torch.equal(*outputs):
            raise model.checkpoint.refused(f"whose '{model.prefix}.{layer}' computes another thing each time")


@lru_cache(maxsize=1)
def same_inputs(model: LanguageModel) -> list[list[str]]:
    """Return the matrices of a decoder layer in groups that share their inputs, each in the order of the layer.

    A call of the first layer, once per model, finds the groups. ``ValueError`` if layers differ, and for experts, which
    receive only a part of the text.
    """
    hidden = model.embed(torch.zeros((1, 2), dtype=torch.int64), 1)
    module, names = model.layer(0, model.layer_tensors(0)), model.prunable(0)
    has_experts = any(place.expert >= 0 for place in model.matrices[0].places.values())
    if has_experts or any(_shapes(model, 0) != _shapes(model, layer) for layer in range(model.num_layers)):
        reason = "whose layers differ, or have experts; allowed: fedspallm.merge 'mean', without dp.enabled"
        raise model.checkpoint.refused(reason)
    return _group_by_inputs(names, _observe(model, module, names, hidden, InputNorms, 1)[1])


def _shapes(model: LanguageModel, layer: int) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.layer_like(layer).items()}


def _group_by_inputs(names: Sequence[str], statistics: Mapping[str, object]) -> list[list[str]]:
    """Return the matrices in groups that share their inputs' statistics, or one by one without statistics."""
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(id(statistics[name]) if name in statistics else name, []).append(name)
    return list(groups.values())


class _Watch(TorchFunctionMode):
    """Detect products with some matrices (out, in), and call ``observer`` with the matrix' name and its inputs."""

    def __init__(self, matrices: Tensors, observer: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.observer = observer
        self.names = {_place(matrix): name for name, matrix in matrices.items()}
        self.transposed_names = {_place(matrix.mT): name for name, matrix in matrices.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: ValueDict | None = None
    ) -> Any:
        inputs, matrix = args[_PRODUCTS[func] :][:2] if func in _PRODUCTS and len(args) > 1 else (None, None)
        if isinstance(matrix, Tensor):
            name = (self.names if func is F.linear else self.transposed_names).get(_place(matrix))
            if name is not None:
                self.observer(name, inputs)
        return func(*args, **kwargs or {})


# Functions that multiply by a matrix, and the position of the inputs, which precede it, in their arguments.
_PRODUCTS: Mapping[Callable[..., Any], int] = {
    F.linear: 0, torch.matmul: 0, Tensor.matmul: 0, Tensor.__matmul__: 0, torch.mm: 0, Tensor.mm: 0, torch.addmm: 1,
}  # fmt: skip


def _place(matrix: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return matrix.data_ptr(), matrix.shape, matrix.stride()


def _observe(
    model: LanguageModel,
    module: nn.Module,
    names: Sequence[str],
    hidden: Tensor,
    kind: MakeStatistic | None,
    batch_size: int,
) -> tuple[Tensor, ValueDict]:
    """Return the layer's outputs, and statistics of type ``kind`` of each matrix' inputs, if any.

    Matrices with the same input tensor share its statistics. An expert receives some tokens of a batch, or none: the
    others count as zeros.
    """
    statistics: ValueDict = {}
    first_names: dict[int, str] = {}  # id of a tensor of the current batch -> the matrix that met it first
    tensors: list[Tensor] = []  # keeps ids unique within a batch
    unseen_names = set(names)  # in the current batch
    layer = module.__dict__["number"]
    places = model.matrices[layer].places

    def observe(name: str, inputs: Tensor) -> None:
        unseen_names.discard(name)
        first = first_names.setdefault(id(inputs), name)
        if first != name:
            statistics[name] = statistics[first]
            return
        tensors.append(inputs)
        size = inputs.shape[-1]
        if name not in statistics:
            assert kind is not None
            statistics[name] = kind(size, inputs.device)
        inputs = inputs.reshape(-1, size)
        if (num_missing := -len(inputs) % num_sequences) and places[name].expert < 0:
            raise model.checkpoint.refused(f"whose '{name}' in layer {layer} is given a part of the tokens")
        inputs = F.pad(inputs, (0, 0, 0, num_missing)) if num_missing else inputs
        # some models flatten (sequences, length) before their matrices
        statistics[name].add(inputs.reshape(num_sequences, -1, size))

    outputs, num_done = torch.empty_like(hidden), 0
    num_sequences = min(batch_size, len(hidden))
    views = model.matrices[layer].views(dict(module.named_parameters()))
    matrices = {name: views[name] for name in names}
    with _Watch(matrices, observe) if kind is not None else nullcontext():
        for output in model.run(module, hidden, batch_size):
            outputs[num_done : num_done + len(output)] = output
            num_done += len(output)
            busy_parameters = {places[name].parameter for name in names if name not in unseen_names}
            for name in sorted(unseen_names) if kind is not None else ():
                if places[name].parameter not in busy_parameters:
                    raise model.checkpoint.refused(f"whose '{name}' in layer {layer} was given no input that is known")
                observe(name, hidden.new_zeros(num_sequences, matrices[name].shape[1]))
            unseen_names = set(names)
            first_names.clear()
            tensors.clear()
            num_sequences = min(batch_size, len(hidden) - num_done)
    return outputs, statistics


# --- recovery ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The ``steps`` of AdamW in recovery, each on ``batch_size`` segments, and their learning rates.

    The learning rate rises over the first tenth of the steps to ``learning_rate``, and falls by half a cosine to a
    tenth of it.
    """

    steps: int
    batch_size: int
    learning_rate: float

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rise = max(1, self.steps // 10)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        progress = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def recovered(
    model: LanguageModel, layers: Mapping[int, Payload], segments: Tensor, schedule: Schedule, draw: torch.Generator
) -> tuple[dict[int, Payload], float]:
    """Train the kept weights of the pruned ``layers`` on token ids (segments, length); return them and the mean loss.

    Embeddings, norms, biases, the head, and layers that are not in ``layers`` are not changed. The whole model is in
    memory, in float32 on the model's device, with gradients and two moments of the kept matrices. The loss is the mean
    cross entropy of the next token, in nats, over all steps. Raises ``ValueError`` for a loss that is not finite.
    """
    network = model.whole(lambda layer: layers[layer].tensors if layer in layers else {}).float().requires_grad_(False)
    masks_by_name = {
        name: m for layer, pruned in layers.items() for name, m in model.named(layer, pruned.masks).items()
    }
    matrices = {name: network.get_parameter(name).requires_grad_(True) for name in masks_by_name}
    masks = {name: mask.to(model.device) for name, mask in masks_by_name.items()}
    optimizer = torch.optim.AdamW(matrices.values(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    with global_draws_of(draw.initial_seed()):  # for dropout, which some model families have
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
    """Yield batches without end: all segments in a random order, then again in another one."""
    while True:
        for batch in torch.split(torch.randperm(len(segments), generator=draw), size):
            yield segments[batch]
