"""Work behind the training of a simulation in one process: threads encode replies and write clients' states.

A reply is held until its client's work is done, so it still means that the client's state is written. The states of the
clients that trained last also stay in memory, so that their next rounds read no files. Elsewhere (on Ray, in a
deployment) any process may get a client's next message, and all work is done at once.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psutil
import torch
from flwr.app import ArrayRecord, Error, Message

from fedprune_app.core import codec
from fedprune_app.core.named import Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.flower_private import set_answered_id
from fedprune_app.engine.store import State, VersionedStore

Result = TypeVar("Result")
# Flower's code of an error that a client raised
RAISED = 2
_MOST_HELD = 16  # replies, whose clients' work is not done
_MOST_THREADS = 8
_MOST_IN_MEMORY = 8 * 2**30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LARGE = 2**28  # bytes; what is larger is not copied


def quarter_of_memory() -> int:
    """Return a quarter of the machine's or the container's memory in bytes, at most 8 GiB."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # not in a container, or in one without a limit ("max")
        total = min(total, int(_CONTAINER_LIMIT.read_text()))
    return min(total // 4, _MOST_IN_MEMORY)


def error_reply(error: Exception, message: Message) -> Message:
    return Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


class Background:
    """The threads of a run, and the states of its clients in memory: up to ``max_bytes``, the latest used ones."""

    def __init__(self, max_bytes: int) -> None:
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
        self._max_bytes = max_bytes
        self._states: dict[Path, tuple[int, State]] = {}  # by folder, with the round; the latest used one is last
        self._lock = Lock()

    def close(self) -> None:
        """Wait for the threads. Work that has not begun is dropped: its reply has not arrived."""
        self._threads.shutdown(cancel_futures=True)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        return self._threads.submit(work)

    def save(self, store: VersionedStore, round: int, state: State, accepted: int, durable: bool) -> None:
        """Write a state as ``store`` does, and only then keep it in memory."""
        store.save(round, state, accepted, durable=durable)
        # as it would be read
        kept = State(dict(sorted(state.tensors.items())), json.loads(json.dumps(dict(state.meta))))
        with self._lock:
            self._states.pop(store.folder, None)
            self._states[store.folder] = round, kept
            while sum(_num_bytes(each.tensors) for _, each in self._states.values()) > self._max_bytes:
                del self._states[next(iter(self._states))]

    def load(self, store: VersionedStore, round: int) -> State | None:
        """Return the state after ``round`` if it is in memory."""
        with self._lock:
            found = self._states.pop(store.folder, None)
            if found is None:
                return None
            self._states[store.folder] = found
        return _copy(found[1]) if found[0] == round else None


def _copy(state: State) -> State:
    layout = torch.contiguous_format
    tensors = {name: t.detach().to("cpu", copy=True, memory_format=layout) for name, t in state.tensors.items()}
    return State(tensors, deepcopy(state.meta))


def _snapshot(payload: Payload) -> Payload:
    """Return a copy, since the client may go on to use its tensors."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in payload.tensors.items()}
    return Payload.pruned(tensors, payload.masks)


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


# --- a client's work --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Client:
    """The client that is at work in a thread, with its work in the background."""

    background: Background
    work: list[Future[Any]]


_client: ContextVar[_Client | None] = ContextVar("_client", default=None)
_unfinished: WeakKeyDictionary[Message, tuple[Message, list[Future[Any]]]] = WeakKeyDictionary()


@contextmanager
def client_of(background: Background | None) -> Iterator[list[Future[Any]]]:
    """Have the client within the context leave its work to ``background``, if there is one; yield this work."""
    work: list[Future[Any]] = []
    token = _client.set(None if background is None else _Client(background, work))
    try:
        yield work
    finally:
        _client.reset(token)


def hold(reply: Message, message: Message, work: list[Future[Any]]) -> None:
    """Let ``reply``, which answers ``message``, arrive once its client's work is done."""
    if work:
        _unfinished[reply] = message, work


def finished(replies: Iterable[Message]) -> Iterator[Message]:
    """Yield replies in order, each once its client's work is done; meanwhile the next ones are fetched.

    In a simulation in this process to fetch one means that its client trains. If the work of a client failed, its reply
    is the error.
    """
    held: deque[Message] = deque()
    for reply in replies:
        held.append(reply)
        while held and (len(held) > _MOST_HELD or _is_done(held[0])):
            yield _outcome(held.popleft())
    while held:
        yield _outcome(held.popleft())


def _is_done(reply: Message) -> bool:
    return reply not in _unfinished or all(each.done() for each in _unfinished[reply][1])


def _outcome(reply: Message) -> Message:
    message, work = _unfinished.pop(reply, (reply, []))
    try:
        for each in work:
            each.result()
    except Exception as error:
        failed = error_reply(error, message)
        set_answered_id(failed, reply.metadata.reply_to_message_id)
        return failed
    return reply


def to_arrays(payload: Payload) -> ArrayRecord:
    """Encode a client's payload, in the background if there is one."""
    client = _client.get()
    if client is None or _num_bytes(payload.tensors) > _LARGE:
        return wire.to_arrays(payload)
    encoded = client.background.submit(partial(wire.to_arrays, _snapshot(payload)))
    client.work.append(encoded)
    return ArrayRecord({codec.KEY: wire.PendingArray(encoded)})


def save_state(store: VersionedStore, round: int, state: State, accepted: int, *, durable: bool) -> None:
    """Save a client's state, in the background if there is one."""
    client = _client.get()
    if client is None or _num_bytes(state.tensors) > _LARGE:
        store.save(round, state, accepted, durable=durable)
        return
    save = partial(client.background.save, store, round, _copy(state), accepted, durable)
    client.work.append(client.background.submit(save))


def load_state(store: VersionedStore, round: int) -> tuple[int, State] | None:
    """Return the client's state after ``round``, from memory if it is there, else the latest readable one before."""
    client = _client.get()
    state = None if client is None else client.background.load(store, round)
    return store.load(before=round + 1) if state is None else (round, state)
