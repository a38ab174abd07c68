"""Replies from nodes: bounded content, or one line on why there is none, whatever a node sent.

The Grid of a deployment is Flower's ``HttpGrid``, which trusts replies too much:

* It creates messages of all requested replies before it returns the first, however large they are.
* A reply that cannot be read raises an exception, which ends the run and loses the other replies.
* A reply itself names the message that it answers.
* For a reply that the SuperLink cannot read, it returns an error for the whole batch.

Here replies are fetched one by one through the same client:

* The memory of a reply is bounded before the reply is in memory.
* A reply that cannot be read is an error of that reply alone.
* A reply belongs to the message for which the SuperLink accepted it.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedprune_app.core import codec
from fedprune_app.engine import flower_private, wire
from fedprune_app.engine.background import finished
from fedprune_app.engine.flower_private import (
    ArrayChunk,
    ConfirmMessageReceivedRequest,
    ObjectPullError,
    PullAppMessagesRequest,
    get_object_body,
    get_object_head_values_from_object_content,
    inflate_object_from_contents,
    iterate_object_tree,
    make_pull_object_fn_protobuf,
    pull_objects,
)

if TYPE_CHECKING:
    from fedprune_app.engine.flower_private import HttpGrid

log = logging.getLogger("flwr.fedprune")

# the most bytes of a reply in addition to its tensors: fields, names, and Flower's framing
FRAMING_BYTES = 8 * 2**20
_BATCH = 32
_BATCH_BYTES = 64 * 2**20
_HEAD_BYTES = 2**20  # of a reply without its objects, a list of replies, an object that only names others
_BESIDE_BYTES = 4 * 2**20  # of all objects except pieces of arrays: three counts for each of a million classes fit
_LARGEST = {ArrayChunk.__qualname__: sys.maxsize, ConfigRecord.__qualname__: _BESIDE_BYTES}  # bytes of other objects
_CHUNK = f"{ArrayChunk.__qualname__} ".encode()  # the start of a piece of an array
_MOST_RECORDS = 16
_MOST_OBJECTS = 64  # and one more per MiB
_BACKOFF_SECONDS = (0.05, 1.0)  # between attempts to fetch an object that is still being uploaded
_EXCEPTION = re.compile(r"^<class '[^']*'>:<'")  # the start of an exception's message from a SuperNode

Stream = Iterable[bytes]


@dataclass(frozen=True)
class FetchedReply:
    """A reply to one message: its content and its size in Flower's serialisation, or one line on why there is none."""

    message_id: str  # the message that the reply answers
    content: RecordDict | None = None
    num_bytes: int = 0
    error: str = ""


def arrived(grid: Grid, deadlines: Mapping[str, float], largest: int, max_bytes: int) -> Iterator[FetchedReply]:
    """Yield the arrived replies to these messages, each read when the caller is done with the one before.

    A reply of more than ``max_bytes`` is rejected. A reply whose upload has begun is awaited until its deadline, by
    ``time.monotonic()``. Some Grids return whole batches, of replies of up to ``largest`` bytes.
    """
    # a ServerApp has imported the class; an import here would slow clients down
    grid_class = flower_private.if_imported("HttpGrid")
    ids = list(deadlines)
    if grid_class is not None and isinstance(grid, grid_class):
        for start in range(0, len(ids), _BATCH):
            yield from _fetch_all(grid, {key: deadlines[key] for key in ids[start : start + _BATCH]}, max_bytes)
        return
    size = max(1, min(_BATCH, _BATCH_BYTES // max(1, largest)))  # batches of large models are small
    pulls = (grid.pull_messages(ids[start : start + size]) for start in range(0, len(ids), size))
    for message in finished(itertools.chain.from_iterable(pulls)):
        # an error from the SuperLink names another source, so the message replied to identifies the client
        yield _reply(message.metadata.reply_to_message_id, message, max_bytes)


def _reply(message_id: str, message: Message, max_bytes: int) -> FetchedReply:
    """Return the reply in a message; any error of a client's message is an error of that client alone."""
    try:
        if message.has_error():
            return FetchedReply(message_id, error=error_line(message.error))
        content = message.content
        num_bytes = sum(_array_bytes(record) for record in content.values())
        if len(content) <= _MOST_RECORDS and num_bytes <= max_bytes:
            num_bytes = wire.num_bytes(content)  # copies the content
        if len(content) > _MOST_RECORDS or num_bytes > max_bytes:
            raise ValueError(
                f"it has {len(content)} records and {num_bytes} bytes, allowed: {_MOST_RECORDS} and {max_bytes}"
            )
    except Exception as error:  # Flower may raise any kind of error
        return _rejection(message_id, error)
    return FetchedReply(message_id, content, num_bytes)


def _rejection(message_id: str, error: Exception) -> FetchedReply:
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return FetchedReply(message_id, error=wire.one_line(f"its reply is refused: {kind}{str(error)[:500]}"))


def _array_bytes(record: object) -> int:
    """Return the bytes of a record of arrays without copying them: a record may list one array under many names."""
    return sum(len(name) + len(array.data) for name, array in record.items()) if isinstance(record, ArrayRecord) else 0


def error_line(error: Error) -> str:
    """Return the last informative line of an error that a client's side reported."""
    reason = error.reason or ""
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()] or ["no reason given"]
    text = _EXCEPTION.sub("", lines[-1].removesuffix("'>")).split("Message: ")[-1]
    if "ActorDiedError" in reason or "ActorUnavailableError" in reason:
        text = "its process died"
    return f"{wire.one_line(text)} (error code {error.code})"


# --- from a SuperLink -------------------------------------------------------------------------------------------------


def _fetch_all(grid: HttpGrid, deadlines: Mapping[str, float], max_bytes: int) -> Iterator[FetchedReply]:
    """Yield the replies of ``HttpGrid.pull_messages``, but one by one, and within the allowed size."""
    try:
        reply_list = _list_replies(grid, list(deadlines))
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
            raise
        if len(deadlines) > 1:
            for message_id, deadline in deadlines.items():
                yield from _fetch_all(grid, {message_id: deadline}, max_bytes)
        else:
            _list_replies(grid, [])  # raises if the SuperLink fails altogether, which is no client's failure
            yield from (_rejection(message_id, ValueError("the SuperLink cannot read it")) for message_id in deadlines)
        return
    for head, tree in zip(reply_list.messages_list, reply_list.message_object_trees, strict=True):
        message_id = head.metadata.reply_to_message_id
        if message_id in deadlines:
            yield _fetch(grid, head, tree, deadlines[message_id], max_bytes)


def _list_replies(grid: HttpGrid, message_ids: list[str]) -> Any:
    """Return the heads of the arrived replies to these messages, each with the tree of its objects."""
    _watch(grid._runtime_client._client)
    with _filter_responses(lambda stream: bounded_messages(stream, len(message_ids), _HEAD_BYTES)):
        return grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))


def _fetch(grid: HttpGrid, head: Any, tree: Any, deadline: float, max_bytes: int) -> FetchedReply:
    message_id, root = head.metadata.reply_to_message_id, head.metadata.message_id
    client, run_id = grid._runtime_client, grid.run.run_id
    budget = Budget(max_bytes)

    def pull(request: Any) -> Any:
        with _filter_responses(budget):
            return client.PullObject(request)

    try:
        ids = list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))
        if len(ids) > (max_objects := _MOST_OBJECTS + max_bytes // 2**20):
            raise ValueError(f"it has {len(ids)} objects, allowed: {max_objects}")
        first, longest = _BACKOFF_SECONDS
        contents = pull_objects(
            ids,
            make_pull_object_fn_protobuf(pull, grid.node, run_id),
            max_time=max(0.0, deadline - time.monotonic()),
            max_tries_per_object=None,
            initial_backoff=first,
            backoff_cap=longest,
        )
        reply = read(message_id, root, contents, max_bytes)
    except ObjectPullError:
        reply = FetchedReply(message_id, error="its reply was not sent in full")
    except (ValueError, httpx.HTTPStatusError) as error:
        reply = _rejection(message_id, error)
    try:
        confirmation = ConfirmMessageReceivedRequest(node=grid.node, run_id=run_id, message_object_id=root)
        client.ConfirmMessageReceived(confirmation)
    except httpx.HTTPStatusError as error:  # the SuperLink then keeps the reply until the run ends
        log.warning("a reply that came is kept by the SuperLink: %s", wire.one_line(str(error)))
    return reply


def read(message_id: str, root: str, contents: dict[str, bytes], max_bytes: int) -> FetchedReply:
    """Return a reply from ``contents``, untrusted bytes of its objects by id; ``root`` should be a message."""
    try:
        _check_sizes(contents, max_bytes)
        message = inflate_object_from_contents(root, contents)
        if not isinstance(message, Message):
            raise ValueError(f"it is of type {type(message).__name__}, allowed: Message")
    except Exception as error:  # Flower's parsers may raise any kind of error
        return _rejection(message_id, error)
    return _reply(message_id, message, max_bytes)


def _check_sizes(contents: Mapping[str, bytes], max_bytes: int) -> None:
    """Raise ``ValueError`` for objects that would grow when they are assembled.

    An array may name one piece many times, and a number of one byte here takes 80 as a Python object.
    """
    total = other_bytes = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if len(content) > (limit := _LARGEST.get(kind, _HEAD_BYTES)):
            raise ValueError(f"one {kind} has {len(content)} bytes, allowed: {limit}")
        other_bytes += 0 if kind == ArrayChunk.__qualname__ else len(content)
        if other_bytes > _BESIDE_BYTES:
            raise ValueError(f"it has over {_BESIDE_BYTES} bytes beside its arrays' data")
        if kind == Array.__qualname__:
            chunks = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            if not all(contents[child].startswith(_CHUNK) for child in children):
                # an array of arrays would grow with each of them
                raise ValueError("an array names objects that are no pieces of an array")
            total += sum(len(contents[children[index]]) for index in chunks)
            if total > max_bytes:
                raise ValueError(f"its arrays have over {max_bytes} bytes")


# --- responses over HTTP, bounded while they arrive -------------------------------------------------------------------

_current = threading.local()  # attribute `filter`: applied to this thread's responses


@contextmanager
def _filter_responses(stream_filter: Callable[[Stream], Stream]) -> Iterator[None]:
    """Apply ``stream_filter`` to responses of this thread's requests before they are in memory, within the context."""
    _current.filter = stream_filter
    try:
        yield
    finally:
        del _current.filter


def _watch(client: httpx.Client) -> None:
    """Make responses to this client pass the filter from now on."""
    hooks = client.event_hooks
    if _attach not in hooks["response"]:
        client.event_hooks = {**hooks, "response": [*hooks["response"], _attach]}


def _attach(response: httpx.Response) -> None:
    stream_filter = getattr(_current, "filter", None)
    if stream_filter is not None and response.is_success:
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _FilteredStream(response.stream, stream_filter)


class _FilteredStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, stream_filter: Callable[[Stream], Stream]) -> None:
        self._stream = stream
        self._stream_filter = stream_filter

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream_filter(self._stream))

    def close(self) -> None:
        self._stream.close()


class Budget:
    """Limit the bytes of several threads' streams together: beyond ``limit`` it raises ``ValueError``.

    The bytes of a stream that breaks off do not count, because the stream is repeated.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._remaining = limit
        self._lock = threading.Lock()

    def __call__(self, stream: Stream) -> Iterator[bytes]:
        num_bytes = 0
        try:
            for chunk in stream:
                num_bytes += len(chunk)
                self._take(len(chunk))
                yield chunk
        except httpx.TransportError:
            self._take(-num_bytes)
            raise

    def _take(self, count: int) -> None:
        with self._lock:
            self._remaining -= count
            if self._remaining < 0:
                raise ValueError(f"it has over {self._limit} bytes")


def bounded_messages(stream: Stream, max_count: int, max_bytes: int) -> Iterator[bytes]:
    """Yield a protobuf message of messages, with only the first ``max_count`` of each field.

    Messages of more than ``max_bytes`` bytes among them are emptied.

    Raises ``ValueError`` for a message that has other fields.
    """
    chunks = iter(stream)
    buffer = bytearray()
    counts: Counter[int] = Counter()

    def read_chunk() -> bool:
        chunk = next(chunks, None)
        buffer.extend(chunk or b"")
        return chunk is not None

    def varint() -> int:
        value = 0
        for shift in range(0, 64, 7):
            while not buffer:
                if not read_chunk():
                    raise ValueError("the SuperLink's list of replies ends early")
            byte = buffer.pop(0)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("the SuperLink's list of replies has a number of more than 10 bytes")

    while buffer or read_chunk():
        if not buffer:
            continue  # an empty chunk
        tag, size = varint(), varint()
        if tag & 7 != 2:
            raise ValueError(f"the SuperLink's list of replies has a field {tag >> 3} that is no message")
        counts[tag] += 1
        is_kept, remaining = counts[tag] <= max_count and size <= max_bytes, size
        body = bytearray()
        while remaining:
            if not buffer and not read_chunk():
                raise ValueError("the SuperLink's list of replies ends early")
            part = buffer[:remaining]
            del buffer[: len(part)]
            remaining -= len(part)
            if is_kept:
                body += part
        if counts[tag] <= max_count:
            yield codec.varint(tag) + codec.varint(len(body)) + bytes(body)
