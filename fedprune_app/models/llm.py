"""A causal language model is a shell and a row of decoder layers, of which one is in memory at a time.

This works for any transformers model that keeps its decoder layers, all of one kind, in a list and their matrices in
``nn.Linear``: OPT, LLaMA, Qwen, Mistral, Phi and their like. Nothing here knows a family by name.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.payload import Payload
from fedprune_app.models.checkpoints import TensorFiles, one_line
from fedprune_app.models.checkpoints import import_transformers as import_transformers
from fedprune_app.models.hidden_states import home_of

log = logging.getLogger("flwr.fedprune")
DTYPES = ("auto", "float32", "float16", "bfloat16")
_LENGTH = 2048  # tokens in SparseGPT's, Wanda's and FedSpaLLM's sequences
_LOGITS = 2**22  # logits in memory at a time, unless one sequence has more; logits are many times wider than states
_HIDDEN = 2**32  # bytes of hidden states of the texts whose perplexity is measured at a time
_REMEMBERED = 2**22  # longest text, in characters, whose tokens are remembered
LayerTensors = Callable[[int], Mapping[str, Tensor]]
"""A function of this type returns the tensors of decoder layer i, by name within the layer."""


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return ``module`` with its weights in ``dtype``; buffers that are in no checkpoint stay as they are.

    ``module.to(dtype)`` would round these buffers too: rotary frequencies, which are float32 in a model of any dtype.
    """
    stored = module.state_dict()
    tensors = [*module.parameters(), *(buffer for name, buffer in module.named_buffers() if name in stored)]
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


class _Relay(nn.Module):
    """A relay stands in the shell for all decoder layers.

    The relay notes how the first layer was called, and hands on the output of the last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        self.keywords: dict[str, Any] = {}
        self.result: Tensor | None = None

    def forward(self, hidden: Tensor, **keywords: Any) -> Tensor:
        self.hidden, self.keywords = hidden, keywords
        return hidden if self.result is None else self.result


class LanguageModel:
    """A language model is an opened checkpoint folder.

    ``dtype`` is one of :data:`DTYPES`; "auto" is the checkpoint's own.
    """

    def __init__(self, folder: Path, dtype: str = "auto", device: torch.device | str = "cpu") -> None:
        transformers = import_transformers()
        self.folder, self.device = folder, torch.device(device)
        try:
            self.config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"checkpoint {str(folder)!r} cannot be read: {one_line(error)}") from None
        self._files = TensorFiles(folder)
        self._tokenizer: Any = None
        self._encode_once = lru_cache(maxsize=32)(self._encode)
        self._digests: dict[int, str] = {}
        self.dense: dict[str, dict[str, Perplexity]] = {}  # of the model's own layers: dense_perplexities
        self._called: tuple[tuple[int, int], dict[str, Any]] | None = None
        auto = transformers.AutoModelForCausalLM
        try:
            with torch.device("meta"):
                whole = auto.from_config(self.config)
        except ValueError:
            kind = type(self.config).__name__
            raise ValueError(f"checkpoint {str(folder)!r} is of {kind}, allowed: a causal language model") from None
        self.prefix, self._layers = decoder_layers(whole)
        more = self.prefix + f".{self.num_layers}."
        if beyond := next((name for name in self._files if name.startswith(more)), None):
            log.warning(
                "checkpoint %r has tensor '%s', its config says %d layers", str(folder), beyond, self.num_layers
            )
        self.dtype = self._dtype(dtype)
        self._shell, self._relay = self._build_shell(auto)
        self._try()

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self._layers)

    @property
    def max_length(self) -> int | None:
        """Return the longest sequence for which the model was made; None where its config does not say so."""
        return getattr(self.config, "max_position_embeddings", None)

    def sequence_length(self, asked: int) -> int:
        """Return the tokens of a sequence: ``asked``, or for 0 the papers' length, but no more than the model takes.

        ``ValueError`` where more are asked for than that for which the model was made.
        """
        self._check_length(asked)
        return asked or min(_LENGTH, self.max_length or _LENGTH)

    def _check_length(self, length: int) -> None:
        if self.max_length and length > self.max_length:
            raise ValueError(
                f"sequences have {length} tokens, allowed with this model: {self.max_length} "
                "(fedspallm.segment-length, fedspallm.window)"
            )

    def tokenizer(self) -> Any:
        """Return the checkpoint's own tokenizer."""
        try:
            return import_transformers().AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"checkpoint {str(self.folder)!r} has no tokenizer: {one_line(error)}") from None

    def encode(self, text: str) -> Tensor:
        """Return a text's token ids (tokens,), with the tokens that the tokenizer puts around a text.

        The caller must not write to the ids. The ids of a few texts are remembered: a process that simulates many
        clients measures all of them on the same texts.
        """
        return self._encode_once(text) if len(text) <= _REMEMBERED else self._encode(text)

    def _encode(self, text: str) -> Tensor:
        if self._tokenizer is None:
            self._tokenizer = self.tokenizer()
        return torch.tensor(self._tokenizer(text, verbose=False).input_ids, dtype=torch.int64)

    # --- weights ------------------------------------------------------------------------------------------------

    def prunable(self, layer: int) -> list[str]:
        """Return the names, within the layer, of its matrices.

        Matrices are the weights of ``nn.Linear``. Biases and norms are never pruned.
        """
        return [f"{name}.weight" for name, module in self._layers[layer].named_modules() if _is_matrix(module)]

    def layer_tensors(self, layer: int) -> dict[str, Tensor]:
        """Return the checkpoint's tensors of a decoder layer, by name within the layer, on the CPU."""
        start = f"{self.prefix}.{layer}."
        names = list(self._layers[layer].state_dict())
        read = self._read(start + name for name in names)
        return {name: read[start + name] for name in names}

    def layer_like(self, layer: int) -> dict[str, Tensor]:
        """Return tensors of the names, shapes and dtypes of :meth:`layer_tensors`, without values."""
        like = self._layers[layer].state_dict()
        return {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in like.items()}

    def shell_tensors(self) -> dict[str, Tensor]:
        """Return the checkpoint's other tensors, by full name: embeddings, last norm, head.

        Tied tensors are there once.
        """
        return self._read(name for name in self._shell.state_dict() if self._stored(name))

    def layer_digest(self, layer: int) -> str:
        """Return the SHA-256 of a dense layer."""
        return self._digest(layer, lambda: self.layer_tensors(layer))

    def shell_digest(self) -> str:
        """Return the SHA-256 of the tensors that are in no decoder layer."""
        return self._digest(-1, self.shell_tensors)

    def _digest(self, part: int, read: Callable[[], Mapping[str, Tensor]]) -> str:
        if part not in self._digests:
            self._digests[part] = Payload(read()).digest()
        return self._digests[part]

    def num_parameters(self) -> tuple[int, int]:
        """Return two numbers of parameters: of the whole model, and of the prunable matrices."""
        prunable = sum(module.weight.numel() for module in self._layers.modules() if isinstance(module, nn.Linear))
        in_layers = sum(parameter.numel() for parameter in self._layers.parameters())
        return in_layers + sum(parameter.numel() for parameter in self._shell.parameters()), prunable

    # --- computing ----------------------------------------------------------------------------------------------

    def home(self, num_tokens: int) -> torch.device:
        """Return where the hidden states of so many tokens lie: on the device if they take little of it."""
        return home_of(num_tokens * self.token_bytes, self.device)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's hidden state."""
        return int(getattr(self.config, "hidden_size", 1)) * self.dtype.itemsize

    def layer(self, layer: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return a decoder layer with these weights, on the device, in eval mode."""
        module = copy.deepcopy(self._layers[layer])
        for name, tensor in self.layer_like(layer).items():
            self._check_shape(f"{self.prefix}.{layer}.{name}", tensors[name].shape, tensor.shape)
        module.load_state_dict(
            {name: tensor.to(self.device, self.dtype) for name, tensor in tensors.items()}, assign=True
        )
        if any(buffer.is_meta for buffer in module.buffers()):
            raise ValueError(
                f"decoder layer {layer} of {type(self.config).__name__} has buffers outside the checkpoint"
            )
        return module.eval().requires_grad_(False)

    def whole(self, layers: LayerTensors) -> Any:
        """Return the transformers model with the matrices of ``layers`` in place of its own, in training mode.

        All of it is in memory, on the device, in the model's dtype.
        """
        model: Any = cast(import_transformers().AutoModelForCausalLM.from_config(self.config), self.dtype)
        tensors = self.shell_tensors()
        for layer in range(self.num_layers):
            own = {**self.layer_tensors(layer), **layers(layer)}
            tensors |= {f"{self.prefix}.{layer}.{name}": tensor for name, tensor in own.items()}
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        return model.to(self.device).train()

    @torch.no_grad()
    def embed(self, tokens: Tensor, batch_size: int, device: torch.device | str | None = None) -> Tensor:
        """Return the hidden states (sequences, length, width) that enter the first layer for ``tokens``.

        They lie on ``device``, or where :meth:`home` says. ``ValueError`` for sequences longer than those for which the
        model was made.
        """
        self._check_length(tokens.shape[1])
        hidden = torch.empty(0)
        for start in range(0, len(tokens), batch_size):
            entered = self._enter(tokens[start : start + batch_size])[0]
            if not start:
                if device is None:
                    device = self.home(tokens.numel())
                hidden = torch.empty((len(tokens), *entered.shape[1:]), dtype=entered.dtype, device=device)
            hidden[start : start + len(entered)] = entered
        return hidden

    @torch.no_grad()
    def run(self, module: nn.Module, hidden: Tensor, batch_size: int) -> Iterator[Tensor]:
        """Yield the layer's outputs for these hidden states, batch by batch, where the states lie."""
        for batch in torch.split(hidden, batch_size):
            output = module(batch.to(self.device), **self._keywords(batch.shape[0], batch.shape[1]))
            yield (output[0] if isinstance(output, tuple) else output).to(hidden.device)

    def pass_through(self, module: nn.Module, hidden: Tensor, batch_size: int) -> Tensor:
        """Return ``hidden`` after a layer.

        ``hidden`` is overwritten batch by batch, since hidden states are what fills the memory.
        """
        for batch, output in zip(torch.split(hidden, batch_size), self.run(module, hidden, batch_size), strict=True):
            batch.copy_(output)
        return hidden

    @torch.no_grad()
    def losses(self, tokens: Tensor, hidden: Tensor) -> list[float]:
        """Return the mean cross entropy of each sequence's next tokens; ``hidden`` are the last layer's outputs."""
        found: list[float] = []
        at_once = max(1, _LOGITS // (self.config.vocab_size * tokens.shape[1]))
        for ids, state in zip(torch.split(tokens, at_once), torch.split(hidden, at_once), strict=True):
            self._relay.result = state.to(self.device)
            try:
                logits = self._shell(ids.to(self.device), use_cache=False).logits
            finally:
                self._relay.result = None
            each = F.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), ids[:, 1:].to(self.device), reduction="none"
            )  # (sequences, length - 1)
            found += each.double().mean(1).tolist()
        return found

    # --- inside -------------------------------------------------------------------------------------------------

    def _read(self, names: Any) -> dict[str, Tensor]:
        stored = {name: self._stored(name) or name for name in names}
        tensors = self._files.read(stored.values())
        return {
            name: tensors[other].to(self.dtype) if tensors[other].is_floating_point() else tensors[other]
            for name, other in stored.items()
        }

    def _check_shape(self, name: str, found: torch.Size, expected: torch.Size) -> None:
        if found != expected:
            raise ValueError(
                f"checkpoint {str(self.folder)!r} has tensor '{name}' of shape {tuple(found)}, its config says "
                f"{tuple(expected)}"
            )

    def _try(self) -> None:
        """Refuse a family whose decoder layers are not called, or do not answer, as the relay does."""
        ids = torch.zeros((1, 2), dtype=torch.int64)
        try:
            self.losses(ids, self.embed(ids, 1))
        except (TypeError, IndexError, AttributeError, KeyError, RuntimeError) as error:
            kind = type(self.config).__name__
            raise ValueError(
                f"checkpoint {str(self.folder)!r} is of {kind}, whose decoder layers are not called like OPT's and "
                f"LLaMA's ({one_line(error)[:200]})"
            ) from None

    def _stored(self, name: str) -> str | None:
        """Return the checkpoint's name of a tensor: old checkpoints lack the head model's prefix."""
        return next((each for each in (name, name.partition(".")[2]) if each in self._files), None)

    def _dtype(self, name: str) -> torch.dtype:
        if name not in DTYPES:
            raise ValueError(f"dtype is {name!r}, allowed: {', '.join(DTYPES)}")
        if name != "auto":
            return getattr(torch, name)  # type: ignore[no-any-return]
        first = f"{self.prefix}.0.{self.prunable(0)[0]}"
        (tensor,) = self._files.read([self._stored(first) or first]).values()
        return tensor.dtype

    def _build_shell(self, auto: Any) -> tuple[Any, _Relay]:
        shell = auto.from_config(with_layers(self.config, 1))
        relay = _Relay()
        shell.get_submodule(self.prefix)[0] = relay
        shell.tie_weights()
        expected = {name: tensor.shape for name, tensor in shell.state_dict().items() if self._stored(name)}
        wanted = self._read(expected)
        for name, shape in expected.items():
            self._check_shape(name, wanted[name].shape, shape)
        shell.load_state_dict(wanted, strict=False)
        shell.tie_weights()
        pointers = {tensor.data_ptr() for name, tensor in shell.state_dict().items() if name in wanted}
        lacking = [name for name, tensor in shell.state_dict().items() if tensor.data_ptr() not in pointers]
        if lacking:  # neither stored nor tied to a stored tensor
            raise ValueError(f"checkpoint {str(self.folder)!r} lacks tensor '{lacking[0]}'")
        return cast(shell, self.dtype).to(self.device).eval().requires_grad_(False), relay

    def _enter(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        self._shell.base_model(tokens.to(self.device), use_cache=False)
        return self._relay.hidden, self._relay.keywords

    def _keywords(self, num_sequences: int, length: int) -> dict[str, Any]:
        """Return the arguments with which a layer is called for sequences of this length without padding.

        The last answer is remembered.
        """
        shape = (num_sequences, length)
        if self._called is None or self._called[0] != shape:
            self._called = shape, self._enter(torch.zeros(shape, dtype=torch.int64))[1]
        return self._called[1]


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def with_layers(config: Any, count: int) -> Any:
    """Return a copy of a transformers config for so many decoder layers. ``ValueError`` where these are not alike."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = count
    kinds = getattr(config, "layer_types", None)
    if kinds and len(set(kinds)) > 1:
        raise ValueError(f"decoder layers of {type(config).__name__} are of {len(set(kinds))} kinds, allowed: one")
    if kinds:
        config.layer_types = [kinds[0]] * count
    return config


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name of the outermost list of modules that holds the most matrices, and the list."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    counts = [sum(_is_matrix(each) for each in module.modules()) for _, module in outer]
    if not counts or not max(counts):
        raise ValueError(f"{type(model).__name__} has no list of decoder layers with Linear modules")
    return outer[counts.index(max(counts))]


@lru_cache(maxsize=1)  # a process that simulates many clients opens it once
def open_model(folder: Path, dtype: str = "auto", device: str = "cpu") -> LanguageModel:
    """Return a :class:`LanguageModel` that all callers in this process share."""
    return LanguageModel(folder, dtype, device)


@dataclass(frozen=True)
class Perplexity:
    """A perplexity is of one text: ``windows`` windows of ``window`` tokens each, side by side; the tail is dropped."""

    value: float
    window: int
    windows: int
    windows_in_text: int | None = None  # how many windows the text has; its first `windows` ones were measured

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all windows."""
        return self.window * self.windows


def perplexity(model: LanguageModel, layers: LayerTensors, windows: Tensor, batch_size: int) -> Perplexity:
    """Return exp of the mean, over windows (windows, length), of each one's mean cross entropy over its next tokens.

    One decoder layer is in memory at a time. Source: the evaluation of SparseGPT's released code, which weighs each
    window's mean over ``length - 1`` targets by ``length``.
    """
    return perplexities(model, layers, {"": windows}, batch_size)[""]


def perplexities(
    model: LanguageModel, layers: LayerTensors, texts: Mapping[str, Tensor], batch_size: int
) -> dict[str, Perplexity]:
    """Return what :func:`perplexity` returns, for the windows of each of some ``texts``, by name.

    Each layer is read once for as many texts as :data:`_HIDDEN` lets in.
    """
    found: dict[str, Perplexity] = {}
    group: dict[str, Tensor] = {}
    for name, windows in texts.items():
        if group and sum(each.numel() for each in [*group.values(), windows]) * model.token_bytes > _HIDDEN:
            found |= _perplexities(model, layers, group, batch_size)
            group = {}
        group[name] = windows
    return found | _perplexities(model, layers, group, batch_size)


def dense_perplexities(model: LanguageModel, texts: Mapping[str, Tensor], batch_size: int) -> dict[str, Perplexity]:
    """Return what :func:`perplexities` returns for the model's own layers.

    The runs of a sweep share the model, so the same windows are measured once in a process.
    """
    asked = f"{batch_size} {Payload(dict(texts)).digest()}"
    if asked not in model.dense:
        model.dense[asked] = perplexities(model, model.layer_tensors, texts, batch_size)
    return dict(model.dense[asked])


def _perplexities(
    model: LanguageModel, layers: LayerTensors, texts: Mapping[str, Tensor], batch_size: int
) -> dict[str, Perplexity]:
    home = model.home(sum(windows.numel() for windows in texts.values()))
    hidden = {name: model.embed(windows, batch_size, home) for name, windows in texts.items()}
    for layer in range(model.num_layers):
        module = model.layer(layer, layers(layer))
        hidden = {name: model.pass_through(module, states, batch_size) for name, states in hidden.items()}
    found = {}
    for name, windows in texts.items():
        losses = model.losses(windows, hidden.pop(name))
        value = math.exp(min(math.fsum(losses) / len(losses), 700.0))
        found[name] = Perplexity(value, windows.shape[1], len(losses))
    return found
