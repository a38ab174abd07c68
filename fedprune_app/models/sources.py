"""Where a language model comes from: a folder, a GGUF file, or the Hugging Face hub."""

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

    Such a name is ``facebook/opt-125m``. A GGUF file's folder is in this user's cache. A hub model comes from the local
    hub cache, and with ``download`` from the hub. ``ValueError`` where there is none. If several processes or threads
    ask at once, one of them works and the others wait.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.suffix == ".gguf":
        return folder_of_gguf(folder)
    return _hub_snapshot(name, download)


def model_digest(name: str, folder: Path) -> str:
    """Return the SHA-256, in hexadecimal digits, of all that a model ``name`` in ``folder`` is read from.

    Of a GGUF file it is the file's own. Of a folder, tokenizer included, it is that of the lines which
    ``sha256sum * | sha256sum`` hashes there.
    """
    if (file := Path(name).expanduser()).is_file():
        return sha256_of(file)
    files = {*folder.glob("[!.]*"), *weight_files(folder)}
    lines = [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in sorted(files) if path.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@lru_cache(maxsize=8)  # with ``download`` the hub is asked for the newest version once, not for every message of a run
def _hub_snapshot(name: str, download: bool) -> Path:
    import_transformers()  # transformers brings the hub's client
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=not download))
    except Exception as error:  # the hub refuses with many kinds of error
        reason = f"cannot be downloaded: {one_line(error)}"
        if not download:
            reason = "no folder, and not in the hub cache (download=true fetches it)"
        allowed = "'auto', a folder, a .gguf file, or a name on the Hugging Face hub"
        raise ValueError(f"model is {name!r}, {reason}, allowed: {allowed}") from None
    return snapshot if weight_files(snapshot) else _convert_weights(name, snapshot, download)


def _convert_weights(name: str, snapshot: Path, download: bool) -> Path:
    """Return the folder of a hub model whose main branch has no safetensors.

    The folder is beside the snapshot and holds the hub's own conversion to safetensors. The other files of that branch,
    pickles among them, are neither fetched nor opened.
    """
    folder = snapshot / "fedprune-safetensors"
    transformers = import_transformers()
    with locked(f"{folder}.lock", f"writes {str(folder)!r}"):
        if folder.is_dir():  # made before, or by another process while this one waited
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
