"""The store of a server that forwards updates: on disk, and decoded in memory while there is room."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
import psutil
import torch
from flwr.app import ArrayRecord

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import State, VersionedStore, owner

_MOST_DECODED_BYTES = 8 * 2**30
_MOST_UNWRITTEN = 8  # updates
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


class UpdateStore:
    """Keeps each client's latest encoded updates on disk, to forward them without decoding.

    They are on disk because a hundred clients' models are gigabytes, and versioned by round because a resumed run needs
    them. A server that decodes updates caches them in memory, up to ``decoded_bytes``: by default a quarter of the
    machine's or the container's memory, at most 8 GiB.
    """

    def __init__(self, folder: Path, run_key: str = "", decoded_bytes: int | None = None) -> None:
        self.folder = folder
        self.run_key = run_key
        self.decoded_bytes = _quarter_of_memory() if decoded_bytes is None else decoded_bytes
        self._writer = ThreadPoolExecutor(1)  # a single thread keeps the order of a client's updates
        self._unwritten: deque[Future[None]] = deque()
        self._lock = Lock()  # one thread may read an update while another one receives
        self._decoded: dict[tuple[int, int], Payload] = {}
        self._bytes_decoded = 0

    def put(self, client: int, round: int, update: ArrayRecord, max_bytes: int) -> None:
        """Store the update that a client sent in ``round``; up to two earlier updates stay for a resumed run.

        It may be written behind the next ones: see :meth:`settle`. Raises ``ValueError`` for arrays that are not the
        codec's, or of more than ``max_bytes``.
        """
        encoded = wire.to_bytes(update)
        if list(encoded) != [codec.KEY]:  # other names may not suit a file, and no client could decode them
            raise ValueError(f"the payload has the arrays {str(list(encoded))[:80]}, allowed: exactly '{codec.KEY}'")
        data = encoded[codec.KEY]
        if len(data) > max_bytes:
            raise ValueError(f"the payload has {len(data)} bytes, allowed: at most {max_bytes}")
        # a copy, because torch has no read-only tensors
        state = State({codec.KEY: torch.from_numpy(np.frombuffer(data, np.uint8).copy())})
        if len(self._unwritten) >= _MOST_UNWRITTEN:
            self._unwritten.popleft().result()
        self._unwritten.append(self._writer.submit(self._store(client).save, round, state))

    def settle(self) -> None:
        """Wait until all updates are on disk; raise the error of one that cannot be written."""
        while self._unwritten:
            self._unwritten.popleft().result()

    def get(self, client: int, round: int) -> ArrayRecord:
        """Return the update that a client sent in ``round``. ``ValueError`` if it is missing or damaged."""
        self.settle()
        state = self._store(client).read(round)
        return wire.from_bytes({name: tensor.numpy().tobytes() for name, tensor in state.tensors.items()})

    def remember(self, client: int, round: int, update: Payload) -> None:
        """Cache a decoded update in memory if there is room.

        Nothing is evicted for it: the next access is random, or to all updates in turn, so no choice would help.
        """
        size = _decoded_size(update)
        with self._lock:
            if self._bytes_decoded + size <= self.decoded_bytes:
                self._decoded[client, round] = update
                self._bytes_decoded += size

    def remembered(self, client: int, round: int) -> Payload | None:
        """Return the decoded update that a client sent in ``round``, or None if it is not cached."""
        return self._decoded.get((client, round))

    def forget_all_but(self, rounds: Mapping[int, int]) -> None:
        """Free the memory of all cached updates except those of these clients and rounds."""
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
        """Remove the updates of later rounds from the disk, which a resumed run does not use."""
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            VersionedStore(folder).drop_after(round)

    def _store(self, client: int) -> VersionedStore:
        return VersionedStore(self.folder / f"{client:05d}", owner=owner(f"update of client {client}", self.run_key))


def _quarter_of_memory() -> int:
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # not in a container, or in one without a limit ("max")
        total = min(total, int(_CONTAINER_LIMIT.read_text()))
    return min(total // 4, _MOST_DECODED_BYTES)


def _decoded_size(update: Payload) -> int:
    return sum(tensor.nbytes for part in (update.tensors, update.masks) for tensor in part.values())
