"""Checks of which files fedprune wrote, so that it never removes or replaces a user's own.

* A command uses a folder if it is empty or has a mark of fedprune: a readable run.json, or the file :data:`MARK`, which
  names the command that fills the folder.
* A report names fedprune as its generator.

Errors here are ``ValueError`` of one line that names the file in the way.
"""

import json
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from fedprune_app.config import ConfigError
from fedprune_app.files import may_write, replace_file
from fedprune_app.results.reader import read_info

# The file that marks a folder in which fedprune may replace its own files; its text is the command.
MARK = ".fedprune"
# The line of a report's head that marks it as fedprune's.
GENERATOR = '<meta name="generator" content="fedprune">'
_OF_A_RUN = (
    "run.json", "rounds.jsonl", "clients.jsonl", "masks.json", "progress.json", "models", "checkpoints", "clients",
    "peers", "layers", "tensorboard", "mlflow",
)  # fmt: skip
_HEAD_BYTES = 4096


# --- folders ------------------------------------------------------------------------------------------------------


def check_free(folder: Path) -> None:
    """Raise ``ValueError`` unless ``folder`` is empty, apart from names with a dot first, or marked as fedprune's."""
    names = sorted(path.name for path in folder.glob("[!.]*"))
    if not names or any(is_marked(folder, command) for command in ("run", "sweep", "demo")):
        return
    if "run.json" in names:
        with suppress(ValueError):
            read_info(folder)
            return
    raise ValueError(f"folder {str(folder)!r} holds {names[0]!r}, which fedprune did not write, allowed: a new folder")


def remove_run(folder: Path) -> None:
    """Remove all files and folders in ``folder`` with names that a run writes; others stay."""
    for name in _OF_A_RUN:
        remove(folder / name)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_marked(folder: Path, command: str) -> bool:
    path = folder / MARK
    return path.is_file() and path.read_text(errors="replace").strip() == command


def mark(folder: Path, command: str) -> None:
    """Mark the folder as filled by this command of fedprune; create it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / MARK, f"{command}\n".encode())


# --- single files -------------------------------------------------------------------------------------------------


def check_new_file(output: Path, force: bool) -> None:
    """Raise :class:`ConfigError` for a folder, and for an existing file unless ``force`` is true."""
    if output.is_dir() or (output.exists() and not force):
        raise ConfigError("--output", output, "a new file", which="exists", hint="force replaces a file")


def check_report_file(path: Path) -> None:
    """Raise ``ValueError`` unless ``path`` does not exist or is a report of fedprune."""
    _check_file(path)
    if os.path.lexists(path) and GENERATOR.encode() not in path.read_bytes()[:_HEAD_BYTES]:
        raise _exists_error(path)


def check_json_file(path: Path, keys: Collection[str]) -> None:
    """Raise ``ValueError`` unless ``path`` does not exist or is a JSON object with exactly these keys."""
    _check_file(path)
    if os.path.lexists(path):
        try:
            content = json.loads(path.read_bytes()) if path.stat().st_size < 1 << 20 else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or content.keys() != set(keys):
            raise _exists_error(path)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, allowed: a file")
    if not may_write(path.absolute().parent):
        raise ValueError(f"{str(path)!r} cannot be written, allowed: a file in a folder in which you may write")


def _exists_error(path: Path) -> ValueError:
    return ValueError(f"{str(path)!r} exists and fedprune did not write it, allowed: another file; force replaces it")
