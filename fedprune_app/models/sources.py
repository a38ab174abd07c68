"""Sources of a language model: a folder, a GGUF file, or the Hugging Face hub."""

import hashlib
from functools import lru_cache
from pathlib import Path

from fedprune_app.core.texts import one_line
from fedprune_app.files import locked, replacing_folder, sha256_of
from fedprune_app.models.checkpoints import weight_files
from fedprune_app.models.gguf import folder_of_gguf
from fedprune_app.models.transformers import import_transformers

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")


def resolve_checkpoint(name: str, download: bool) -> Path:
    """Return the folder of a checkpoint: ``name`` is a local folder, a GGUF file, or a name on the hub.

    A name on the hub is as ``facebook/opt-125m``. A GGUF file's folder is in this user's cache. A hub model comes from
    the local hub cache, and with ``download`` from the hub. ``ValueError`` if there is none. Of several processes or
    threads that call at once, one works and the others wait.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.suffix == ".gguf":
        return folder_of_gguf(folder)
    return _hub_snapshot(name, download)


def model_digest(name: str, folder: Path) -> str:
    """Return the SHA-256, in hexadecimal digits, of all files from which a model ``name`` in ``folder`` is read.

    For a GGUF file it is the file's own. For a folder, tokenizer included, it is the output of ``sha256sum * |
    sha256sum`` in it.
    """
    if (file := Path(name).expanduser()).is_file():
        return sha256_of(file)
    files = {*folder.glob("[!.]*"), *weight_files(folder)}
    lines = [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in sorted(files) if path.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@lru_cache(maxsize=8)  # with ``download`` queries the hub for the newest version once, not for every message of a run
def _hub_snapshot(name: str, download: bool) -> Path:
    import_transformers()  # transformers installs the hub's client
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=not download))
    except Exception as error:  # the hub's client raises many types of error
        reason = f"cannot be downloaded: {one_line(error)}"
        if not download:
            reason = "no folder, and not in the hub cache (download=true fetches it)"
        allowed = "'auto', a folder, a .gguf file, or a name on the Hugging Face hub"
        raise ValueError(f"model is {name!r}, {reason}, allowed: {allowed}") from None
    return snapshot if weight_files(snapshot) else _convert_weights(name, snapshot, download)


def _convert_weights(name: str, snapshot: Path, download: bool) -> Path:
    """Return the folder of a hub model without safetensors on its main branch.

    The folder is next to the snapshot and holds the hub's own conversion to safetensors. The other files of that
    branch, pickles included, are neither downloaded nor opened.
    """
    folder = snapshot / "fedprune-safetensors"
    transformers = import_transformers()
    with locked(f"{folder}.lock", f"writes {str(folder)!r}"):
        if folder.is_dir():  # written before, or by another process while this one waited
            return folder
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                name, use_safetensors=True, dtype="auto", local_files_only=not download
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=not download)
        except Exception as error:  # the hub, and a config, raise many types of error
            raise ValueError(f"model {name!r} has no safetensors: {one_line(error)}") from None
        with replacing_folder(folder) as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
    return folder
