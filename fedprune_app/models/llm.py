"""A causal language model as a shell and decoder layers, with one layer in memory at a time.

This works for any transformers model that passes hidden states, and nothing else, from one decoder layer to the next.
Nothing here depends on a model family's name: calls of the model itself show how its layers are called, and opening
rejects a model that does more between its layers.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.core.texts import one_line
from fedprune_app.models.checkpoints import Checkpoint, fill
from fedprune_app.models.transformers import import_transformers as import_transformers


@dataclass(frozen=True)
class MatrixLocation:
    """Where a matrix is: a parameter of the layer, or one expert's part; ``is_transposed`` if stored as (in, out).

    ``expert`` is that part's number, -1 for a whole parameter.
    """

    parameter: str
    expert: int
    is_transposed: bool


class Matrices:
    """The prunable matrices of a layer, by name: weights of its linear modules and of a mixture's experts.

    An ``nn.Linear`` stores its matrix as it is, GPT-2's ``Conv1D`` transposed. A three-dimensional parameter holds
    those of all experts: expert 3's part of ``mlp.experts.down_proj`` is called ``mlp.experts.down_proj.3``.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.places: dict[str, MatrixLocation] = {}
        self._names_of: dict[str, list[str]] = {}  # by parameter, its matrices
        for owner, module in layer.named_modules():
            if isinstance(module, _ConvNd | nn.Embedding):
                continue
            is_transposed = type(module).__name__ == "Conv1D" or bool(getattr(module, "is_transposed", False))
            for attribute, parameter in module.named_parameters(recurse=False):
                name = f"{owner}.{attribute}".removeprefix(".")
                if parameter.dim() == 3:
                    places = {f"{name}.{i}": MatrixLocation(name, i, is_transposed) for i in range(len(parameter))}
                elif attribute == "weight" and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
                    places = {name: MatrixLocation(name, -1, is_transposed)}
                else:
                    continue
                self._names_of[name] = list(places)
                self.places |= places

    def apart(self, tensors: Tensors) -> TensorDict:
        """Return a layer's tensors, or masks, with its matrices instead of the parameters that hold them."""
        return {name: tensor.contiguous() for name, tensor in self.views(tensors).items()}

    def views(self, tensors: Tensors) -> TensorDict:
        """Return the result of :meth:`apart` as views of ``tensors``."""
        views: TensorDict = {}
        for name, tensor in tensors.items():
            for matrix_name in self._names_of.get(name, [name]):
                place = self.places.get(matrix_name, MatrixLocation(matrix_name, -1, is_transposed=False))
                part = tensor if place.expert < 0 else tensor[place.expert]
                views[matrix_name] = part.mT if place.is_transposed else part
        return views

    def joined(self, tensors: Tensors) -> TensorDict:
        """Undo :meth:`apart`; ``tensors`` has all matrices of a parameter, or none."""
        parameters: TensorDict = {}
        for matrix_name, tensor in tensors.items():
            place = self.places.get(matrix_name, MatrixLocation(matrix_name, -1, is_transposed=False))
            if place.expert > 0:
                continue
            parts = [tensors[name] for name in self._names_of[place.parameter]] if place.expert == 0 else [tensor]
            oriented = [part.mT.contiguous() if place.is_transposed else part for part in parts]
            parameters[place.parameter] = torch.stack(oriented) if place.expert == 0 else oriented[0]
        return parameters


_LENGTH = 2048  # tokens in SparseGPT's, Wanda's and FedSpaLLM's sequences
_LOGITS = 2**22  # logits in memory at a time, unless one sequence has more; logits are many times wider than states
_SHARE = 4  # hidden states may fill this fraction, 1 / _SHARE, of a GPU's memory
_HIDDEN = 2**32  # bytes of hidden states of the texts whose perplexity is measured at a time
# Returns the tensors of decoder layer i, by name within the layer.
LayerTensors = Callable[[int], Tensors]
# The positional and keyword arguments of a decoder layer's call, apart from its hidden states.
Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]


class _Relay(nn.Module):
    """Stands in for a decoder layer in the shell: records its calls, and returns its input or ``result``.

    ``num_extra`` is the number of outputs that the layer returns in addition to hidden states. Other attributes are the
    layer's own.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = (layer,)  # in a tuple, so that it is not registered in the shell
        self.calls: list[tuple[Tensor, Arguments]] = []
        self.result: Tensor | None = None
        self.num_extra: int | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"][0], name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        hidden, *rest = arguments or (keywords.pop("hidden_states"),)
        self.calls.append((hidden, (tuple(rest), tuple(keywords.items()))))
        output = hidden if self.result is None else self.result
        return output if self.num_extra is None else (output, *[None] * self.num_extra)


class LanguageModel:
    """A language model that is run, measured and pruned layer by layer, from a folder opened as :class:`Checkpoint`.

    Names of tensors within a layer are transformers' own, except for matrices outside ``nn.Linear``: see
    :class:`Matrices`.
    """

    def __init__(self, folder: Path, dtype: str = "auto", device: torch.device | str = "cpu") -> None:
        self.folder, self.device = folder, torch.device(device)
        self.checkpoint = Checkpoint(folder, dtype)
        self.config, self.dtype = self.checkpoint.config, self.checkpoint.dtype
        text = self.config.get_text_config()
        # the model's longest sequence; None if its config has none
        self.max_length: int | None = getattr(text, "max_position_embeddings", None)
        self.token_bytes = int(getattr(text, "hidden_size", 1)) * self.dtype.itemsize  # of one token's hidden state
        # caches a few texts, because a process that simulates many clients measures all of them on the same ones
        self.encode = lru_cache(maxsize=8)(self._encode)
        self._digests: dict[int, str] = {}
        self.dense: dict[str, dict[str, Perplexity]] = {}  # of the unpruned layers: dense_perplexities
        self._call_cache: tuple[tuple[int, int], list[Arguments]] | None = None
        try:
            self.prefix, self._layers = decoder_layers(self.checkpoint.skeleton)
        except ValueError as error:
            raise self.checkpoint.refused(str(error)) from None
        self.matrices = [Matrices(layer) for layer in self._layers]
        self.num_layers = len(self._layers)
        self._shell = copy.deepcopy(self.checkpoint.skeleton)
        self._relays = [_Relay(layer) for layer in self._layers]
        self._shell.set_submodule(self.prefix, nn.ModuleList(self._relays))
        fill(self._shell, self.shell_tensors()).to(self.device).requires_grad_(False)
        self._vocabulary = len(self._shell.get_input_embeddings().weight)
        self._check_layerwise()

    def sequence_length(self, length: int) -> int:
        """Return the tokens of a sequence: ``length``, or for 0 the papers' length, limited to the model's maximum.

        ``ValueError`` for a length above the model's maximum.
        """
        self._check_length(length)
        return length or min(_LENGTH, self.max_length or _LENGTH)

    def _check_length(self, length: int) -> None:
        if self.max_length and length > self.max_length:
            raise ValueError(
                f"sequences have {length} tokens, allowed with this model: {self.max_length} "
                "(fedspallm.segment-length, fedspallm.window)"
            )

    @cached_property
    def tokenizer(self) -> Any:
        try:
            return import_transformers().AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"checkpoint {str(self.folder)!r} has no tokenizer: {one_line(error)}") from None

    def _encode(self, text: str) -> Tensor:
        """Return a text's token ids (tokens,), special ones included; read-only."""
        ids = torch.tensor(self.tokenizer(text, verbose=False).input_ids, dtype=torch.int64)
        if len(ids) and int(ids.max()) >= self._vocabulary:
            raise self.checkpoint.refused(
                f"whose tokenizer gives the id {int(ids.max())}, and which embeds {self._vocabulary} ids"
            )
        return ids

    def started(self, windows: Tensor) -> Tensor:
        """Return the windows (windows, length) with the start token, if the tokenizer has one, in the first place."""
        start = self.encode("")[:1]
        return torch.cat([start.expand(len(windows), len(start)), windows[:, len(start) :]], dim=1)

    # --- weights ------------------------------------------------------------------------------------------------

    def prunable(self, layer: int) -> list[str]:
        """Return the names, within the layer, of its matrices: see :class:`Matrices`.

        Biases, norms and other tensors are never pruned.
        """
        return list(self.matrices[layer].places)

    def layer_tensors(self, layer: int) -> TensorDict:
        """Return the checkpoint's tensors of a decoder layer, by name within the layer, on the CPU."""
        start = f"{self.prefix}.{layer}."
        tensors = self.checkpoint.read(start + name for name in self._layers[layer].state_dict())
        return self.matrices[layer].apart({name.removeprefix(start): tensor for name, tensor in tensors.items()})

    def layer_like(self, layer: int) -> TensorDict:
        """Return tensors without values, in the names, shapes and dtypes of :meth:`layer_tensors`."""
        return self.matrices[layer].apart(self._layers[layer].state_dict())

    def shell_tensors(self) -> TensorDict:
        """Return the checkpoint's other tensors, by full name: embeddings, last norm, head; tied tensors once."""
        return self.checkpoint.read(self._shell.state_dict())

    def named(self, layer: int, tensors: Tensors) -> TensorDict:
        """Return a decoder layer's tensors or masks under transformers' full names."""
        return {f"{self.prefix}.{layer}.{n}": t for n, t in self.matrices[layer].joined(tensors).items()}

    def layer_digest(self, layer: int) -> str:
        return self._digest(layer, lambda: self.layer_tensors(layer))

    def shell_digest(self) -> str:
        """Return the SHA-256 of the tensors outside the decoder layers."""
        return self._digest(-1, self.shell_tensors)

    def digest(self, pruned_layer: Callable[[int], Payload] = lambda layer: Payload({})) -> str:
        """Return one SHA-256 of the model; each ``pruned_layer`` that is not empty stands for the layer."""
        total = hashlib.sha256(self.shell_digest().encode())
        for layer in range(self.num_layers):
            payload = pruned_layer(layer)
            total.update((payload.digest() if payload.tensors else self.layer_digest(layer)).encode())
        return total.hexdigest()

    def _digest(self, part: int, read: Callable[[], Tensors]) -> str:
        if part not in self._digests:
            self._digests[part] = Payload(read()).digest()
        return self._digests[part]

    def num_parameters(self) -> tuple[int, int]:
        """Return the number of parameters of the whole model, and of its prunable matrices."""
        shapes_by_layer = [self.layer_like(layer) for layer in range(self.num_layers)]
        prunable = sum(
            shapes[name].numel() for layer, shapes in enumerate(shapes_by_layer) for name in self.prunable(layer)
        )
        num_in_layers = sum(parameter.numel() for parameter in self._layers.parameters())
        return num_in_layers + sum(parameter.numel() for parameter in self._shell.parameters()), prunable

    # --- computing ----------------------------------------------------------------------------------------------

    def home(self, num_tokens: int) -> torch.device:
        """Return the device for the hidden states of ``num_tokens``: a GPU if they take little of it, else the CPU."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            if num_tokens * self.token_bytes <= total // _SHARE:
                return self.device
        return torch.device("cpu")

    def layer(self, layer: int, tensors: Tensors) -> nn.Module:
        """Return a decoder layer with these weights, on the device, in eval mode."""
        module = copy.deepcopy(self._layers[layer])
        module.__dict__["number"] = layer
        joined = {name: tensor.to(self.device) for name, tensor in self.matrices[layer].joined(tensors).items()}
        module.load_state_dict(joined, assign=True)
        return module.to(self.device).requires_grad_(False)

    def whole(self, layers: LayerTensors) -> Any:
        """Return the transformers model with copies of the matrices of ``layers`` instead of its own, for training.

        All of it is in memory, on the device, in the model's dtype.
        """
        tensors = self.shell_tensors()
        for layer in range(self.num_layers):
            matrices = {name: tensor.clone() for name, tensor in layers(layer).items()}
            tensors |= self.named(layer, {**self.layer_tensors(layer), **matrices})
        return fill(copy.deepcopy(self.checkpoint.skeleton), tensors).to(self.device).train()

    @torch.no_grad()
    def embed(self, tokens: Tensor, batch_size: int, device: torch.device | str | None = None) -> Tensor:
        """Return the hidden states (sequences, length, width) that enter the first layer for ``tokens``.

        They are on ``device``, by default on :meth:`home`. ``ValueError`` for sequences above the model's maximum
        length.
        """
        self._check_length(tokens.shape[1])
        hidden = torch.empty(0)
        for start in range(0, len(tokens), batch_size):
            states = self._calls(tokens[start : start + batch_size])[0][0]
            if not start:
                if device is None:
                    device = self.home(tokens.numel())
                hidden = torch.empty((len(tokens), *states.shape[1:]), dtype=states.dtype, device=device)
            hidden[start : start + len(states)] = states
        return hidden

    @torch.no_grad()
    def run(self, module: nn.Module, hidden: Tensor, batch_size: int) -> Iterator[Tensor]:
        """Yield the layer's outputs for these hidden states, batch by batch, on the device of the states."""
        for batch in torch.split(hidden, batch_size):
            arguments, keywords = self._arguments(batch.shape[0], batch.shape[1])[module.__dict__["number"]]
            output = module(batch.to(self.device), *arguments, **dict(keywords))
            yield (output[0] if isinstance(output, tuple) else output).to(hidden.device)

    def pass_through(self, module: nn.Module, hidden: Tensor, batch_size: int) -> Tensor:
        """Return ``hidden`` after a layer.

        It is overwritten batch by batch, because hidden states dominate the memory.
        """
        for batch, output in zip(torch.split(hidden, batch_size), self.run(module, hidden, batch_size), strict=True):
            batch.copy_(output)
        return hidden

    @torch.no_grad()
    def losses(self, tokens: Tensor, hidden: Tensor) -> list[float]:
        """Return the mean cross entropy of each sequence's next tokens; ``hidden`` are the last layer's outputs."""
        losses: list[float] = []
        num_sequences = max(1, _LOGITS // (self._vocabulary * tokens.shape[1]))
        for ids, state in zip(torch.split(tokens, num_sequences), torch.split(hidden, num_sequences), strict=True):
            logits = self._logits(ids, state)
            logits, targets = logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten().to(self.device)
            token_losses = F.cross_entropy(logits, targets, reduction="none").view(len(ids), -1)
            losses += token_losses.double().mean(1).tolist()
        return losses

    # --- inside -------------------------------------------------------------------------------------------------

    def _logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        self._relays[-1].result = hidden.to(self.device)
        try:
            logits: Tensor = self._shell(ids.to(self.device), use_cache=False).logits
        finally:
            self._relays[-1].result = None
            for relay in self._relays:
                relay.calls.clear()
        return logits

    def _calls(self, tokens: Tensor) -> list[tuple[Tensor, Arguments]]:
        """Return the arguments of each decoder layer's call for these tokens."""
        for relay in self._relays:
            relay.calls.clear()
        self._shell.base_model(tokens.to(self.device), use_cache=False)
        if any(len(relay.calls) != 1 for relay in self._relays):
            raise ValueError("does not call each of them once")
        return [relay.calls[0] for relay in self._relays]

    def _arguments(self, num_sequences: int, length: int) -> list[Arguments]:
        """Return the arguments of each layer's call for sequences of this length without padding; cached once."""
        shape = (num_sequences, length)
        if self._call_cache is None or self._call_cache[0] != shape:
            calls = self._calls(torch.zeros(shape, dtype=torch.int64))
            self._call_cache = shape, [arguments for _, arguments in calls]
        return self._call_cache[1]

    @torch.no_grad()
    def _check_layerwise(self) -> None:
        """Raise ``ValueError`` for a model that does more between and around its layers than pass hidden states on.

        The layers' arguments may depend only on the length of the sequences, and what comes after the last layer only
        on that layer's output. The form of the layers' outputs is taken from the first one.
        """
        ids = torch.arange(6).view(2, 3).clamp(max=self._vocabulary - 1)
        try:
            with suppress(Exception):  # until the form of the layers' outputs is known, only the first call counts
                self._calls(ids)
            if not self._relays[0].calls:
                raise ValueError("does not call them")
            hidden, (arguments, keywords) = self._relays[0].calls[0]
            answer = self.layer(0, self.layer_tensors(0))(hidden, *arguments, **dict(keywords))
            for relay in self._relays:
                relay.num_extra = len(answer) - 1 if isinstance(answer, tuple) else None
            state = answer[0] if isinstance(answer, tuple) else answer
            calls, other_arguments = self._calls(ids), self._arguments(*ids.shape)
            is_layerwise = (
                state.shape == hidden.shape
                and all(states is calls[0][0] for states, _ in calls)
                and all(map(_are_equal, [arguments for _, arguments in calls], other_arguments))
                and torch.equal(self._logits(ids, state), self._logits(torch.zeros_like(ids), state))
            )
            if not is_layerwise:
                raise ValueError("calls them with more than their hidden states, or reads more than the last one's")
        except Exception as error:  # model families raise many types of error here
            reason = f"which cannot be run layer by layer: '{self.prefix}' is the list of its layers, and it"
            raise self.checkpoint.refused(f"{reason} {one_line(error)[:200]}") from None


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    return isinstance(first, bool | int | float | str | torch.dtype | None) and first == second


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the modules of the outermost list with the most matrices."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [(n, m) for n, m in lists if not any(n.startswith(f"{prefix}.") for prefix, _ in lists)]
    counts = [len(Matrices(module).places) for _, module in outermost]
    if not counts or not max(counts):
        raise ValueError("which has no list of decoder layers with matrices")
    return outermost[counts.index(max(counts))]


@lru_cache(maxsize=1)  # a process that simulates many clients opens it once
def open_model(folder: Path, dtype: str = "auto", device: str = "cpu") -> LanguageModel:
    """Return a :class:`LanguageModel` that all callers in this process share."""
    return LanguageModel(folder, dtype, device)


@dataclass(frozen=True)
class Perplexity:
    """A text's perplexity, over ``windows`` consecutive windows of ``window`` tokens; the tail is dropped."""

    value: float
    window: int
    windows: int
    windows_in_text: int | None = None  # windows in the text, of which the first `windows` were measured


def perplexities(model: LanguageModel, layers: LayerTensors, texts: Tensors, batch_size: int) -> dict[str, Perplexity]:
    """Return the perplexity of each text by name: exp of the mean, over windows, of each one's mean cross entropy.

    ``texts`` are windows (windows, length) of token ids; each window counts its next tokens. One decoder layer is in
    memory at a time, and is read once for as many texts as fit into :data:`_HIDDEN`. Source: the evaluation of
    SparseGPT's released code, which weights each window's mean over ``length - 1`` targets by ``length``.
    """
    results: dict[str, Perplexity] = {}
    group: TensorDict = {}
    for name, windows in texts.items():
        if group and sum(tokens.numel() for tokens in [*group.values(), windows]) * model.token_bytes > _HIDDEN:
            results |= _perplexities(model, layers, group, batch_size)
            group = {}
        group[name] = windows
    return results | _perplexities(model, layers, group, batch_size)


def dense_perplexities(model: LanguageModel, texts: Tensors, batch_size: int) -> dict[str, Perplexity]:
    """Return :func:`perplexities` of the model's own layers.

    The runs of a sweep share the model, so the same windows are measured once per process.
    """
    key = f"{batch_size} {Payload(dict(texts)).digest()}"
    if key not in model.dense:
        model.dense[key] = perplexities(model, model.layer_tensors, texts, batch_size)
    return dict(model.dense[key])


def _perplexities(model: LanguageModel, layers: LayerTensors, texts: Tensors, batch_size: int) -> dict[str, Perplexity]:
    home = model.home(sum(windows.numel() for windows in texts.values()))
    hidden = {name: model.embed(windows, batch_size, home) for name, windows in texts.items()}
    for layer in range(model.num_layers):
        module = model.layer(layer, layers(layer))
        hidden = {name: model.pass_through(module, states, batch_size) for name, states in hidden.items()}
    results = {}
    for name, windows in texts.items():
        losses = model.losses(windows, hidden.pop(name))
        value = math.exp(min(math.fsum(losses) / len(losses), 700.0))
        results[name] = Perplexity(value, windows.shape[1], len(losses))
    return results
