"""A simulated round on Ray against the same clients' training in bare processes: what the federation itself costs.

Sub-FedAvg with LeNet-5 on 3x32x32 images, 10 of 100 clients a round, 500 samples a client, batch 10, 5 local epochs,
one torch thread a process. Blocks of rounds are interleaved, nothing of the other kind running meanwhile:

- training: as many plain processes as Ray has workers, each calling ``clients.training.train`` with masks for its
  share of the clients, on tensors that are already there;
- clients: the same processes, each handing whole messages to the ClientApp, without Ray or a server;
- Ray: ``fedprune run`` as users have it; ``seconds`` of rounds.jsonl, without the first two rounds.

Images are noise in CIFAR-10's binary format, unless ``--data-dir`` names real ones (of ``--dataset``).
Example: ``python benchmarks/round_overhead.py --turns 1 --rounds 3 --epochs 1``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from clients.base import data_config
from clients.training import SGD, train
from fedprune_app.config import Config, Scalar, parse_config
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.masks import random_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator, numpy_generator
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.splits import client_data
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import message_to
from fedprune_app.engine.inprocess import InProcessGrid
from fedprune_app.experiment import Placement, Session
from fedprune_app.models.initial import initial_model
from fedprune_app.models.vision import load_state_tensors, prunable_names, state_tensors
from fedprune_app.run_folder import new_run_key

_WARM_UP = 2  # first rounds of a run, in which Ray's workers import and load the data
_TEST_IMAGES = 1000
_TTL_SECONDS = 3600.0


@dataclass
class Timings:
    """Seconds: of a round as a whole, and summed over its clients."""

    rounds: list[float] = field(default_factory=list)
    in_clients: list[float] = field(default_factory=list)  # training alone, or what the client reports
    in_messages: list[float] = field(default_factory=list)  # from message to reply

    def add(self, other: Timings) -> None:
        self.rounds += other.rounds
        self.in_clients += other.in_clients
        self.in_messages += other.in_messages


# --- data and model -----------------------------------------------------------------------------------------------


def write_noise(folder: Path, num_images: int) -> None:
    """Random images of ten equally frequent labels, as files that the dataset cifar10 is read from."""
    root = folder / "cifar-10-batches-bin"
    root.mkdir(parents=True)
    (root / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n")
    rng = numpy_generator(0, "noise images")
    sizes = [len(part) for part in np.array_split(np.arange(num_images), 5)]
    files = [f"data_batch_{i}.bin" for i in range(1, 6)]
    for name, size in zip([*files, "test_batch.bin"], [*sizes, _TEST_IMAGES], strict=True):
        records = rng.integers(0, 256, (size, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] = np.arange(size) % 10
        records.tofile(root / name)


def new_model(config: Config) -> tuple[torch.nn.Module, tuple[int, int, int]]:
    dataset = load_dataset(config.dataset, config.data_dir)
    shape, classes = dataset.image_shape, dataset.num_classes
    return initial_model(config.model, config.dataset, shape, classes, init=config.init, seed=config.seed), shape


def half_masks(tensors: Mapping[str, Tensor], prunable: Sequence[str]) -> dict[str, Tensor]:
    shapes = {name: tensors[name].shape for name in prunable}
    return random_masks(shapes, dict.fromkeys(shapes, 0.5), generator(0, "masks"))


# --- bare processes -----------------------------------------------------------------------------------------------


def work(pipe: Connection, config: Config, partitions: list[int], num_clients: int) -> None:
    """A bare process: on "training" or "clients", do that for all its clients; answer with seconds for each."""
    torch.set_num_threads(config.num_threads)
    model, _ = new_model(config)
    initial = state_tensors(model, include_buffers=True)
    masks = half_masks(initial, prunable_names(model))
    data = [client_data(data_config(config), partition, num_clients) for partition in partitions]
    tensors = [(each.train_images, each.train_labels) for each in data]
    sgd = SGD(config.learning_rate, config.momentum, config.weight_decay, config.batch_size, config.local_epochs)

    def training(index: int, round: int) -> float:
        load_state_tensors(model, initial)
        started = time.perf_counter()
        train(model, *tensors[index], sgd, rng=generator(0, "train", partitions[index], round), masks=masks)
        return time.perf_counter() - started

    from fedprune_app import client_app

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    grid = InProcessGrid(client_app.app, num_clients, config.to_dict())
    nodes = list(grid.get_node_ids())
    run_key = new_run_key()

    def client(index: int, round: int) -> float:
        content = wire.pack(wire.to_arrays(Payload(initial)), {"round": round, "run-key": run_key})
        message = message_to(nodes[partitions[index]], content, MessageType.TRAIN, round, _TTL_SECONDS)
        [reply] = grid.pull_messages(grid.push_messages([message]))
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        return float(wire.number(wire.fields_of(reply.content), "seconds"))

    actions: dict[str, Callable[[int, int], float]] = {"training": training, "clients": client}
    pipe.send("ready")
    for round, kind in enumerate(iter(pipe.recv, "stop"), start=1):
        inside, whole = 0.0, 0.0
        for index in range(len(partitions)):
            started = time.perf_counter()
            inside += actions[kind](index, round)
            whole += time.perf_counter() - started
        pipe.send((inside, whole))


@contextmanager
def bare_processes(config: Config, options: argparse.Namespace) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for worker in range(options.workers):
        ours, theirs = context.Pipe()
        share = list(range(options.per_round))[worker :: options.workers]
        process = context.Process(target=work, args=(theirs, config, share, options.clients), daemon=True)
        process.start()
        theirs.close()  # so that a dead process is an EOFError here
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        yield pipes
        for pipe in pipes:
            pipe.send("stop")
    finally:
        for process in processes:
            process.join(timeout=5)
            process.terminate()


def bare_round(pipes: Sequence[Connection], kind: str, timings: Timings) -> None:
    started = time.perf_counter()
    for pipe in pipes:
        pipe.send(kind)
    answers = [pipe.recv() for pipe in pipes]
    timings.rounds.append(time.perf_counter() - started)
    timings.in_clients.append(sum(inside for inside, _ in answers))
    timings.in_messages.append(sum(whole for _, whole in answers))


def bare_block(pipes: Sequence[Connection], num_rounds: int) -> dict[str, Timings]:
    """Rounds of both kinds in turn."""
    found = {"training": Timings(), "clients": Timings()}
    for _ in range(num_rounds):
        for kind, timings in found.items():
            bare_round(pipes, kind, timings)
    return found


# --- the product --------------------------------------------------------------------------------------------------


def ray_block(config: Config, options: argparse.Namespace, console: Console) -> Timings:
    """One run in a folder of its own, on a SuperLink and Ray of its own."""
    folder = Path(config.out_dir)
    placement = Placement("ray", options.clients, options.workers)
    with Session(placement, console) as session:
        session.run(config, folder)
    found = Timings()
    in_clients: dict[int, float] = {}
    for row in _rows(folder / "clients.jsonl"):
        in_clients[row["round"]] = in_clients.get(row["round"], 0.0) + (row["seconds"] or 0.0)
    for row in _rows(folder / "rounds.jsonl"):
        if row["replies"] != options.per_round:
            raise SystemExit(f"round {row['round']} had {row['replies']} replies: {row['failure_reasons'][:1]}")
        if row["round"] > _WARM_UP:
            found.rounds.append(row["seconds"])
            found.in_clients.append(in_clients[row["round"]])
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def server_seconds(config: Config, num_replies: int, repeats: int = 5) -> float:
    """The server's own work in a round, measured apart: encode once; decode, check, add each reply; take the mean."""
    model, _ = new_model(config)
    tensors = state_tensors(model, include_buffers=True)
    prunable = frozenset(prunable_names(model))
    schema = wire.Schema.like(tensors, masked=prunable)
    reply = wire.pack(wire.to_arrays(Payload.pruned(tensors, half_masks(tensors, sorted(prunable)))), {"loss": 1.0})
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        request = wire.pack(wire.to_arrays(Payload(tensors)), {"round": 1})
        mean = MaskedMean(num_replies)
        for _ in range(num_replies):
            wire.num_bytes(request)
            wire.num_bytes(reply)
            update = wire.payload_of(reply, schema.max_bytes)
            schema.check(update)
            mean.add(update)
        mean.mean(tensors)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# --- report -------------------------------------------------------------------------------------------------------


def report(
    bare: Sequence[Mapping[str, Timings]], ray: Sequence[Timings], server: float, options: argparse.Namespace
) -> tuple[str, Table]:
    """The headline, and where a round's time goes. ``bare`` blocks stand before, between and after ``ray`` blocks."""
    training, clients, runs = Timings(), Timings(), Timings()
    for block in bare:
        training.add(block["training"])
        clients.add(block["clients"])
    for run in ray:
        runs.add(run)
    one = statistics.median(training.rounds)
    whole = statistics.median(runs.rounds)
    by_turn = [
        statistics.median(run.rounds)
        / statistics.median(bare[turn]["training"].rounds + bare[turn + 1]["training"].rounds)
        for turn, run in enumerate(ray)
    ]
    spread = ", ".join(f"{ratio:.2f}" for ratio in sorted(by_turn))
    undisturbed = _fastest_quarter(runs.rounds) / _fastest_quarter(training.rounds)
    headline = (
        f"round on Ray / training in bare processes = {whole / one:.3f} "
        f"(by turn: {spread}; fastest quarter of the rounds: {undisturbed:.3f})"
    )

    def per_worker(seconds: list[float]) -> float:
        return statistics.median(seconds) / int(options.workers)

    alone, fit = per_worker(training.in_clients), per_worker(clients.in_clients)
    message, fit_on_ray = per_worker(clients.in_messages), per_worker(runs.in_clients)
    parts = {
        "training": alone,
        "client around it: state, data, pruning, FLOPs": fit - alone,
        "message around it: client, decode, encode": message - fit,
        "the same slower beside Ray": fit_on_ray - fit,
        "server: sizes, decode, check, mean": server,
        "transport, polling, workers idle": whole - fit_on_ray - (message - fit) - server,
        "round on Ray": whole,
        "clients in bare processes, without Ray": statistics.median(clients.rounds),
        "training in bare processes": one,
    }
    table = Table(box=box.MARKDOWN)
    table.add_column("part of a round")
    for heading in ("of bare training", "ms a round", "ms a client"):
        table.add_column(heading, justify="right")
    for name, seconds in parts.items():
        in_client = 1e3 * seconds * options.workers / options.per_round
        table.add_row(name, f"{seconds / one:.3f}", f"{1e3 * seconds:.0f}", f"{in_client:.1f}")
    return headline, table


def _fastest_quarter(seconds: Sequence[float]) -> float:
    """Its mean: what a machine that others use meanwhile tells best."""
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) // 4)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=4, help="runs on Ray")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds of a turn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=10, help="clients of a round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=500, help="of a client, a tenth of them for validation")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", help="default: generated images")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="round-overhead-") as name:
        folder = Path(name)
        if not options.data_dir:
            write_noise(folder / "data", options.clients * options.samples)
        settings: dict[str, Scalar] = {
            "system": "subfedavg",
            "model": "lenet5",
            "dataset": options.dataset,
            "data-dir": str(Path(options.data_dir).resolve() if options.data_dir else folder / "data"),
            "shard-size": options.samples // 2,
            "num-server-rounds": _WARM_UP + options.rounds,
            "fraction-train": options.per_round / options.clients,
            "local-epochs": options.epochs,
            "batch-size": options.batch_size,
            "evaluate-every": 0,
            "device": "cpu",
        }
        bare, ray = [], []
        with bare_processes(parse_config({**settings, "out-dir": str(folder / "bare")}), options) as pipes:
            bare_block(pipes, 1)  # warm-up
            for turn in range(options.turns):
                bare.append(bare_block(pipes, options.rounds))
                ray.append(ray_block(parse_config({**settings, "out-dir": str(folder / f"{turn}")}), options, console))
            bare.append(bare_block(pipes, options.rounds))
        server = server_seconds(parse_config(settings), options.per_round)
    headline, table = report(bare, ray, server, options)
    console.print(headline, soft_wrap=True, highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
