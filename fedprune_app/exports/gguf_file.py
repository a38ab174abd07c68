"""Export of a language model as a GGUF file, for llama.cpp, Ollama and programs that use them.

Matrices are rounded to nearest in blocks of 32 weights, or have the codes that a run computed. The written file is
compared with the model, tensor by tensor. Differences from transformers' model:

* LLaMA's and Mistral's heads rotate neighbours together, where transformers rotates halves: the rows of ``q_proj`` and
  ``k_proj`` have another order.
* Feed-forward units are padded with zeros to a multiple of 32, if matrices are in blocks. This changes no output.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprune_app.config import ConfigError
from fedprune_app.core.named import ValueDict
from fedprune_app.models.gguf_keys import add_keys, import_gguf
from fedprune_app.models.llm import LanguageModel

# Packed matrices by transformers' name: the type of their blocks, and the bytes (rows, bytes of a row), in the order of
# transformers' rows; a row that ends within a block is padded with weights of 0.
Codes = Mapping[str, tuple[str, Tensor]]
Array = NDArray[Any]

# By type, the largest error of a weight, as a share of the largest one of its row: half a step, and the rounding of
# 16-bit scales.
TYPES = {
    "F32": 0,
    "F16": 2**-10,
    "BF16": 2**-8,
    "Q8_0": 1 / 200,
    "Q5_1": 1 / 28,
    "Q5_0": 1 / 15,
    "Q4_1": 1 / 14,
    "Q4_0": 1 / 7,
}
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_BLOCK = 32
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_UNITS = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}  # by matrix, the dimension of the feed-forward units


def write_gguf(model: LanguageModel, path: Path, kind: str = "", codes: Codes | None = None) -> str:
    """Write ``path`` with matrices of type ``kind``, one of :data:`TYPES`; "" keeps the model's own dtype.

    Matrices in ``codes`` keep these; "" then means Q8_0 for the others. Return the type of most matrices. Raises a
    one-line ``ValueError`` for a model that the format does not support, and if the file differs from the model.
    """
    if kind not in ("", *TYPES):
        raise ConfigError("--type", kind, ", ".join(TYPES))
    layout = _Layout(model, kind, codes or {})
    writer = layout.gguf.GGUFWriter(path, layout.architecture, use_temp_file=True)
    for key, value in layout.config().items():
        getattr(writer, f"add_{key}")(value)
    add_keys(writer, model.folder, model.config.vocab_size)
    try:
        for name, tensor in layout.tensors():
            writer.add_tensor(layout.name(name), layout.packed(name, tensor), raw_dtype=layout.kind(name, tensor))
    except ValueError:
        if writer.temp_file is not None:
            writer.temp_file.close()
        raise
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {tensor.name: tensor.data for tensor in layout.gguf.GGUFReader(path).tensors}
    for name, tensor in layout.tensors():
        if not layout.holds(name, tensor, found[layout.name(name)]):
            raise ValueError(f"tensor '{name}' is another one in the GGUF file than in the model: nothing is left")
    return layout.most


def write_imatrix(model: LanguageModel, path: Path, squares: Mapping[str, tuple[Tensor, int]], length: int) -> None:
    """Write llama.cpp's importance matrix of ``model`` to the GGUF file ``path``.

    By the name of a matrix ``squares`` has its inputs' sums of squares (in,) and the number of segments that these are
    over, of ``length`` tokens. Source: ``save_imatrix`` in llama.cpp's tools/imatrix. Errors are as in
    :func:`write_gguf`.
    """
    layout = _Layout(model, "", {})
    writer = layout.gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["texts of clients that stayed with them"])
    writer.add_uint32("imatrix.chunk_count", max(count for _, count in squares.values()))
    writer.add_uint32("imatrix.chunk_size", length)
    for name, (total, count) in squares.items():
        writer.add_tensor(f"{layout.name(name)}.in_sum2", total.float().numpy()[None])
        writer.add_tensor(f"{layout.name(name)}.counts", np.array([[count * length]], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Layout:
    """Names, types and order of a model's tensors in a GGUF file."""

    def __init__(self, model: LanguageModel, kind: str, codes: Codes) -> None:
        self.gguf, self.model, self.codes, config = import_gguf(), model, codes, model.config
        self.rope, architecture = getattr(config, "rope_parameters", {}), _ARCHITECTURES.get(config.model_type)
        ropes = ("default", "linear", "llama3") if architecture == "llama" else ("default",)
        for key, value, allowed in (
            ("model_type", config.model_type, _ARCHITECTURES),
            ("hidden_act", getattr(config, "hidden_act", None), ("silu",)),
            ("rope_type", self.rope.get("rope_type"), ropes),
        ):
            if value not in allowed:
                raise self._refused(f"with {key} {value!r}, allowed: {', '.join(allowed)}")
        self.architecture = str(architecture)
        number = self.gguf.MODEL_ARCH[self.architecture.upper()]
        self.names = self.gguf.get_tensor_name_map(number, model.num_layers)
        self.matrices = kind or ("Q8_0" if codes else _FLOATS[model.dtype])
        self.most = next(iter(codes.values()))[0] if codes else self.matrices
        block = 1 if self.most in _FLOATS.values() else _BLOCK
        self.units = -(-config.intermediate_size // block) * block
        heads = config.num_attention_heads
        self.heads = {"q_proj": heads, "k_proj": getattr(config, "num_key_value_heads", None) or heads}
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if architecture == "qwen2" and heads * self.head_dim != config.hidden_size:
            raise self._refused("with heads that were cut: llama.cpp reads Qwen 2 with all of its heads")

    def _refused(self, reason: str) -> ValueError:
        return self.model.checkpoint.refused(f"of which no GGUF file can be made, {reason}")

    def config(self) -> ValueDict:
        """Return the model's properties for the file, by the names of gguf's functions."""
        config, types = self.model.config, self.gguf.LlamaFileType
        length = config.max_position_embeddings
        return {
            "block_count": self.model.num_layers,
            # llama.cpp has no sliding window: up to its length it computes the same
            "context_length": min(length, getattr(config, "sliding_window", None) or length),
            "embedding_length": config.hidden_size,
            "feed_forward_length": self.units,
            "head_count": self.heads["q_proj"],
            "head_count_kv": self.heads["k_proj"],
            "key_length": self.head_dim,
            "value_length": self.head_dim,
            "rope_dimension_count": self.head_dim,
            "rope_freq_base": float(self.rope["rope_theta"]),
            "layer_norm_rms_eps": config.rms_norm_eps,
            "vocab_size": config.vocab_size,
            "file_type": types.ALL_F32 if self.most == "F32" else types[f"MOSTLY_{self.most}"],
            "quantization_version": self.gguf.GGML_QUANT_VERSION,
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors by transformers' names, a decoder layer at a time."""
        yield from self.model.shell_tensors().items()
        if self.rope["rope_type"] != "default":  # the factor by which each wave is longer than by the base
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            frequencies = self.model.checkpoint.skeleton.model.rotary_emb.inv_freq
            yield "rope_freqs.weight", (self.rope["rope_theta"] ** -exponents / frequencies).float()
        for layer in range(self.model.num_layers):
            yield from self.model.named(layer, self.model.layer_tensors(layer)).items()

    def name(self, name: str) -> str:
        """Return a tensor's name in the file."""
        return str(self.names.get_name(name, try_suffixes=(".weight", ".bias")))

    def kind(self, name: str, tensor: Tensor) -> Any:
        """Return the type of a tensor: at least 8 bits for embeddings and the head, 32 for vectors."""
        kind = self.matrices if tensor.dim() > 1 else "F32"
        if _part(name) in ("embed_tokens", "lm_head") and kind not in _FLOATS.values():
            kind = "Q8_0"
        return self.gguf.GGMLQuantizationType[self.codes[name][0] if name in self.codes else kind]

    def packed(self, name: str, tensor: Tensor) -> Array:
        """Return a tensor's data in the file."""
        unit_dim = _UNITS.get(_part(name))
        shape = [self.units if dim == unit_dim else size for dim, size in enumerate(tensor.shape)]
        kind = self.kind(name, tensor)
        if shape[-1] % self.gguf.GGML_QUANT_SIZES[kind][0]:
            raise self._refused(f"of type {kind.name}: '{name}' has rows of {shape[-1]} weights, allowed: n x 32")
        if name in self.codes:
            data = self.codes[name][1].numpy()
        else:
            data = self.gguf.quants.quantize(_padded(tensor.float().numpy(), shape), kind)
        data = _padded(data, [shape[0], *data.shape[1:]])  # bytes of 0 are weights of 0
        return np.ascontiguousarray(self._turned(name, data, (2, -1)))

    def holds(self, name: str, tensor: Tensor, data: Array) -> bool:
        """Return whether ``data`` of a file are a tensor's weights, up to rounding."""
        kind = self.kind(name, tensor)
        values = self._turned(name, self.gguf.quants.dequantize(data, kind), (-1, 2))
        errors = torch.from_numpy(np.array(values[tuple(map(slice, tensor.shape))])) - tensor.float()
        share = TYPES[_FLOATS[tensor.dtype] if name in self.codes else kind.name]
        bound = share * tensor.float().abs().amax(-1, keepdim=True) + 4e-6 * bool(share)  # the step of float16 scales
        return bool((errors.abs() <= bound).all())

    def _turned(self, name: str, data: Array, sides: tuple[int, int]) -> Array:
        """Return the rows of a head in llama.cpp's order, for (2, -1), or in transformers', for (-1, 2)."""
        heads = self.heads.get(_part(name)) if self.architecture == "llama" else None
        return data.reshape(heads, *sides, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape) if heads else data


def _part(name: str) -> str:
    return name.split(".")[-2]


def _padded(values: Array, shape: list[int]) -> Array:
    return np.pad(values, [(0, size - own) for own, size in zip(values.shape, shape, strict=True)])
