"""Language models that this machine makes once, such as from a GGUF file, are kept in a cache of the user."""

import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from fedprune_app.files import locked, replacing_folder, scratch_folder, sha256_of
from fedprune_app.models.checkpoints import import_transformers, one_line
from fedprune_app.models.gguf_keys import KEYS, import_gguf, write_keys

_DIGESTS = "sha256.json"  # the digests of the other files in the folder


def cache_folder() -> Path:
    """Return the folder of this user's models: ``$XDG_CACHE_HOME/fedprune`` or ``~/.cache/fedprune``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedprune"


def cached_model(folder: Path, action: str, make: Callable[[Path], None]) -> Path:
    """Return a cached model's folder, which ``make`` fills unless this or another process did so before.

    ``action`` says what ``make`` does, as in :func:`locked`. A damaged folder is made anew.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(f"{folder}.lock", action):
        if not is_whole(folder):  # another process may have made it while this one waited
            with replacing_folder(folder) as new_folder:
                make(new_folder)
                digests = {path.name: sha256_of(path) for path in sorted(new_folder.iterdir())}
                (new_folder / _DIGESTS).write_text(json.dumps(digests, indent=1))
    return folder


def is_whole(folder: Path) -> bool:
    """Return whether a cached model's files are those that were written."""
    try:
        digests = json.loads((folder / _DIGESTS).read_text())
        return all(sha256_of(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


# --- GGUF -------------------------------------------------------------------------------------------------------------


def folder_of_gguf(path: Path) -> Path:
    """Return the cached folder of a GGUF file's model, which is named by the file's content.

    transformers computes the weights from the file's blocks, as 32-bit numbers.

    ``ValueError`` where there is no such file, it is cut off, or transformers cannot read its model or its tokenizer.
    """
    if not path.is_file():
        raise ValueError(f"model is {str(path)!r}: no such file")
    return _converted_folder(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)  # the file and its copy are read once in a process, not for every message of a run
def _converted_folder(path: Path, changed: int) -> Path:
    folder = cache_folder() / f"gguf-keys-{sha256_of(path)[:16]}"
    return cached_model(folder, f"reads {str(path)!r}", lambda new_folder: _convert(path, new_folder))


def _convert(path: Path, folder: Path) -> None:
    """Read the file in a folder where it is alone: a tokenizer beside it does not follow from its content."""
    with scratch_folder() as alone:
        (alone / path.name).symlink_to(path)
        _convert_in(alone, path, folder)


def _convert_in(alone: Path, path: Path, folder: Path) -> None:
    transformers = import_transformers()
    import_gguf()  # transformers says less plainly that it is missing
    source: dict[str, Any] = {"pretrained_model_name_or_path": alone, "gguf_file": path.name}
    options: dict[str, Any] = {"dtype": torch.float32, "quantization_config": transformers.GgufConfig(dequantize=True)}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        with redirect_stderr(StringIO()):  # a bar that logs would show line by line
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, **options)
    except Exception as error:  # transformers refuses with many kinds of error
        raise ValueError(
            f"model {str(path)!r} cannot be read ({one_line(error)[:200]}), allowed: a whole GGUF file of a language "
            "model that transformers knows, with its tokenizer"
        ) from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_keys(path, folder / KEYS)
