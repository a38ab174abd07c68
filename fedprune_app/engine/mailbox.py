"""What a relaying server keeps: the latest encoded payload of each client, on disk, and never looked into.

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


class Mailbox:
    """Letters by partition; the most recently read ones stay in memory up to ``cache_bytes``."""

    def __init__(self, folder: Path, cache_bytes: int = 64 * 2**20, run_key: str = "") -> None:
        self.folder = folder
        self.run_key = run_key
        self.cache_bytes = cache_bytes
        self._cached: OrderedDict[tuple[int, int], wire.EncodedArrays] = OrderedDict()
        self._bytes_cached = 0

    def put(self, partition: int, round: int, letter: ArrayRecord, max_bytes: int) -> None:
        """Keep what a client sent in ``round``; up to two earlier letters stay for a resumed run.

        ``ValueError`` for arrays that no codec made, or of more than ``max_bytes``.
        """
        encoded = wire.to_bytes(letter)
        if list(encoded) != [codec.KEY]:  # a file cannot hold all names, and nobody could decode them
            raise ValueError(f"the payload has the arrays {str(list(encoded))[:80]}, allowed: exactly '{codec.KEY}'")
        total = sum(map(len, encoded.values()))
        if total > max_bytes:
            raise ValueError(f"the payload has {total} bytes, allowed: at most {max_bytes}")
        # a copy, because torch has no read-only tensors
        tensors = {name: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for name, data in encoded.items()}
        self._forget((partition, round))
        self._store(partition).save(round, State(tensors))

    def get(self, partition: int, round: int) -> wire.EncodedArrays:
        """The letter that a client sent in ``round``. ``ValueError`` if it is not there or damaged."""
        key = (partition, round)
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        state = self._store(partition).read(round)
        letter = wire.from_bytes({name: tensor.numpy().tobytes() for name, tensor in state.tensors.items()})
        self._cached[key] = letter
        self._bytes_cached += _size(letter)
        while self._bytes_cached > self.cache_bytes and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._bytes_cached -= _size(oldest)
        return letter

    def lost(self, rounds: Mapping[int, int]) -> list[str]:
        """What is wrong with the letters of these partitions and rounds: a line for each that is damaged or missing."""
        found = []
        for partition, round in rounds.items():
            try:
                self._store(partition).read(round)
            except ValueError as error:
                found.append(str(error))
        return found

    def drop_after(self, round: int) -> None:
        """Forget letters of later rounds: a future that was abandoned."""
        for key in [key for key in self._cached if key[1] > round]:
            self._forget(key)
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            VersionedStore(folder).drop_after(round)

    def _forget(self, key: tuple[int, int]) -> None:
        letter = self._cached.pop(key, None)
        if letter is not None:
            self._bytes_cached -= _size(letter)

    def _store(self, partition: int) -> VersionedStore:
        whose = owner(f"letter of client {partition}", self.run_key)
        return VersionedStore(self.folder / f"{partition:05d}", owner=whose)


def _size(letter: ArrayRecord) -> int:
    return sum(len(array.data) for array in letter.values())
