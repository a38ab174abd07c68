"""Work behind the training of a simulation in one process: threads encode replies and write clients' states.

A reply is held until its client's work is done, so it still means that the client's state is on disk. Elsewhere (on
Ray, in a deployment) all work is done at once.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

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
_MOST_COPIED = 2**28  # bytes; larger states and payloads are written and encoded at once


def error_reply(error: Exception, message: Message) -> Message:
    return Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


_background: ContextVar[ThreadPoolExecutor | None] = ContextVar("_background", default=None)
_work: ContextVar[list[Future[Any]]] = ContextVar("_work")  # of the client in this thread
_unfinished: WeakKeyDictionary[Message, tuple[Message, list[Future[Any]]]] = WeakKeyDictionary()


@contextmanager
def background() -> Iterator[None]:
    """Let clients within the context leave work to threads; at its end all work is done, or was dropped."""
    threads = ThreadPoolExecutor(os.cpu_count())
    token = _background.set(threads)
    try:
        yield
    finally:
        _background.reset(token)
        threads.shutdown(cancel_futures=True)


def _copied(tensors: Tensors) -> TensorDict:
    layout = torch.contiguous_format
    return {name: tensor.detach().to("cpu", copy=True, memory_format=layout) for name, tensor in tensors.items()}


# --- a client's work; it is done on copies, since the client may go on to use its tensors -----------------------------


def begin_work() -> None:
    """Have the client that begins in this thread leave its work to others."""
    _work.set([])


def save_state(store: VersionedStore, round: int, state: State, accepted: int, *, durable: bool) -> None:
    """Save the client's state in ``store`` before its reply arrives."""
    if (threads := _threads_for(state.tensors)) is None:
        store.save(round, state, accepted, durable=durable)
        return
    copied = State(_copied(state.tensors), deepcopy(state.meta))
    _work.get().append(threads.submit(store.save, round, copied, accepted, durable=durable))


def to_arrays(payload: Payload) -> ArrayRecord:
    """Encode the client's payload before its reply arrives."""
    if (threads := _threads_for(payload.tensors)) is None:
        return wire.to_arrays(payload)
    encoded = threads.submit(wire.to_arrays, Payload(_copied(payload.tensors), _copied(payload.masks)))
    _work.get().append(encoded)
    arrays = ArrayRecord()
    arrays[codec.KEY] = wire.PendingArray(encoded)  # its constructor would copy the array
    return arrays


def _threads_for(tensors: Tensors) -> ThreadPoolExecutor | None:
    return _background.get() if sum(tensor.nbytes for tensor in tensors.values()) <= _MOST_COPIED else None


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
