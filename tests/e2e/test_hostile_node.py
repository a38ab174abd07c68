"""A registered SuperNode that was changed to send what no honest one does, in a deployment over gRPC with TLS."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from fedprune_app.launching import processes
from tests.conftest import wrapped_app
from tests.e2e.deployed import DeployedRun, in_process_sha256, nodes_with_the_app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HOSTILE_SUPERNODE = """#!{python}
'''A SuperNode whose replies to training messages are, from round to round, broken in another way.'''
import hashlib
import json
import time

from flwr.proto.message_pb2 import Message, ObjectTree
from flwr.supernode import start_client_internal as supernode
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

push = supernode._push_messages

def packed(kind, body, *children):
    return f"{{kind}} {{','.join(children)}} {{len(body)}}".encode() + bytes(1) + body

def broken(round, objects):
    found, renamed = [], {{}}
    for key, content in objects.items():
        for old, new in renamed.items():
            content = content.replace(old.encode(), new.encode())
        head, _, body = content.partition(bytes(1))
        kind, children, _ = head.decode().split(" ")
        children = [child for child in children.split(",") if child]
        if (round, kind) == (1, "ConfigRecord"):
            body = b"garbage"
        if (round, kind) == (3, "Message"):  # in another's name, and another's stead
            inner = Message.FromString(body)
            inner.metadata.reply_to_message_id = "0" * 64
            inner.metadata.src_node_id += 1
            body = inner.SerializeToString()
        if (round, kind) == (4, "Array"):  # 200 MB
            pieces = [packed("ArrayChunk", bytes([k]) * 5_000_000) for k in range(40)]
            found += pieces
            children = [hashlib.sha256(piece).hexdigest() for piece in pieces]
            body = json.dumps({{**json.loads(body), "arraychunk_ids": list(range(40))}}).encode()
        if (round, kind) == (6, "Array"):  # 1 TB
            body = json.dumps({{**json.loads(body), "arraychunk_ids": [0] * 300_000}}).encode()
        if (round, kind) == (2, "Message"):  # no message at all
            break
        found.append(packed(kind, body, *children))
        renamed[key] = hashlib.sha256(found[-1]).hexdigest()
    return {{hashlib.sha256(content).hexdigest(): content for content in found}}

def push_broken(state, object_store, send, push_object):
    while not (replies := state.get_messages(is_reply=True)):
        time.sleep(0.1)
    for reply in replies:
        tree = object_store.get_object_tree(reply.metadata.message_id)
        objects = {{}}
        for node in iterate_object_tree(tree):
            while not (content := object_store.get(node.object_id)):
                time.sleep(0.1)
            objects[node.object_id] = content
        if reply.metadata.message_type == "train":
            objects = broken(int(reply.metadata.group_id), objects)
        trees = {{}}
        for key, content in objects.items():
            children = [c for c in content.partition(bytes(1))[0].decode().split(" ")[1].split(",") if c]
            trees[key] = ObjectTree(object_id=key, children=[trees[child] for child in children if child in trees])
        object_store.delete(reply.metadata.message_id)
        state.delete_messages(message_ids=[reply.metadata.message_id, reply.metadata.reply_to_message_id])
        reply.metadata.__dict__["_message_id"] = root = list(objects)[-1]
        wanted, session = send(reply, trees[root], 0.1)
        try:
            for key in objects:
                if key in wanted:
                    push_object(reply.metadata.run_id, session, key, objects[key])
        except Exception as error:
            print("it wants no more:", error, flush=True)
        print("sent", reply.metadata.group_id, reply.metadata.message_type, flush=True)

supernode._push_messages = push_broken
flower_supernode()
"""


def high_water(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_a_hostile_supernode_costs_its_own_part_of_a_round_alone(tmp_path, monkeypatch):
    script = tmp_path / "hostile-supernode"
    script.write_text(HOSTILE_SUPERNODE.format(python=sys.executable))
    script.chmod(0o755)
    tool, started = processes.tool, []

    def tool_of_node_1(name: str) -> str:
        if name == "flower-supernode":
            started.append(name)
        return str(script) if name == "flower-supernode" and len(started) == 2 else tool(name)

    with monkeypatch.context() as patch:
        patch.setattr(processes, "tool", tool_of_node_1)
        with nodes_with_the_app(tmp_path / "deployment", 2) as deployment:
            run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=7, min_clients=2)
            run.until_round(3)
            executor = psutil.Process(deployment.processes["superexec"].pid)
            (app,) = [p for p in executor.children(recursive=True) if "flwr-serverapp" in " ".join(p.cmdline())]
            before = high_water(app.pid)
            run.until_round(6)
            grown = high_water(app.pid) - before
            info = run.finish()
    reasons = {row["round"]: row["failure_reasons"] for row in run.rounds}
    assert "client 1: its reply is refused: DecodeError" in reasons[1][0]
    assert reasons[2] == ["client 1: its reply is refused: it is of type RecordDict, allowed: Message"]
    assert reasons[3] == [], "the SuperLink knows whose it is"
    assert reasons[4][0].startswith("client 1: its reply is refused: it has over ")
    assert reasons[6][0].startswith("client 1: its reply is refused: its arrays have over ")
    assert [row["replies"] for row in run.rounds] == [1, 1, 2, 1, 2, 1, 2]
    assert [row["stragglers"] for row in run.rounds] == [0] * 7
    assert grown < 50e6, f"{grown / 1e6:.0f} MB"

    def absent(message, context, honest):
        if context.node_config["partition-id"] == 1 and message.content["fields"]["round"] in (1, 2, 4, 6):
            raise TimeoutError("it sends what cannot be read")
        return honest(message, context)

    assert info["final_sha256"] == in_process_sha256(run.config, tmp_path / "here", 2, wrapped_app(absent))
