"""Replies as hostile nodes may send them, through Flower's own SuperLink, HttpGrid and HTTP client; no socket."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import random
import sqlite3
import stat
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.recorddict_pb2 import ConfigRecord as ConfigRecordProto
from flwr.proto.recorddict_pb2 import MetricRecord as MetricRecordProto
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse, PushAppMessagesRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_children_ids_from_object_content,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedprune_app.engine import replies, wire
from fedprune_app.engine.exchange import message_to
from fedprune_app.launching.credentials import make_database
from tests.examples import examples, full
from tests.test_borders import damaged, refusal

quick = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PATHS = {
    "push-messages": (runtime_handlers.push_messages, PushAppMessagesRequest),
    "push-object": (runtime_handlers.push_object, PushObjectRequest),
    "pull-messages": (runtime_handlers.pull_messages, PullAppMessagesRequest),
    "pull-object": (runtime_handlers.pull_object, PullObjectRequest),
    "confirm-message-received": (runtime_handlers.confirm_message_received, ConfirmMessageReceivedRequest),
}
Objects = dict[str, bytes]  # by id, children before parents


def id_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def packed(kind: str, body: bytes, *children: str) -> bytes:
    """An object as Flower deflates it."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


class SuperLink:
    """One run and some nodes; ``grid`` is the ServerApp's."""

    def __init__(self, database: str, num_nodes: int = 3) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Alembic, about Flower's use of it
            objects = ObjectStoreFactory(database)
            self.state = LinkStateFactory(database, NoOpFederationManager(), objects).state()
            self._databases = [self.state, objects.store()]
        self.run_id = self.state.create_run(
            "", "", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self.nodes = [
            self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, b"%d" % k, 600) for k in range(num_nodes)
        ]
        for node in self.nodes:
            assert self.state.activate_node(node, 600)
        self.requests: list[str] = []
        self.sent = 0  # bytes that went to the ServerApp
        self.grid = HttpGrid("superlink:1", insecure=True, token="x")
        self.grid.set_run(Run.create_empty(self.run_id))
        self.grid._client = RuntimeHttpClient("http://superlink:1")
        self.grid._client._client = httpx.Client(transport=httpx.MockTransport(self._serve))

    def _serve(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rsplit("/", 1)[-1]
        self.requests.append(name)
        handler, kind = PATHS[name]
        try:
            body = handler(kind.FromString(request.content), self.state, SimpleNamespace(run_id=self.run_id))
        except Exception as error:  # as Flower's http_error_translator does
            return httpx.Response(500, json={"detail": "Internal server error.", "error": repr(error)}, request=request)
        content = body.SerializeToString()

        def pieces() -> Iterator[bytes]:
            for start in range(0, len(content), 60_000):
                self.sent += len(content[start : start + 60_000])
                yield content[start : start + 60_000]

        return httpx.Response(200, content=pieces())

    def ask(self, *nodes: int) -> list[Message]:
        """Send a message to each of these nodes."""
        content = wire.pack(None, {"round": 1})
        messages = [message_to(self.nodes[k], content, MessageType.TRAIN, 1, 600) for k in nodes]
        assert list(self.grid.push_messages(messages)) == [message.metadata.message_id for message in messages]
        return messages

    def send(self, head: MessageProto, objects: Objects, upload: Callable[[str], bool] = lambda key: True) -> None:
        """What a SuperNode does with a reply: its head and the tree of its objects, then these."""
        trees: dict[str, ObjectTree] = {}
        for key, content in objects.items():
            children = get_object_children_ids_from_object_content(content)
            trees[key] = ObjectTree(object_id=key, children=[trees[child] for child in children if child in trees])
        head.metadata.message_id = root = list(objects)[-1]
        self.session = session = self.state.start_session(self.run_id)
        stored, missing = self.state.store_message_and_object_tree(message_from_proto(head), trees[root], session)
        assert stored
        for key in missing:
            assert not upload(key) or self.state.store_object(self.run_id, session, key, objects[key])

    def reply(
        self,
        request: Message,
        content: RecordDict | Error,
        tamper: Callable[[Objects], Objects] = dict,
        **metadata: float,
    ) -> None:
        answer = Message(content, reply_to=request)
        objects = {key: found.deflate() for key, found in get_all_nested_objects(answer).items()}
        answer.metadata.__dict__["_message_id"] = answer.object_id
        head = message_to_proto(remove_content_from_message(answer))
        for name, value in metadata.items():
            setattr(head.metadata, name, value)
        self.send(head, tamper(objects))

    def fetch(self, *requests: Message, max_bytes: int = 2**20, seconds: float = 5) -> dict[str, replies.FetchedReply]:
        deadline = time.monotonic() + seconds
        asked = {request.metadata.message_id: deadline for request in requests}
        found = list(replies.arrived(self.grid, asked, 0, max_bytes))
        assert len({reply.message_id for reply in found}) == len(found)
        return {reply.message_id: reply for reply in found}

    def close(self) -> None:
        for each in self._databases:
            if engine := getattr(each, "_engine", None):  # without a database there is none
                engine.dispose()

    def enter(self) -> SuperLink:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self.run_id, SUPERLINK_NODE_ID, 1
        return self


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    """With a database, as in a deployment, and without, which is faster."""
    path = tmp_path_factory.mktemp("superlink") / "superlink.db"
    with closing(SuperLink(str(path))) as kept, closing(SuperLink(FLWR_IN_MEMORY_DB_NAME)) as quick:
        yield kept, quick


@pytest.fixture
def link(links, request):
    return links[getattr(request, "param", 1)].enter()


with_a_database_and_without = pytest.mark.parametrize("link", [0, 1], indirect=True, ids=["database", "memory"])


def content_of(data: bytes = b"0123456789" * 50) -> RecordDict:
    return wire.pack(wire.from_bytes({"fp1": data}), {"num-examples": 3, "loss": 0.5})


def with_body(kind: str, body: bytes) -> Callable[[Objects], Objects]:
    """Put another body into the objects of a kind; those that name them name the new ones."""

    def tamper(objects: Objects) -> Objects:
        found: Objects = {}
        renamed: dict[str, str] = {}
        for key, content in objects.items():
            for old, new in renamed.items():
                content = content.replace(old.encode(), new.encode())
            head, _, _ = content.partition(b"\0")
            name, children, _ = head.decode().split(" ")
            if name == kind:
                content = packed(kind, body, *filter(None, children.split(",")))
            renamed[key] = id_of(content)
            found[renamed[key]] = content
        return found

    return tamper


def body_of(objects: Objects, kind: str) -> bytes:
    return next(c for c in objects.values() if c.startswith(kind.encode() + b" ")).partition(b"\0")[2]


@with_a_database_and_without
def test_an_honest_reply_is_what_was_sent_and_the_superlink_forgets_it(link):
    (request,) = link.ask(0)
    assert link.fetch(request) == {}, "none has come"
    sent: list[str] = []
    link.reply(request, content_of(), lambda objects: sent.extend(objects) or objects)
    reply = link.fetch(request)[request.metadata.message_id]
    assert reply.error == ""
    assert reply.num_bytes == wire.num_bytes(content_of())
    assert dict(reply.content["fields"]) == {"num-examples": 3, "loss": 0.5}
    assert wire.to_bytes(reply.content["payload"]) == {"fp1": b"0123456789" * 50}
    assert [link.state.object_store.get(key) for key in sent] == [None] * 6


@with_a_database_and_without
def test_a_client_s_error_is_its_line(link):
    (request,) = link.ask(0)
    link.reply(request, Error(2, "Traceback\nException: Message: my disk is full'>"))
    assert link.fetch(request)[request.metadata.message_id].error == "my disk is full (error code 2)"


BROKEN = {
    "Message": [b"\xff\xff", b""],
    "RecordDict": [b"{", b"[]", b'{"a": "b"}', b"[" * 100_000, b"\xff"],
    "ArrayRecord": [b"{", b"null", b"{}"],
    "ConfigRecord": [b"\xff\xff", b"\x0a\x02\x0a\xff"],
    "Array": [b"{}", b"[]", b'{"arraychunk_ids": [7]}', b'{"arraychunk_ids": "a"}', b'{"arraychunk_ids": [[]]}'],
}
BROKEN["Array"] += [
    json.dumps({"dtype": "uint8", "shape": [10**400], "stype": "x", "arraychunk_ids": [0]}).encode(),
    json.dumps({"dtype": "\ud800", "shape": [1], "stype": "x", "arraychunk_ids": [0]}).encode(),
    json.dumps({"dtype": 3, "shape": [1], "stype": "x", "arraychunk_ids": [0]}).encode(),
]


@pytest.mark.parametrize(("kind", "body"), [(kind, body) for kind, bodies in BROKEN.items() for body in bodies])
def test_a_reply_that_cannot_be_read_is_the_error_of_its_sender_alone(link, kind, body):
    """Flower's own Grid raises, and has had the others of the batch forgotten."""
    requests = link.ask(0, 1, 2)
    for k, request in enumerate(requests):
        link.reply(request, content_of(), with_body(kind, body) if k == 1 else dict)
    found = link.fetch(*requests)
    first, broken, last = (found[request.metadata.message_id] for request in requests)
    assert first.content == last.content == content_of()
    assert broken.content is None
    assert broken.error.startswith("its reply is refused: ")
    assert broken.error.isprintable()
    assert len(broken.error) <= 500


@quick
@given(st.data())
def test_whatever_is_broken_in_a_reply_the_others_arrive(link, data):
    requests = link.ask(0, 1)

    def tamper(objects: Objects) -> Objects:
        kind = data.draw(st.sampled_from(["Message", "RecordDict", "ArrayRecord", "ConfigRecord", "Array"]))
        return with_body(kind, data.draw(damaged(body_of(objects, kind))))(objects)

    link.reply(requests[0], content_of(), tamper)
    link.reply(requests[1], content_of())
    found = link.fetch(*requests)
    assert found[requests[1].metadata.message_id].content == content_of()
    reply = found[requests[0].metadata.message_id]
    assert (reply.content is None) != (reply.error == "")
    assert reply.num_bytes <= 2**20
    assert reply.error.isprintable()


def test_a_reply_whose_first_object_is_no_message_is_refused(link):
    (request,) = link.ask(0)
    link.reply(request, content_of(), lambda objects: dict(list(objects.items())[:-1]))
    assert "it is of type RecordDict, allowed: Message" in link.fetch(request)[request.metadata.message_id].error


@with_a_database_and_without
def test_a_reply_counts_for_the_message_for_which_the_superlink_took_it(link):
    """Whatever it says itself."""
    mine, other = link.ask(0, 1)

    def lie(objects: Objects) -> Objects:
        inner = MessageProto.FromString(body_of(objects, "Message"))
        inner.metadata.reply_to_message_id = other.metadata.message_id
        inner.metadata.src_node_id = link.nodes[1]
        return with_body("Message", inner.SerializeToString())(objects)

    link.reply(mine, content_of(b"a lie"), lie)
    link.reply(other, content_of(b"the truth"))
    found = link.fetch(mine, other)
    assert wire.to_bytes(found[mine.metadata.message_id].content["payload"]) == {"fp1": b"a lie"}
    assert wire.to_bytes(found[other.metadata.message_id].content["payload"]) == {"fp1": b"the truth"}


@with_a_database_and_without
def test_a_message_that_nobody_asked_for_is_not_fetched(link):
    """A node can put one to the server into the SuperLink, which hands it out with the next replies."""
    (request,) = link.ask(0)
    link.reply(request, content_of())
    link.send(
        MessageProto(metadata={**facts(link), "dst_node_id": SUPERLINK_NODE_ID}, content={}),
        {id_of(content := packed("ConfigRecord", b"")): content},
    )
    before = len(link.requests)
    assert list(link.fetch(request)) == [request.metadata.message_id]
    assert link.requests[before:].count("pull-object") == 6


@with_a_database_and_without
@pytest.mark.parametrize("name", ["created_at", "ttl"])
def test_a_reply_that_the_superlink_cannot_read_is_the_error_of_its_sender_alone(link, name):
    """Flower takes NaN, its database makes nothing of it, and then the SuperLink has no answer for the whole batch."""
    requests = link.ask(0, 1, 2)
    link.reply(requests[0], content_of())
    link.reply(requests[1], content_of(), **{name: math.nan})
    first, broken, last = (request.metadata.message_id for request in requests)
    found = link.fetch(*requests)
    assert found[first].content == content_of()
    assert last not in found, "it has not come yet"
    if found[broken].content is None:
        assert found[broken].error == "its reply is refused: the SuperLink cannot read it"
    else:
        assert link.state.num_message_res() == 0, "without a database NaN harms nothing"
    link.reply(requests[2], content_of())
    assert link.fetch(requests[2])[last].content == content_of()


@pytest.fixture
def own_link(tmp_path):
    """With a database that no other test uses."""
    with closing(SuperLink(str(make_database(tmp_path / "superlink.db")))) as link:
        yield link.enter()


def test_a_superlink_that_cannot_answer_is_no_client_s_error(own_link, tmp_path):
    link, path = own_link, tmp_path / "superlink.db"
    requests = link.ask(0, 1)
    link.reply(requests[0], content_of())
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE message_ins RENAME TO lost")
    with pytest.raises(httpx.HTTPStatusError, match="500"):
        link.fetch(*requests)
    with pytest.raises(httpx.HTTPStatusError, match="500"):
        link.fetch(requests[0])


def facts(link: SuperLink) -> dict:
    return {
        "run_id": link.run_id,
        "src_node_id": SUPERLINK_NODE_ID,
        "ttl": 100,
        "message_type": "train",
        "created_at": time.time(),
    }


@pytest.mark.full
def test_a_superlinks_database_gives_back_the_room_of_replies_that_were_refused(own_link, tmp_path):
    """Flower deletes them; a database that it makes itself keeps the room of the largest for ever."""
    link, path = own_link, tmp_path / "superlink.db"
    for _ in range(3):
        (request,) = link.ask(0)
        link.reply(request, content_of(random.Random(0).randbytes(20 * MB)))
        assert "it has over 2000000 bytes" in link.fetch(request, max_bytes=2 * MB)[request.metadata.message_id].error
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    files = sorted(tmp_path.glob("superlink.db*"))
    assert sum(file.stat().st_size for file in files) < 2 * MB
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}, "Flower adds its files with the same mode"


# --- sizes ------------------------------------------------------------------------------------------------------------

MB = 10**6


def peak_of(call: Callable[[], object]) -> int:
    """Python's memory above what it was."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_more_of_a_reply_is_fetched_than_it_may_have(link):
    requests = link.ask(0, 1)
    link.reply(requests[0], content_of(bytes(range(256)) * 400_000))  # 100 MB, in pieces that differ
    link.reply(requests[1], content_of())
    before = link.sent
    found = {}
    peak = peak_of(lambda: found.update(link.fetch(*requests, max_bytes=2 * MB)))
    assert found[requests[0].metadata.message_id].error == "its reply is refused: it has over 2000000 bytes"
    assert found[requests[1].metadata.message_id].content == content_of()
    assert link.sent - before < 3 * MB
    assert peak < 40 * MB, "the SuperLink's own copies of a piece are among it"


def chunk_of(data: bytes) -> bytes:
    return packed("ArrayChunk", data)


def swollen(pieces: int, names: int, records: int) -> Callable[[Objects], Objects]:
    """A reply of little more than one piece of 100 kB: an array of that many, under so many names, in records."""

    def tamper(objects: Objects) -> Objects:
        message = list(objects.values())[-1]
        body = {"dtype": "uint8", "shape": [1], "stype": "fedprune.codec", "arraychunk_ids": [0] * pieces}
        contents = [chunk_of(bytes(100_000))]
        contents.append(packed("Array", json.dumps(body).encode(), id_of(contents[-1])))
        key = id_of(contents[-1])
        contents.append(packed("ArrayRecord", json.dumps({f"a{k}": key for k in range(names)}).encode(), key))
        key = id_of(contents[-1])
        contents.append(packed("RecordDict", json.dumps({f"r{k}": key for k in range(records)}).encode(), key))
        contents.append(packed("Message", message.partition(b"\0")[2], id_of(contents[-1])))
        return {id_of(content): content for content in contents}

    return tamper


@pytest.mark.parametrize(
    ("pieces", "names", "records", "says"),
    [
        (20_000, 1, 1, "its arrays have over 1000000 bytes"),
        (1, 5000, 1, "it has 1 records and"),
        (1, 1, 10_000, "it has 10000 records and"),
        full(1, 11, 1, "it has 1 records and 11000"),
        full(1, 1, 11, "it has 11 records and 11000"),
        full(11, 1, 1, "its arrays have over 1000000 bytes"),
        full(9, 1, 1, ""),
        full(3, 3, 1, ""),
    ],
)
def test_a_reply_that_grows_when_it_is_read_is_refused_before(link, pieces, names, records, says):
    (request,) = link.ask(0)
    link.reply(request, content_of(), swollen(pieces, names, records))
    found = {}
    peak = peak_of(lambda: found.update(link.fetch(request, max_bytes=MB)))
    reply = found[request.metadata.message_id]
    assert says in reply.error
    assert (reply.content is None) == bool(says)
    assert peak < 20 * MB


def numbers(kind: str, count: int, j: int) -> bytes:
    """A record of small numbers, each of them one byte here and an object of Python's when it is read."""
    record = {"ConfigRecord": ConfigRecordProto, "MetricRecord": MetricRecordProto}[kind]()
    item = record.items.add()
    item.key = f"x{j}"
    item.value.sint_list.vals.extend([-50] * count)
    return packed(kind, record.SerializeToString())


def of_records(records: list[bytes]) -> Callable[[Objects], Objects]:
    """A reply of these records and nothing else."""

    def tamper(objects: Objects) -> Objects:
        message = list(objects.values())[-1]
        found = {id_of(content): content for content in records}
        names = json.dumps({f"r{k}": key for k, key in enumerate(found)}).encode()
        last = packed("RecordDict", names, *found)
        whole = packed("Message", message.partition(b"\0")[2], id_of(last))
        return {**found, id_of(last): last, id_of(whole): whole}

    return tamper


@pytest.mark.parametrize("kind", ["ConfigRecord", "MetricRecord"])
def test_a_reply_of_very_many_small_numbers_is_refused_before_it_is_read(link, kind):
    """However large the model is: as Python's own such numbers take 80 times as much."""
    (request,) = link.ask(0)
    link.reply(request, content_of(), of_records([numbers(kind, 300_000, j) for j in range(16)]))
    found = {}
    peak = peak_of(lambda: found.update(link.fetch(request, max_bytes=100 * MB)))
    reply = found[request.metadata.message_id]
    assert reply.error == "its reply is refused: it has over 4194304 bytes beside its arrays' data"
    assert peak < 20 * MB


@pytest.mark.full
def test_an_introduction_with_a_hundred_thousand_classes_is_read(link):
    (request,) = link.ask(0)
    told = {f"labels-{part}": [k % 99 for k in range(MB // 10)] for part in ("train", "validation", "test")}
    told["classes"] = [f"class {k}" for k in range(MB // 10)]
    link.reply(request, wire.pack(None, told))
    reply = link.fetch(request, max_bytes=replies.FRAMING_BYTES)[request.metadata.message_id]
    assert dict(reply.content["fields"]) == told


def test_an_array_of_arrays_of_arrays_is_not_put_together(link):
    """Each has its piece nine times, and Flower asks only for something with bytes: 100 kB would become 5 GB."""
    (request,) = link.ask(0)

    def tamper(objects: Objects) -> Objects:
        contents = [chunk_of(bytes(100_000))]
        body = {"dtype": "uint8", "shape": [1], "stype": "fedprune.codec", "arraychunk_ids": [0] * 9}
        for _ in range(5):
            contents.append(packed("Array", json.dumps(body).encode(), id_of(contents[-1])))
        for kind in ("ArrayRecord", "RecordDict"):
            key = id_of(contents[-1])
            contents.append(packed(kind, json.dumps({"payload": key}).encode(), key))
        body = list(objects.values())[-1].partition(b"\0")[2]
        contents.append(packed("Message", body, id_of(contents[-1])))
        return {id_of(content): content for content in contents}

    link.reply(request, content_of(), tamper)
    reply = link.fetch(request)[request.metadata.message_id]
    assert "an array names objects that are no pieces of an array" in reply.error


@pytest.mark.parametrize("kind", ["Message", "RecordDict", "ArrayRecord", "Array", "ConfigRecord"])
def test_an_object_that_only_names_others_is_no_larger_than_that_takes(link, kind):
    (request,) = link.ask(0)
    link.reply(request, content_of(), with_body(kind, b"[" * (9 * 2**20)))
    reply = link.fetch(request, max_bytes=20 * 2**20)[request.metadata.message_id]
    assert f"one {kind} has 94" in reply.error


def test_a_reply_of_very_many_objects_is_not_fetched(link):
    (request,) = link.ask(0)

    def tamper(objects: Objects) -> Objects:
        message = list(objects.values())[-1]
        contents = [packed("ConfigRecord", b"\x0a\x03\x0a\x01" + bytes([65 + k])) for k in range(150)]
        ids = [id_of(content) for content in contents]
        contents.append(packed("RecordDict", json.dumps(dict(enumerate(ids))).encode(), *ids))
        contents.append(packed("Message", message.partition(b"\0")[2], id_of(contents[-1])))
        return {id_of(content): content for content in contents}

    link.reply(request, content_of(), tamper)
    before = len(link.requests)
    assert "it has 152 objects, allowed: 65" in link.fetch(request)[request.metadata.message_id].error
    assert "pull-object" not in link.requests[before:]


@pytest.mark.full
@with_a_database_and_without
def test_a_reply_whose_upload_does_not_end_is_waited_for_until_its_deadline_only(link):
    requests = link.ask(0, 1)
    held: list[str] = []
    link.reply(requests[1], content_of())
    answer = Message(content_of(b"slow"), reply_to=requests[0])
    objects = {key: found.deflate() for key, found in get_all_nested_objects(answer).items()}
    answer.metadata.__dict__["_message_id"] = answer.object_id
    head = message_to_proto(remove_content_from_message(answer))
    link.send(head, objects, upload=lambda key: bool(held) or held.append(key))
    started = time.monotonic()
    found = link.fetch(*requests, seconds=1)
    assert 0.9 < time.monotonic() - started < 4
    assert found[requests[0].metadata.message_id].error == "its reply was not sent in full"
    assert found[requests[1].metadata.message_id].content == content_of()


@with_a_database_and_without
def test_a_reply_whose_upload_ends_in_time_arrives(link):
    (request,) = link.ask(0)
    threads = []

    def later(key: str) -> bool:
        if not threads:
            threads.append(
                threading.Timer(0.5, lambda: link.state.store_object(link.run_id, link.session, key, slow[key]))
            )
            threads[0].start()
            return False
        return True

    answer = Message(content_of(b"slow but there"), reply_to=request)
    slow = {key: found.deflate() for key, found in get_all_nested_objects(answer).items()}
    answer.metadata.__dict__["_message_id"] = answer.object_id
    link.send(message_to_proto(remove_content_from_message(answer)), slow, upload=later)
    assert link.fetch(request)[request.metadata.message_id].content == content_of(b"slow but there")


@pytest.mark.parametrize("where", ["content", full("error"), full("group_id")])
def test_a_huge_head_of_a_reply_is_not_kept_in_memory(link, where):
    """The SuperLink holds a reply's head apart from its objects, and hands those of a batch over in one piece."""
    requests = link.ask(0, 1)
    answer = Message(content_of(), reply_to=requests[0])
    objects = {key: found.deflate() for key, found in get_all_nested_objects(answer).items()}
    head = message_to_proto(remove_content_from_message(answer))
    if where == "content":
        head = message_to_proto(Message(content_of(bytes(30 * MB)), reply_to=requests[0]))
    elif where == "error":
        head.ClearField("content")
        head.error.reason = "x" * 30 * MB
    else:
        head.metadata.group_id = "x" * 30 * MB
    link.send(head, objects)
    link.reply(requests[1], content_of())
    assert list(link.fetch(*requests).values()) == [
        replies.FetchedReply(requests[1].metadata.message_id, content_of(), wire.num_bytes(content_of()))
    ]
    assert "error code" in link.fetch(requests[0])[requests[0].metadata.message_id].error


@quick
@given(
    st.lists(st.integers(0, 300)),
    st.lists(st.integers(0, 300)),
    st.integers(0, 6),
    st.integers(0, 400),
    st.integers(1, 50),
)
def test_the_sieve_lets_the_first_messages_through_and_empties_the_large(heads, trees, most, largest, piece):
    def listed(sizes: list[int], kind: Callable[[int], object]) -> list:
        return [kind(size) for size in sizes]

    whole = PullAppMessagesResponse(
        messages_list=listed(heads, lambda n: MessageProto(error={"reason": "x" * n})),
        message_object_trees=listed(trees, lambda n: ObjectTree(object_id="x" * n)),
    )
    expected = PullAppMessagesResponse()
    for kept, given_ in (
        (expected.messages_list, whole.messages_list),
        (expected.message_object_trees, whole.message_object_trees),
    ):
        for one in given_[:most]:
            kept.add().CopyFrom(one if one.ByteSize() <= largest else type(one)())
    data = whole.SerializeToString()
    pieces = (data[start : start + piece] for start in range(0, len(data), piece))
    assert PullAppMessagesResponse.FromString(b"".join(replies.bounded_messages(pieces, most, largest))) == expected


@quick
@given(st.binary(max_size=40))
def test_the_sieve_passes_or_refuses_any_bytes(data):
    said = refusal(lambda: b"".join(replies.bounded_messages([data], 3, 20)))
    assert said == "" or "the SuperLink's list of replies" in said


def test_a_stream_that_breaks_off_and_comes_again_is_counted_once():
    budget = replies.Budget(100)

    def broken() -> Iterator[bytes]:
        yield bytes(90)
        raise httpx.ReadError("it broke off")

    with pytest.raises(httpx.ReadError):
        list(budget(broken()))
    assert list(budget([bytes(90)])) == [bytes(90)]
    with pytest.raises(ValueError, match="it has over 100 bytes"):
        list(budget([bytes(11)]))


# --- what is relied on ------------------------------------------------------------------------------------------------


def test_a_serverapp_of_a_deployment_is_given_the_grid_that_is_watched():
    runs = importlib.import_module("flwr.superlink.runtime.run_serverapp")
    assert runs.HttpGrid is HttpGrid
    assert sys.modules["flwr.superlink.grid"].HttpGrid is HttpGrid


@with_a_database_and_without
def test_flower_s_own_grid_raises_and_loses_the_others(link):
    """When this fails, Flower has learned it, and engine/replies.py may be shorter."""
    requests = link.ask(0, 1)
    link.reply(requests[0], content_of(), with_body("ConfigRecord", b"\xff"))
    link.reply(requests[1], content_of())
    ids = [request.metadata.message_id for request in requests]
    with pytest.raises(Exception, match="Error parsing message"):
        link.grid.pull_messages(ids)
    again = {message.metadata.reply_to_message_id: message for message in link.grid.pull_messages(ids)}
    assert again[ids[1]].has_error(), "it was honest"


def test_other_responses_to_the_server_app_are_left_as_they_are(link):
    (request,) = link.ask(0)
    link.reply(request, content_of())
    assert link.fetch(request)
    assert len(link.grid._client._client.event_hooks["response"]) == 1
    (request,) = link.ask(1)
    link.reply(request, content_of())
    (message,) = link.grid.pull_messages([request.metadata.message_id])
    assert message.content == content_of()


def test_replies_to_a_batch_are_asked_for_together(link):
    requests = [message for _ in range(14) for message in link.ask(0, 1, 2)]
    before = len(link.requests)
    assert link.fetch(*requests) == {}
    assert link.requests[before:] == ["pull-messages"] * 2


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(
            {"fields": ConfigRecord({}), "payload": ArrayRecord({"fp1": Array("uint8", (10**400,), "x", b"1")})}
        ),
        RecordDict({"payload": ArrayRecord({"\ud800": Array("uint8", (1,), "x", b"1")})}),
        RecordDict({str(k): ConfigRecord({}) for k in range(17)}),
        wire.pack(wire.from_bytes({"fp1": bytes(MB)}), {}),
    ],
    ids=["shape", "name", "records", "bytes"],
)
def test_what_other_grids_hand_over_is_checked_as_well(link, content):
    (request,) = link.ask(0)
    grid = SimpleNamespace(pull_messages=lambda ids: [Message(content, reply_to=request)])
    (reply,) = replies.arrived(grid, {request.metadata.message_id: 0.0}, 0, MB)
    assert reply.message_id == request.metadata.message_id
    assert reply.content is None
    assert reply.error.startswith("its reply is refused: ")
