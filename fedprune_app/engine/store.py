"""Versioned state on disk: one safetensors file per round, written atomically. Clients and server use the same class.

A file ``round-00012.safetensors`` holds the state *after* round 12: tensors, and a JSON object in the file's metadata.
The server remembers whose reply of which round it took in, and tells each client from which version to go on. So a
reply that came too late, or a kill between a client's save and the server's checkpoint, changes nothing; older versions
stay until the server's own older checkpoints are gone too.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedprune_app.files import appending, replace_file
from fedprune_app.results.lock import LOCK

log = logging.getLogger("flwr.fedprune")  # below Flower's logger, so that `flwr log` shows it
_NAME = re.compile(r"round-(\d{5,})\.safetensors")


@dataclass(frozen=True)
class State:
    """Tensors by name, and plain JSON values beside them."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors named ``prefix/name``, by ``name``."""
        start = f"{prefix}/"
        return {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}


def grouped(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :meth:`State.group`: ``grouped(weights=w, masks=m)``."""
    return {f"{prefix}/{name}": t for prefix, tensors in groups.items() for name, t in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """Write tensors, and plain JSON values beside them, as one safetensors file, in one step."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, save(contiguous, metadata={"fedprune": json.dumps(dict(meta or {}))}))


def read_tensors(path: Path) -> State:
    """Read what :func:`write_tensors` wrote. Raises ``ValueError`` naming the file when it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})["fedprune"])
            return State({name: file.get_tensor(name) for name in file.keys()}, meta)  # noqa: SIM118 - no dict
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"state file {str(path)!r} is damaged: {error}") from None


@contextmanager
def exclusive(folder: Path, patience_seconds: float = 30.0) -> Iterator[None]:
    """Hold a folder for this process alone; the operating system lets go when the process ends, however it ends.

    Waits for a predecessor that is on its way out; raises ``ValueError`` if it stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with appending(folder / LOCK) as lock:
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"run folder {str(folder)!r} is in use by another process") from None
                time.sleep(0.1)
        yield


class VersionedStore:
    """The versions of one state, in a folder of its own."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:05d}.safetensors"

    def rounds(self) -> list[int]:
        """Rounds of which a version is on disk, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def save(self, round: int, state: State, accepted: int | None = None) -> None:
        """Write the state after ``round``, and drop versions that cannot be asked for any more.

        Up to ``accepted``, the round that is known to count (default: ``round``), those are all but the newest
        ``keep``; between the two, all: they came too late. Later ones stay: this save may be the late one, overtaken.
        """
        write_tensors(self._path(round), state.tensors, state.meta)
        accepted = round if accepted is None else accepted
        versions = self.rounds()
        counting = [r for r in versions if r <= accepted]
        for old in counting[: -self.keep] + [r for r in versions if accepted < r < round]:
            self._path(old).unlink(missing_ok=True)

    def drop_after(self, round: int) -> None:
        """Remove the versions of later rounds: a future that was abandoned."""
        for later in self.rounds():
            if later > round:
                self._path(later).unlink(missing_ok=True)

    def read(self, round: int) -> State:
        """The version after ``round``, no other. ``ValueError`` if it is not there or damaged."""
        return read_tensors(self._path(round))

    def load(self, before: int | None = None) -> tuple[int, State] | None:
        """The newest readable version, of a round smaller than ``before`` if given, with its round; or None.

        A damaged version is skipped with a warning: the previous one is used.
        """
        for round in reversed(self.rounds()):
            if before is not None and round >= before:
                continue
            try:
                return round, read_tensors(self._path(round))
            except ValueError as error:
                log.warning("%s; falling back to the version before it", error)
        return None
