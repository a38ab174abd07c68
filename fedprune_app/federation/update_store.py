"""A relaying server keeps the latest encoded payload of each client here, on disk, and never looks into it.

On disk because a hundred clients' models are gigabytes, and because a resumed run needs them: they are versioned by
round like every state (:mod:`fedprune_app.engine.store`), so that the run goes on from those its checkpoint names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedprune_app.core import codec
from fedprune_app.engine import wire
from fedprune_app.engine.store import State, VersionedStore, owner


class UpdateStore:
    """Updates by client; the most recently read ones stay in memory up to ``cache_bytes``."""

    def __init__(self, folder: Path, cache_bytes: int = 64 * 2**20, run_key: str = "") -> None:
        self.folder = folder
        self.run_key = run_key
        self.cache_bytes = cache_bytes
        self._cached: OrderedDict[tuple[int, int], wire.EncodedArrays] = OrderedDict()
        self._bytes_cached = 0

    def put(self, client: int, round: int, update: ArrayRecord, max_bytes: int) -> None:
        """Keep the update that a client sent in ``round``; up to two earlier updates stay for a resumed run.

        ``ValueError`` for arrays that no codec made, or of more than ``max_bytes``.
        """
        encoded = wire.to_bytes(update)
        if list(encoded) != [codec.KEY]:  # a file cannot hold all names, and nobody could decode them
            raise ValueError(f"the payload has the arrays {str(list(encoded))[:80]}, allowed: exactly '{codec.KEY}'")
        total = sum(map(len, encoded.values()))
        if total > max_bytes:
            raise ValueError(f"the payload has {total} bytes, allowed: at most {max_bytes}")
        # a copy, because torch has no read-only tensors
        tensors = {name: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for name, data in encoded.items()}
        self._forget((client, round))
        self._store(client).save(round, State(tensors))

    def get(self, client: int, round: int) -> wire.EncodedArrays:
        """Return the update that a client sent in ``round``. ``ValueError`` if it is not there or damaged."""
        key = (client, round)
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        state = self._store(client).read(round)
        update = wire.from_bytes({name: tensor.numpy().tobytes() for name, tensor in state.tensors.items()})
        self._cached[key] = update
        self._bytes_cached += _size(update)
        while self._bytes_cached > self.cache_bytes and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._bytes_cached -= _size(oldest)
        return update

    def lost(self, rounds: Mapping[int, int]) -> list[str]:
        """Return a line for each update of these clients and rounds that is damaged or missing."""
        found = []
        for client, round in rounds.items():
            try:
                self._store(client).read(round)
            except ValueError as error:
                found.append(str(error))
        return found

    def drop_after(self, round: int) -> None:
        """Forget updates of later rounds: a future that was abandoned."""
        for key in [key for key in self._cached if key[1] > round]:
            self._forget(key)
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            VersionedStore(folder).drop_after(round)

    def _forget(self, key: tuple[int, int]) -> None:
        update = self._cached.pop(key, None)
        if update is not None:
            self._bytes_cached -= _size(update)

    def _store(self, client: int) -> VersionedStore:
        whose = owner(f"letter of client {client}", self.run_key)
        return VersionedStore(self.folder / f"{client:05d}", owner=whose)


def _size(update: ArrayRecord) -> int:
    return sum(len(array.data) for array in update.values())
