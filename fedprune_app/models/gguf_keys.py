"""The keys of a GGUF file hold its tokenizer, and say what its tensors are and where they come from.

The folder of a model that was read from a GGUF file has that file's keys in :data:`KEYS`, so that an export has the
same tokenizer. For other folders the keys of the tokenizer are made of ``tokenizer.json``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS = "tokenizer.gguf"
_OF_A_FILE = {f"general.{key}" for key in ("architecture", "alignment", "file_type", "quantization_version", "name")}
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is split before its bytes are merged, by llama.cpp's name: (kind of step, what the step says).
_SPLITS = {
    "gpt-2": [("ByteLevel", True)],
    "smollm": [("Digits", True), ("ByteLevel", True)],
    "llama-bpe": [("Split", _ENGLISH + "{1,3}" + _SIGNS), ("ByteLevel", False)],
    "qwen2": [("Split", _ENGLISH + _SIGNS), ("ByteLevel", False)],
}


def import_gguf() -> Any:
    """Import the package gguf. ``ValueError`` where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files need the package gguf: install the extra fedprune[gguf]") from None
    return gguf


def write_keys(source: Path, target: Path) -> None:
    """Write a GGUF file of the keys of ``source`` alone, without tensors."""
    fields = import_gguf().GGUFReader(source).fields
    writer = import_gguf().GGUFWriter(target, fields["general.architecture"].contents())
    _copy(fields, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def add_keys(writer: Any, folder: Path, vocabulary: int) -> None:
    """Add to a file of gguf what the config of the model in ``folder`` does not say: its tokenizer, its licence.

    The model embeds ``vocabulary`` ids. ``ValueError`` for a tokenizer that llama.cpp is not known to have.
    """
    if not (folder / KEYS).is_file():
        _add_tokenizer(writer, folder, vocabulary)
        return
    fields = import_gguf().GGUFReader(folder / KEYS).fields
    if (num_tokens := len(fields["tokenizer.ggml.tokens"].data)) != vocabulary:
        raise ValueError(f"{folder / KEYS} has {num_tokens} tokens, allowed: {vocabulary}, as the model embeds")
    _copy({name: fields[name] for name in fields if name.startswith(("general.", "tokenizer."))}, writer)


def _copy(fields: Mapping[str, Any], writer: Any) -> None:
    for name, field in fields.items():
        if name not in _OF_A_FILE and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None)


def _add_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    gguf, path = import_gguf(), folder / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        model, split = tokenizer["model"], tokenizer["pre_tokenizer"] or {}
        tokens = {number: token for token, number in model["vocab"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"tokenizer {str(path)!r} cannot be read, allowed: one of byte-level BPE") from None
    steps = [(step.get("type"), _says(step)) for step in split.get("pretokenizers", [split])]
    names = [name for name, known in _SPLITS.items() if known == steps]
    if not model.get("merges") and ("ByteLevel", False) in steps:
        names = ["gpt-2"]  # each byte is a token, however a text is split
    if model.get("type") != "BPE" or model.get("byte_fallback") or not names:
        raise ValueError(
            f"tokenizer {str(path)!r} is {model.get('type')} of another kind, allowed: byte-level BPE that splits "
            f"texts as {', '.join(_SPLITS)} do; the model's own GGUF file as the run's model has its tokenizer"
        )
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(names[0])
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(vocabulary)])
    writer.add_token_types([kinds.get(number, gguf.TokenType.UNUSED) for number in range(vocabulary)])
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocabulary)
    special.merges = special.merges or ["Ā Ā"]  # llama.cpp wants one; no text has two NULs
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _says(step: Mapping[str, Any]) -> Any:
    """Return what tells a step of splitting texts from others of its kind."""
    if step.get("add_prefix_space"):
        return None
    pattern = step.get("pattern") or {}
    return pattern.get("Regex") or step.get("individual_digits") or step.get("use_regex")
