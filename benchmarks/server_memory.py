"""Peak memory of the server in a round, over the number of clients: it should not grow with them.

The strategy's own round loop (messages, replies, masked mean, evaluation, checkpoint, record) runs against a stub of
Flower's Grid that makes up each reply when it is asked for, as new bytes, the way replies come off a network. Every
number of clients is a process of its own (Linux only). "ready" is how many replies a poll finds: 1 when clients finish
one by one, more when the server was busy meanwhile.

Example: ``python benchmarks/server_memory.py --clients 20 200``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Message, MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from fedprune_app.config import parse_config
from fedprune_app.core.masks import random_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.core.torchvision_shim import prepare_torchvision
from fedprune_app.engine import wire
from fedprune_app.engine.rounds import Peer
from fedprune_app.engine.store import VersionedStore
from fedprune_app.models.vision import build_model, prunable_names, state_tensors
from fedprune_app.results.recorder import Recorder
from fedprune_app.run_folder import new_run_key
from strategies.subfedavg import SubFedAvg

MODELS = ("lenet5", "resnet18")
_NUM_EXAMPLES = 450
_TRAINED = {"loss": 1.0, "density": 0.5, "seconds": 1.0, "flops": 1e9, "num-examples": _NUM_EXAMPLES}
_EVALUATED = {"digest": "0" * 64, "density": 0.5, "accuracy-personal": 0.5}


class FabricatedReplies(Grid):
    """A Grid whose clients all send the same update, each time as new bytes; a poll finds ``ready`` of them."""

    def __init__(self, update: ArrayRecord, ready: int) -> None:
        self._update = update
        self._ready = ready
        self._pending: dict[str, Message] = {}
        self._num_pushed = 0

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *arguments: Any, **more: Any) -> Message:
        return Message(*arguments, **more)

    def get_node_ids(self) -> Iterable[int]:
        """Nobody asks: the roster is given."""
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        accepted = []
        for message in messages:
            self._num_pushed += 1
            message.metadata.__dict__["_message_id"] = str(self._num_pushed)
            self._pending[message.metadata.message_id] = message
            accepted.append(message.metadata.message_id)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """A list, as Flower's Grids return."""
        due = [message_id for message_id in message_ids if message_id in self._pending][: self._ready]
        return [self._reply(self._pending.pop(message_id)) for message_id in due]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        if message.metadata.message_type == MessageType.EVALUATE:
            return Message(wire.pack(None, _EVALUATED), reply_to=message)
        arrays = {
            name: Array(array.dtype, array.shape, array.stype, bytes(bytearray(array.data)))
            for name, array in self._update.items()
        }
        return Message(wire.pack(ArrayRecord(arrays), _TRAINED), reply_to=message)


def new_model(name: str) -> nn.Module:
    rng = generator(0, "init")
    if name == "lenet5":
        return build_model(name, (3, 32, 32), 10, rng=rng)
    prepare_torchvision()
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=10)  # 11.2 M parameters
    return model


def forget_peak() -> None:
    """Let this process's high-water mark start again from what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The high-water mark of this process alone; getrusage's also counts the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def serve(name: str, density: float, num_clients: int, ready: int) -> dict[str, int]:
    """One round with all clients, in this process; bytes of the peak above the imports, and of what was exchanged."""
    torch.set_num_threads(1)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    module = new_model(name)
    forget_peak()
    before = peak_bytes()
    tensors = state_tensors(module, include_buffers=True)
    prunable = prunable_names(module)
    shapes = {key: tensors[key].shape for key in prunable}
    masks = random_masks(shapes, dict.fromkeys(shapes, density), generator(0, "masks"))
    reply = Payload.pruned(tensors, masks)
    update = wire.to_arrays(reply)
    decoded = sum(t.nbytes for t in (*reply.tensors.values(), *reply.masks.values()))
    del reply, masks, module
    roster = {p: Peer(p, p + 1, _NUM_EXAMPLES, (3, 32, 32), 10) for p in range(num_clients)}
    settings = {"num-server-rounds": 1, "fraction-train": 1.0, "min-replies": num_clients}
    config = parse_config(settings)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "run")
        recorder.start(config.to_dict(), config.seed)
        checkpoints = VersionedStore(Path(folder) / "checkpoints")
        strategy = SubFedAvg(config, tensors, frozenset(prunable), roster, recorder, checkpoints, new_run_key())
        strategy.start(FabricatedReplies(update, ready), ArrayRecord(), num_rounds=1)
    return {
        "peak": peak_bytes() - before,
        "model": sum(tensor.nbytes for tensor in tensors.values()),
        "reply": sum(len(array.data) for array in update.values()),
        "decoded": decoded,
    }


def measure(name: str, density: float, num_clients: int, ready: int) -> dict[str, int]:
    """:func:`serve` in a new process."""
    arguments = [name, density, num_clients, ready]
    command = [sys.executable, __file__, "--serve", json.dumps(arguments)]
    # By default glibc keeps freed blocks of up to 32 MB or not, as it goes; what counts here is what the server holds.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}, {num_clients} clients: {done.stderr}")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 20, 200])
    parser.add_argument("--ready", type=int, nargs="+", default=[1, 32], help="replies that a poll finds")
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        print(json.dumps(serve(*json.loads(arguments.serve))))
        return

    title = f"Peak memory of the server in one round, density {arguments.density:g} (MB; above its imports)"
    table = Table(title=title, box=box.MARKDOWN)
    for heading in (
        "model",
        "ready",
        "clients",
        "model MB",
        "peak MB",
        "in models",
        "/ fewest clients",
        "all replies held MB",
        "and decoded MB",
    ):
        table.add_column(heading, justify="right")
    for name in arguments.models:
        for ready in arguments.ready:
            fewest = 0
            for num_clients in sorted(arguments.clients):
                found = measure(name, arguments.density, num_clients, ready)
                fewest = fewest or found["peak"]
                table.add_row(
                    name,
                    str(ready),
                    str(num_clients),
                    f"{found['model'] / 1e6:.2f}",
                    f"{found['peak'] / 1e6:.1f}",
                    f"{found['peak'] / found['model']:.1f}",
                    f"{found['peak'] / fewest:.3f}",
                    f"{found['reply'] * num_clients / 1e6:.1f}",
                    f"{found['decoded'] * num_clients / 1e6:.1f}",
                )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
