"""A causal language model on disk is read tensor by tensor, from a local folder or from the Hugging Face hub.

Only safetensors are read: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedprune_app.files import locked, replacing_folder

INDEX = "model.safetensors.index.json"
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")


def import_transformers() -> Any:
    """Import the package transformers, which then works beside a CPU-only torch.

    ``ValueError`` where it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("language models need the package transformers: install the extra fedprune[llm]") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def resolve_checkpoint(name: str, download: bool) -> Path:
    """Return the folder of a checkpoint: ``name`` is a local folder, or a hub name such as ``facebook/opt-125m``.

    A hub model comes from the local hub cache, and with ``download`` from the hub. ``ValueError`` where there is none.
    If several processes or threads ask at once, one of them works and the others wait.
    """
    folder = Path(name).expanduser()
    return folder.resolve() if folder.is_dir() else _of_hub(name, download)


@lru_cache(maxsize=8)  # with ``download`` the hub is asked for the newest version once, not for every message of a run
def _of_hub(name: str, download: bool) -> Path:
    import_transformers()  # transformers brings the hub's client
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=not download))
    except HFValidationError:
        raise ValueError(f"model is {name!r}, allowed: 'auto', a folder, or a name on the Hugging Face hub") from None
    except LocalEntryNotFoundError as error:
        if download:
            raise ValueError(f"model {name!r} cannot be downloaded: {one_line(error)}") from None
        raise ValueError(
            f"model is {name!r}: no such folder, and not in the hub cache; download=true fetches it"
        ) from None
    except Exception as error:  # the hub refuses with many kinds of error
        raise ValueError(f"model {name!r} cannot be downloaded: {one_line(error)}") from None
    return snapshot if any(snapshot.glob("*.safetensors")) else _converted(name, snapshot, download)


def one_line(error: BaseException) -> str:
    """Return an error's text without its line breaks."""
    return " ".join(str(error).split())


def _converted(name: str, snapshot: Path, download: bool) -> Path:
    """Return the folder of a hub model whose main branch has no safetensors.

    The folder is beside the snapshot and holds the hub's own conversion to safetensors. The other files of that branch,
    pickles among them, are neither fetched nor opened.
    """
    folder = snapshot / "fedprune-safetensors"
    if folder.is_dir():
        return folder
    transformers = import_transformers()
    with locked(f"{folder}.lock", f"writes {str(folder)!r}"):
        if folder.is_dir():  # another process made the folder while this one waited
            return folder
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                name, use_safetensors=True, dtype="auto", local_files_only=not download
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=not download)
        except Exception as error:  # the hub, and a config, refuse with many kinds of error
            raise ValueError(f"model {name!r} has no safetensors: {one_line(error)}") from None
        with replacing_folder(folder) as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
    return folder


def inside(folder: Path, name: object) -> Path:
    """Return the file ``name`` in a checkpoint's folder. ``ValueError`` for a file that lies elsewhere, links followed.

    In the hub's cache a snapshot's files are links to the blobs of the same model.
    """
    path = folder / str(name)
    homes = [folder.resolve()]
    if folder.parent.name == "snapshots":
        homes.append((folder.parent.parent / "blobs").resolve())
    is_plain = not Path(str(name)).is_absolute() and ".." not in Path(str(name)).parts
    if not is_plain or not any(path.resolve().is_relative_to(home) for home in homes):
        raise ValueError(f"{str(name)!r} is outside the folder, allowed: the folder's own files")
    return path


class TensorFiles:
    """Tensor files are the tensors of a folder's safetensors files, by name; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        index = folder / INDEX
        try:
            if index.exists():
                weight_map = json.loads(index.read_text())["weight_map"]
                self._file_of = {str(name): inside(folder, file) for name, file in weight_map.items()}
            else:
                for path in sorted(folder.glob("*.safetensors")):
                    with safe_open(path, framework="pt") as file:
                        self._file_of |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"checkpoint {str(folder)!r} cannot be read: {error}") from None
        if not self._file_of:
            raise ValueError(f"checkpoint {str(folder)!r} holds no safetensors, allowed: at least one file")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of the tensors ``names``, aligned as torch's own are.

        ``ValueError`` for a tensor that is not there.
        """
        by_file: dict[Path, list[str]] = {}
        names = list(names)
        for name in names:
            if name not in self._file_of:
                raise ValueError(f"checkpoint {str(self.folder)!r} lacks tensor '{name}'")
            by_file.setdefault(self._file_of[name], []).append(name)
        found: dict[str, Tensor] = {}
        for path, wanted in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    found |= {name: file.get_tensor(name).clone() for name in wanted}
            except (OSError, SafetensorError) as error:
                raise ValueError(f"checkpoint file {str(path)!r} cannot be read: {error}") from None
        return {name: found[name] for name in names}
