"""Work behind the training of a simulation in one process: threads encode replies and write clients' states.

A reply is held until its client's work is done, so it still means that the client's state is on disk. The states that
were written last also stay in memory, so that their clients read no files. Elsewhere (on Ray, in a deployment) another
process may get a client's next message: there all work is done at once.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from flwr.app import ArrayRecord, Error, Message

from fedprune_app.core import codec
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import State, VersionedStore

# Flower's code of an error that a client raised
RAISED = 2
_MOST_HELD = 16  # replies
_MOST_IN_MEMORY = 8 * 2**30
_MOST_COPIED = 2**28  # bytes; larger states and payloads are written and encoded at once
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def quarter_of_memory() -> int:
    """Return a quarter of the machine's or the container's memory in bytes, at most 8 GiB."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # not in a container, or in one without a limit ("max")
        total = min(total, int(_CONTAINER_LIMIT.read_text()))
    return min(total // 4, _MOST_IN_MEMORY)


def error_reply(error: Exception, message: Message) -> Message:
    return Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


class Background:
    """The threads of a run, and the states of its clients in memory, up to ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self.threads = ThreadPoolExecutor(os.cpu_count())
        self._states: dict[Path, tuple[int, State]] = {}  # by folder, with the round; the one written last is last
        self._room = max_bytes
        self._lock = Lock()

    def leave(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Have the client's work done by a thread before its reply arrives."""
        future = self.threads.submit(work, *arguments)
        _work.get().append(future)
        return future

    def write(self, store: VersionedStore, round: int, state: State, accepted: int, durable: bool) -> None:
        """Write a state as ``store`` does, and then keep it in memory."""
        store.save(round, state, accepted, durable=durable)
        with self._lock:
            self._forget(store.folder)
            self._states[store.folder] = round, state
            self._room -= _num_bytes(state.tensors)
            while self._room < 0:
                self._forget(next(iter(self._states)))

    def _forget(self, folder: Path) -> None:
        _, state = self._states.pop(folder, (0, State()))
        self._room += _num_bytes(state.tensors)

    def state(self, folder: Path, round: int) -> State | None:
        """Return a copy of the state in ``folder`` after ``round``, as it would be read, if it is in memory."""
        kept_round, state = self._states.get(folder, (0, State()))
        if kept_round != round:
            return None
        return State(_copied(dict(sorted(state.tensors.items()))), json.loads(json.dumps(state.meta)))


_background: ContextVar[Background | None] = ContextVar("_background", default=None)
_work: ContextVar[list[Future[Any]]] = ContextVar("_work")  # of the client in this thread
_unfinished: WeakKeyDictionary[Message, tuple[Message, list[Future[Any]]]] = WeakKeyDictionary()


@contextmanager
def background() -> Iterator[None]:
    """Let clients within the context leave work to threads; at its end all work is done, or was dropped."""
    threads = Background(quarter_of_memory())
    token = _background.set(threads)
    try:
        yield
    finally:
        _background.reset(token)
        threads.threads.shutdown(cancel_futures=True)


def _copied(tensors: Tensors) -> TensorDict:
    layout = torch.contiguous_format
    return {name: tensor.detach().to("cpu", copy=True, memory_format=layout) for name, tensor in tensors.items()}


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


# --- a client's work; it is done on copies, since the client may go on to use its tensors -----------------------------


def begin_work() -> None:
    """Have the client that begins in this thread leave its work to others."""
    _work.set([])


def save_state(store: VersionedStore, round: int, state: State, accepted: int, *, durable: bool) -> None:
    """Save the client's state in ``store`` before its reply arrives."""
    threads = _threads_for(state.tensors)
    if threads is None:
        store.save(round, state, accepted, durable=durable)
    else:
        threads.leave(
            threads.write, store, round, State(_copied(state.tensors), deepcopy(state.meta)), accepted, durable
        )


def load_state(store: VersionedStore, round: int) -> tuple[int, State] | None:
    """Return the client's state after ``round``, or else the latest readable one before, with its round."""
    threads = _background.get()
    state = None if threads is None else threads.state(store.folder, round)
    return store.load(before=round + 1) if state is None else (round, state)


def to_arrays(payload: Payload) -> ArrayRecord:
    """Encode the client's payload before its reply arrives."""
    threads = _threads_for(payload.tensors)
    if threads is None:
        return wire.to_arrays(payload)
    encoded = threads.leave(wire.to_arrays, Payload(_copied(payload.tensors), _copied(payload.masks)))
    arrays = ArrayRecord()
    arrays[codec.KEY] = wire.PendingArray(encoded)  # its constructor would copy the array
    return arrays


def _threads_for(tensors: Tensors) -> Background | None:
    return _background.get() if _num_bytes(tensors) <= _MOST_COPIED else None


# --- replies ----------------------------------------------------------------------------------------------------------


def hold(reply: Message, message: Message) -> None:
    """Let ``reply``, the client's answer to ``message``, arrive once its work is done."""
    _unfinished[reply] = message, _work.get()


def finished(replies: Iterable[Message]) -> Iterator[Message]:
    """Yield replies in order, each once its client's work is done, or failed: the reply is then the error.

    Meanwhile later replies are fetched, for which clients in this process train.
    """
    held: deque[tuple[Message, Message, list[Future[Any]]]] = deque()
    for reply in replies:
        held.append((reply, *_unfinished.get(reply, (reply, []))))
        while held and (len(held) > _MOST_HELD or all(future.done() for future in held[0][-1])):
            yield _outcome(*held.popleft())
    yield from itertools.starmap(_outcome, held)


def _outcome(reply: Message, message: Message, work: Iterable[Future[Any]]) -> Message:
    try:
        for future in work:
            future.result()
    except Exception as error:
        return error_reply(error, message)
    return reply
