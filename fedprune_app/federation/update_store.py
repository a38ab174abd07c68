"""A relaying server keeps the latest encoded payload of each client here, on disk, and never looks into it.

On disk because a hundred clients' models are gigabytes, and because a resumed run needs them: they are versioned by
round like every state (:mod:`fedprune_app.engine.store`), so that the run goes on from those its checkpoint names.
A server that does read updates may remember them decoded, in memory and within a bound.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import State, VersionedStore, owner

_MOST_DECODED_BYTES = 8 * 2**30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


class UpdateStore:
    """Updates by client; the most recently read ones stay in memory up to ``cache_bytes``.

    Decoded updates stay in memory up to ``decoded_bytes`` (default: a quarter of the machine's or the container's
    memory, and 8 GiB at most).
    """

    def __init__(
        self, folder: Path, cache_bytes: int = 64 * 2**20, run_key: str = "", decoded_bytes: int | None = None
    ) -> None:
        self.folder = folder
        self.run_key = run_key
        self.cache_bytes = cache_bytes
        self._cached: OrderedDict[tuple[int, int], wire.EncodedArrays] = OrderedDict()
        self._bytes_cached = 0
        self.decoded_bytes = _quarter_of_memory() if decoded_bytes is None else decoded_bytes
        self._decoded: dict[tuple[int, int], Payload] = {}
        self._bytes_decoded = 0

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

    def remember(self, client: int, round: int, update: Payload) -> None:
        """Keep a decoded update in memory, too, if there is room beside those that are remembered already.

        Nothing makes way for it: which neighbours are asked for next is random, or all in turn.
        """
        size = _decoded_size(update)
        if (client, round) not in self._decoded and self._bytes_decoded + size <= self.decoded_bytes:
            self._decoded[client, round] = update
            self._bytes_decoded += size

    def remembered(self, client: int, round: int) -> Payload | None:
        """Return the update that a client sent in ``round`` if it is in memory, decoded."""
        return self._decoded.get((client, round))

    def forget_all_but(self, rounds: Mapping[int, int]) -> None:
        """Free the memory of all decoded updates but those of these clients and rounds."""
        for key in self._decoded.keys() - rounds.items():
            self._bytes_decoded -= _decoded_size(self._decoded.pop(key))

    def lost(self, rounds: Mapping[int, int]) -> list[str]:
        """Return a line for each update of these clients and rounds that is damaged or missing."""
        lines = []
        for client, round in rounds.items():
            try:
                self._store(client).read(round)
            except ValueError as error:
                lines.append(str(error))
        return lines

    def drop_after(self, round: int) -> None:
        """Forget updates of later rounds: a future that was abandoned."""
        for key in [key for key in {*self._cached, *self._decoded} if key[1] > round]:
            self._forget(key)
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            VersionedStore(folder).drop_after(round)

    def _forget(self, key: tuple[int, int]) -> None:
        update = self._cached.pop(key, None)
        if update is not None:
            self._bytes_cached -= _size(update)
        payload = self._decoded.pop(key, None)
        if payload is not None:
            self._bytes_decoded -= _decoded_size(payload)

    def _store(self, client: int) -> VersionedStore:
        owner_name = owner(f"update of client {client}", self.run_key)
        return VersionedStore(self.folder / f"{client:05d}", owner=owner_name)


def _size(update: ArrayRecord) -> int:
    return sum(len(array.data) for array in update.values())


def _decoded_size(update: Payload) -> int:
    return sum(tensor.nbytes for part in (update.tensors, update.masks) for tensor in part.values())


def _quarter_of_memory() -> int:
    """Return the bound on decoded updates where none is given."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        total = min(total, int(_CONTAINER_LIMIT.read_text()))
    return min(total // 4, _MOST_DECODED_BYTES)
