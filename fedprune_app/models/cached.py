"""Cache of language models that this machine creates once, such as from a GGUF file."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from fedprune_app.files import locked, replacing_folder, sha256_of

_DIGESTS = "sha256.json"  # the digests of the other files in the folder


def cache_folder() -> Path:
    """Return the folder of this user's models: ``$XDG_CACHE_HOME/fedprune`` or ``~/.cache/fedprune``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedprune"


def cached_model(folder: Path, action: str, make: Callable[[Path], None]) -> Path:
    """Return a cached model's folder, which ``make`` fills unless this or another process already did.

    ``action`` describes ``make``, as in :func:`locked`. A damaged folder is rebuilt.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(f"{folder}.lock", action):
        if not is_whole(folder):  # another process may have written it while this one waited
            with replacing_folder(folder) as new_folder:
                make(new_folder)
                digests = {path.name: sha256_of(path) for path in sorted(new_folder.iterdir())}
                (new_folder / _DIGESTS).write_text(json.dumps(digests, indent=1))
    return folder


def is_whole(folder: Path) -> bool:
    """Return whether a cached model's files match their recorded digests."""
    try:
        digests = json.loads((folder / _DIGESTS).read_text())
        return all(sha256_of(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False
