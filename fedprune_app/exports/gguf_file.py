"""A language model becomes a GGUF file, which llama.cpp, Ollama and the programs that are built on them compute with.

Matrices are rounded to nearest in blocks of 32 weights, or are packed as they are where a run found their codes. The
file is compared with the model, tensor by tensor, before it is left. What differs from transformers' model:

* In LLaMA's and Mistral's heads neighbours are turned together, where transformers turns halves: the rows of ``q_proj``
  and ``k_proj`` have another order.
* Feed-forward units are filled up with zeros to a multiple of 32, if matrices are in blocks. This changes no output.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprune_app.config import ConfigError
from fedprune_app.models.gguf_keys import add_keys, import_gguf
from fedprune_app.models.llm import LanguageModel

# Packed matrices by transformers' name: the type of their blocks, and the bytes (rows, bytes of a row), in the order of
# transformers' rows; a row that ends within a block is filled up with what is 0.
Codes = Mapping[str, tuple[str, Tensor]]
Array = NDArray[Any]

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_BLOCK = 32
# By type, how far rounding may move a weight, as a share of the largest one in its block. 0: as torch rounds it.
TYPES = {"F32": 0, "F16": 0, "BF16": 0, "Q8_0": 1 / 254, "Q5_1": 1 / 31, "Q5_0": 1 / 16, "Q4_1": 1 / 15, "Q4_0": 1 / 8}
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALE = 2**-10  # the same for scales, which have 16 bits
_ENDS = ("embed_tokens", "lm_head")  # are never in blocks of fewer than 8 bits
_PADDED = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}  # by matrix, the dimension of the feed-forward units


def write_gguf(model: LanguageModel, path: Path, kind: str = "", codes: Codes | None = None) -> str:
    """Write ``path``, whose matrices are of type ``kind``, one of :data:`TYPES`; "" keeps the model's own dtype.

    Matrices of ``codes`` are packed as they are; "" then stands for Q8_0. Return the type of most matrices. Raises a one-line ``ValueError`` for a model
    that such a file does not hold, and where the file written differs from the model.
    """
    layout = _Layout(model, kind, codes or {})
    layout.write(path)
    layout.compare(path)
    return layout.most


class _Layout:
    """The layout says where in a file, and how, each tensor of a model goes."""

    def __init__(self, model: LanguageModel, kind: str, codes: Codes) -> None:
        self.gguf, self.model, self.codes = import_gguf(), model, codes
        self.config = model.config
        self.architecture = self._architecture()
        own = next(name for name, dtype in _DTYPES.items() if dtype == model.dtype)
        self.kind = kind or ("Q8_0" if codes else own)
        if self.kind not in TYPES:
            raise ConfigError("--type", kind, ", ".join(TYPES))
        self.most = next(iter(codes.values()))[0] if codes else self.kind
        has_blocks = bool(codes) or self.kind not in _DTYPES
        units = self.config.intermediate_size
        self.units = -(-units // _BLOCK) * _BLOCK if has_blocks else units
        self.head_dim = getattr(self.config, "head_dim", None) or (
            self.config.hidden_size // self.config.num_attention_heads
        )
        groups = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        self.heads = {"q_proj": self.config.num_attention_heads, "k_proj": groups}
        self.names = self.gguf.get_tensor_name_map(self.gguf.MODEL_ARCH[self.architecture.upper()], model.num_layers)

    def _architecture(self) -> str:
        config, name = self.config, self.config.model_type
        if name not in ARCHITECTURES:
            raise self.model.checkpoint.refused(f"allowed in a GGUF file: model_type {', '.join(ARCHITECTURES)}")
        rope = config.rope_parameters
        ropes = ("default", "linear", "llama3") if ARCHITECTURES[name] == "llama" else ("default",)
        settings = {"hidden_act": (config.hidden_act, ("silu",)), "rope_type": (rope["rope_type"], ropes)}
        for key, (value, allowed) in settings.items():
            if value not in allowed:
                raise self.model.checkpoint.refused(f"{key} is {value!r}, allowed in a GGUF file: {', '.join(allowed)}")
        return ARCHITECTURES[name]

    # --- tensors ------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors by transformers' names, a decoder layer at a time, always in the same order."""
        yield from self.model.shell_tensors().items()
        for layer in range(self.model.num_layers):
            yield from self.model.named(layer, self.model.layer_tensors(layer)).items()

    def kind_of(self, name: str, tensor: Tensor) -> str:
        if name in self.codes:
            return self.codes[name][0]
        if tensor.dim() == 1:
            return "F32"
        return "Q8_0" if self.kind not in _DTYPES and _part(name) in _ENDS else self.kind

    def shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Return a tensor's shape in the file."""
        padded = _PADDED.get(_part(name))
        shape = tuple(self.units if dim == padded else size for dim, size in enumerate(tensor.shape))
        if self.kind_of(name, tensor) not in _DTYPES and shape[-1] % _BLOCK:
            raise self.model.checkpoint.refused(
                f"and '{name}' has rows of {shape[-1]} weights, allowed: multiples of {_BLOCK}, or --type "
                f"{', '.join(_DTYPES)}"
            )
        return shape

    def packed(self, name: str, tensor: Tensor) -> Array:
        """Return a tensor as it is in the file."""
        shape = self.shape(name, tensor)
        if name in self.codes:
            data = self.codes[name][1].numpy()
        else:
            values = _padded(tensor.float().numpy(), shape)
            data = self.gguf.quants.quantize(values, self.gguf.GGMLQuantizationType[self.kind_of(name, tensor)])
        data = _padded(data, (shape[0], *data.shape[1:]))  # bytes of 0 are weights of 0
        if heads := self._turned(name):
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        return np.ascontiguousarray(data)

    def unpacked(self, name: str, tensor: Tensor, data: Array) -> Tensor:
        """Return the weights of a tensor in a file, of the shape of ``tensor``, the model's own."""
        values = self.gguf.quants.dequantize(data, self.gguf.GGMLQuantizationType[self.kind_of(name, tensor)])
        if heads := self._turned(name):
            values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        return torch.from_numpy(values[tuple(map(slice, tensor.shape))].copy())

    def _turned(self, name: str) -> int:
        return self.heads.get(_part(name), 0) if self.architecture == "llama" else 0

    # --- the file -----------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        writer = self.gguf.GGUFWriter(path, self.architecture)
        self._add_config(writer)
        add_keys(writer, self.model.folder, self.config.vocab_size)
        factors = self._rope_factors()
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for name, tensor in self.tensors():
            kind = self.gguf.GGMLQuantizationType[self.kind_of(name, tensor)]
            shape, (block, size) = self.shape(name, tensor), self.gguf.GGML_QUANT_SIZES[kind]
            num_bytes = int(np.prod(shape)) // block * size
            writer.add_tensor_info(self._name(name), shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for name, tensor in self.tensors():
            writer.write_tensor_data(self.packed(name, tensor))
        writer.close()

    def _name(self, name: str) -> str:
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise self.model.checkpoint.refused(f"and GGUF files of {self.architecture!r} have no tensor '{name}'")
        return str(found)

    def _add_config(self, writer: Any) -> None:
        config, window = self.config, getattr(self.config, "sliding_window", None)
        writer.add_block_count(self.model.num_layers)
        # llama.cpp looks back without a window: it computes the same up to there
        writer.add_context_length(min(config.max_position_embeddings, window or config.max_position_embeddings))
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(self.units)
        writer.add_head_count(self.heads["q_proj"])
        writer.add_head_count_kv(self.heads["k_proj"])
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        file_types = self.gguf.LlamaFileType
        writer.add_file_type(file_types.ALL_F32 if self.most == "F32" else file_types[f"MOSTLY_{self.most}"])
        writer.add_quantization_version(self.gguf.GGML_QUANT_VERSION)

    def _rope_factors(self) -> Array | None:
        """Return by how much longer each wave is than the base says, where it is (LLaMA 3)."""
        rope = self.config.rope_parameters
        if rope["rope_type"] == "default":
            return None
        plain = rope["rope_theta"] ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        inverse: Tensor = self.model.checkpoint.skeleton.model.rotary_emb.inv_freq
        return np.asarray((plain / inverse.double()).float().numpy())

    def compare(self, path: Path) -> None:
        """Raise ``ValueError`` where the weights in a file are not the model's, but for their rounding."""
        found = {tensor.name: tensor.data for tensor in self.gguf.GGUFReader(path).tensors}
        for name, tensor in self.tensors():
            weights = self.unpacked(name, tensor, found[self._name(name)])
            if not self._are_equal(name, weights, tensor):
                raise ValueError(f"tensor '{name}' is not in {str(path)!r} as it is in the model: it is not kept")

    def _are_equal(self, name: str, weights: Tensor, tensor: Tensor) -> bool:
        kind, expected = self.kind_of(name, tensor), tensor.float()
        if name in self.codes:
            return torch.equal(weights.to(tensor.dtype), tensor)
        if kind in _DTYPES:
            return torch.equal(weights, expected.to(_DTYPES[kind]).float()) and bool(weights.isfinite().all())
        width = -tensor.shape[-1] % _BLOCK
        errors, sizes = (
            torch.nn.functional.pad(values.abs(), (0, width)).view(len(tensor), -1, _BLOCK)
            for values in (weights - expected, expected)
        )
        return bool((errors <= (TYPES[kind] + _SCALE) * sizes.amax(2, keepdim=True)).all())


def _part(name: str) -> str:
    return name.split(".")[-2]


def _padded(values: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(values, [(0, size - own) for own, size in zip(values.shape, shape, strict=True)])
