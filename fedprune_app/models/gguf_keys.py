"""Keys of a GGUF file: its tokenizer, and the type and origin of its model.

The folder of a model converted from a GGUF file has that file's keys in :data:`KEYS`, so that an export has the same
tokenizer. For other folders the tokenizer's keys are derived from ``tokenizer.json``.
"""

import json
from pathlib import Path
from typing import Any

KEYS = "tokenizer.gguf"
_KEPT = ("tokenizer.", "general.organization", "general.basename", "general.license", "general.languages")
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is split before its bytes are merged, by llama.cpp's name.
_SPLITS = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _ENGLISH + "{1,3}" + _SIGNS}}, {"type": "ByteLevel"}],
    "qwen2": [{"type": "Split", "pattern": {"Regex": _ENGLISH + _SIGNS}}, {"type": "ByteLevel"}],
}
_SAID = ("type", "pattern", "individual_digits", "use_regex", "add_prefix_space")  # of a step, unless false


def import_gguf() -> Any:
    """Import the package gguf. ``ValueError`` if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files need the package gguf: install the extra fedprune[gguf]") from None
    return gguf


def write_keys(source: Path, target: Path) -> None:
    """Write a GGUF file with the tokenizer, licence and origin of ``source``, without tensors."""
    writer = import_gguf().GGUFWriter(target, "")
    _copy(source, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _copy(source: Path, writer: Any) -> None:
    for name, field in import_gguf().GGUFReader(source).fields.items():
        if name.startswith(_KEPT):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])


def add_keys(writer: Any, folder: Path, vocabulary: int) -> None:
    """Add the tokenizer of the model in ``folder``, which embeds ``vocabulary`` ids, to a writer of gguf.

    ``ValueError`` for a tokenizer that llama.cpp is not known to support.
    """
    if (folder / KEYS).is_file():
        _copy(folder / KEYS, writer)
    else:
        _add_tokenizer(writer, folder, vocabulary)


def _add_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    gguf, path = import_gguf(), folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    model, split = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = [{key: step[key] for key in _SAID if step.get(key)} for step in split.get("pretokenizers", [split])]
    names = [name for name, known in _SPLITS.items() if known == steps]
    if not model.get("merges") and {"type": "ByteLevel"} in steps:
        names = ["gpt-2"]  # each byte is a token, independent of the splits
    if not names or model["type"] != "BPE":
        raise ValueError(
            f"{str(path)!r} is no tokenizer that a GGUF file can have, allowed: byte-level BPE that splits texts as "
            f"{', '.join(_SPLITS)} do; where the run's model is a GGUF file, its tokenizer is taken"
        )
    tokens = {number: (token, gguf.TokenType.NORMAL) for token, number in model["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = added["content"], kind
    rows = [tokens.get(number, (f"[PAD{number}]", gguf.TokenType.UNUSED)) for number in range(vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(names[0])
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocabulary)
    special.merges = special.merges or ["Ā Ā"]  # llama.cpp requires one; no text has two NULs
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)
