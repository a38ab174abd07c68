"""Peak memory of the server in a round, over the number of clients and over the rounds: it should grow with neither.

The strategy's own round loop (messages, replies, masked mean, evaluation, checkpoint, record) runs against a stub of
Flower's Grid that makes up each reply when it is asked for, as new bytes, the way replies come off a network, and keeps
nothing of a message that it was given, as if it had left. Every measurement is a process of its own (Linux only).
"ready" is how many replies a poll finds: 1 when clients finish one by one, more when the server was busy meanwhile.

Two systems: Sub-FedAvg, whose server has a model, over the number of clients; and Dis-PFL, whose server keeps every
client's model on disk, over the rounds, once averaging the neighbours' models itself (``server``) and once passing them
on unread (``client``). There, what is on its way to clients counts too if the Grid still holds it: at most 1 GiB by
default, and ``--holding`` shows it.

Example: ``python benchmarks/server_memory.py --clients 20 200 --gossip-clients 10``. Dis-PFL's updates go to the folder
for temporary files: 7 GB for 100 clients of a ResNet-18.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from fedprune_app.config import parse_config
from fedprune_app.core.masks import erk_densities, random_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.core.torchvision_shim import prepare_torchvision
from fedprune_app.engine import wire
from fedprune_app.engine.store import State, VersionedStore, new_run_key
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.round import RunContext
from fedprune_app.models.vision import build_model, prunable_names, state_tensors
from fedprune_app.results.recorder import Recorder
from strategies.dispfl import DisPFL
from strategies.subfedavg import SubFedAvg

MODELS = ("lenet5", "resnet18")
GOSSIP = ("server", "client")
NUM_LETTERS = 5  # different ones, so that their masks differ and a union of them is dense
_NUM_EXAMPLES = 450
_TRAINED = {"loss": 1.0, "density": 0.5, "seconds": 1.0, "flops": 1e9, "num-examples": _NUM_EXAMPLES}
_EVALUATED = {"digest": "0" * 64, "density": 0.5, "accuracy-personal": 0.5, "inference-flops": 1e9}


class FabricatedReplies(Grid):
    """A Grid whose clients send one of a few updates, each time as new bytes; a poll finds ``ready`` of them.

    With ``holding`` it keeps the messages on their way, as a Grid in the server's own process does.
    """

    def __init__(self, updates: Sequence[ArrayRecord], ready: int, holding: bool = False) -> None:
        self._updates = updates
        self._ready = ready
        self._holding = holding
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
            kept = copy.copy(message)
            if not self._holding:
                kept.content = RecordDict()
            self._pending[message.metadata.message_id] = kept
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
            for name, array in self._updates[message.metadata.dst_node_id % len(self._updates)].items()
        }
        return Message(wire.pack(ArrayRecord(arrays), _TRAINED), reply_to=message)


def new_model(name: str) -> nn.Module:
    rng = generator(0, "init")
    if name != "resnet18":
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


class PeakByRound(VersionedStore):
    """Checkpoints, which are the last thing in a round: the high-water mark of each, and its processor time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.peaks: list[int] = []
        self.cpu_seconds: list[float] = []
        self._began = time.process_time()

    def save(self, round: int, state: State, accepted: int | None = None) -> None:
        super().save(round, state, accepted)
        self.peaks.append(peak_bytes())
        self.cpu_seconds.append(time.process_time() - self._began)
        self._began = time.process_time()
        forget_peak()


def roster_of(num_clients: int) -> dict[int, ImageClientInfo]:
    return {k: ImageClientInfo(k, k + 1, _NUM_EXAMPLES, None, False, (3, 32, 32), 10) for k in range(num_clients)}


def begin() -> None:
    """Make this process the server."""
    torch.set_num_threads(1)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1


def serve(name: str, density: float, num_clients: int, ready: int) -> dict[str, int]:
    """One round with all clients, in this process; bytes of the peak above the imports, and of what was exchanged."""
    begin()
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
    settings = {"num-server-rounds": 1, "fraction-train": 1.0, "min-replies": num_clients}
    config = parse_config(settings)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "run")
        recorder.start(config.to_dict(), config.seed)
        checkpoints = VersionedStore(Path(folder) / "checkpoints")
        roster, run_key = roster_of(num_clients), new_run_key()
        strategy = SubFedAvg(RunContext(config, roster, recorder, checkpoints, run_key), tensors, frozenset(prunable))
        strategy.start(FabricatedReplies([update], ready), num_rounds=1)
    return {
        "peak": peak_bytes() - before,
        "model": sum(tensor.nbytes for tensor in tensors.values()),
        "reply": sum(len(array.data) for array in update.values()),
        "decoded": decoded,
    }


def relay(
    gossip: str, name: str, density: float, num_clients: int, ready: int, num_rounds: int, holding: bool
) -> dict[str, Any]:
    """Rounds of Dis-PFL with all clients, in this process: bytes of each round's peak above the imports and above what
    the stub needs, of what comes after the last round, of peer updates on disk; and each round's processor seconds, the
    stub's included.
    """
    begin()
    module = new_model(name)
    tensors = state_tensors(module, include_buffers=True)
    prunable = prunable_names(module)
    shapes = {key: parameter.shape for key, parameter in module.named_parameters()}
    densities = erk_densities(shapes, density)
    updates = []
    for number in range(NUM_LETTERS):
        masks = random_masks({key: shapes[key] for key in prunable}, densities, generator(number, "masks"))
        updates.append(wire.to_arrays(Payload.pruned(tensors, masks)))
    del masks, module
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    forget_peak()
    before = peak_bytes() - num_bytes  # the server's own model counts
    settings = {
        "system": "dispfl",
        "num-server-rounds": num_rounds,
        "fraction-train": 1.0,
        "min-replies": num_clients,
        "evaluate-every": 0,
        "density": density,
        "dispfl.gossip": gossip,
    }
    config = parse_config(settings)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "run")
        recorder.start(config.to_dict(), config.seed)
        checkpoints = PeakByRound(Path(folder) / "checkpoints")
        roster, run_key = roster_of(num_clients), new_run_key()
        strategy = DisPFL(RunContext(config, roster, recorder, checkpoints, run_key), tensors, frozenset(prunable))
        strategy.start(FabricatedReplies(updates, ready, holding), num_rounds=num_rounds)
        letters = [path.stat().st_size for path in (recorder.folder / "peers").rglob("*.safetensors")]
    return {
        "peaks": [peak - before for peak in checkpoints.peaks],
        "finish": peak_bytes() - before,
        "cpu_seconds": checkpoints.cpu_seconds,
        "model": num_bytes,
        "letter": max(letters),
        "peers": sum(letters),
    }


SERVERS = {"serve": serve, "relay": relay}


def measure(server: str, *arguments: Any) -> dict[str, Any]:
    """:func:`serve` or :func:`relay` in a new process."""
    command = [sys.executable, __file__, "--in-process", json.dumps([server, *arguments])]
    # By default glibc keeps freed blocks of up to 32 MB or not, as it goes; what counts here is what the server holds.
    # Blocks of less than 1 MB are worked in and stay: to fault them in each time would cost more than the work.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 24)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{server} {arguments}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one_round(arguments: argparse.Namespace) -> Table:
    """Sub-FedAvg, over the number of clients."""
    title = f"Peak memory of the server in one round, density {arguments.density:g} (MB; above its imports)"
    table = new_table(
        title,
        "model",
        "ready",
        "clients",
        "model MB",
        "peak MB",
        "in models",
        "/ fewest clients",
        "all replies held MB",
        "and decoded MB",
    )
    for name in arguments.models:
        for ready in arguments.ready:
            fewest = 0
            for num_clients in sorted(arguments.clients):
                found = measure("serve", name, arguments.density, num_clients, ready)
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
    return table


def over_rounds(arguments: argparse.Namespace) -> Table:
    """Dis-PFL, over the rounds."""
    name, num_rounds = arguments.gossip_model, arguments.rounds
    table = new_table(
        f"Peak memory of Dis-PFL's server, {name}, density {arguments.density:g} (MB; above its imports)",
        "gossip",
        "ready",
        "clients",
        *(f"round {number}" for number in range(1, num_rounds + 1)),
        "after the last",
        "in models",
        "a letter MB",
        "peer updates MB",
        "CPU seconds per round",
    )
    for gossip in arguments.gossip:
        for ready in arguments.ready:
            for num_clients in arguments.gossip_clients:
                more = num_clients, ready, num_rounds, arguments.holding
                found = measure("relay", gossip, name, arguments.density, *more)
                table.add_row(
                    gossip,
                    str(ready),
                    str(num_clients),
                    *(f"{peak / 1e6:.1f}" for peak in found["peaks"]),
                    f"{found['finish'] / 1e6:.1f}",
                    f"{max(found['peaks']) / found['model']:.1f}",
                    f"{found['letter'] / 1e6:.1f}",
                    f"{found['peers'] / 1e6:.0f}",
                    ", ".join(f"{seconds:.1f}" for seconds in found["cpu_seconds"]),
                )
    return table


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.MARKDOWN)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 20, 200])
    parser.add_argument("--ready", type=int, nargs="+", default=[1, 32], help="replies that a poll finds")
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument(
        "--gossip", nargs="*", default=list(GOSSIP), choices=GOSSIP, help="Dis-PFL; nothing leaves it out"
    )
    parser.add_argument("--gossip-model", default="resnet18-gn")
    parser.add_argument("--gossip-clients", type=int, nargs="+", default=[20])
    parser.add_argument("--rounds", type=int, default=3, help="of Dis-PFL")
    parser.add_argument(
        "--holding", action="store_true", help="the Grid keeps Dis-PFL's messages until they are answered"
    )
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        server, *given = json.loads(arguments.in_process)
        print(json.dumps(SERVERS[server](*given)))
        return
    console = Console(width=160)
    if arguments.models:
        console.print(one_round(arguments))
    if arguments.gossip:
        console.print(over_rounds(arguments))


if __name__ == "__main__":
    main()
