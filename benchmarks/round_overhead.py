"""A simulated round against the same clients' training in bare processes: what the federation costs, and cohorts save.

Sub-FedAvg with LeNet-5 on 3x32x32 images, 10 of 100 clients a round, 500 samples a client, batch 10, 5 local epochs,
one torch thread a process. Blocks of rounds are interleaved, nothing of the other kind running meanwhile:

- training: as many plain processes as Ray has workers, each calling ``learning.train.train`` with masks for one of its
  clients after another, on tensors that are already there and on the network in its own form;
- clients: the same processes, each handing the whole messages of its clients to the ClientApp, as a cohort;
- each engine: ``fedprune run`` as users have it; ``seconds`` of rounds.jsonl, without the first two rounds.

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedprune_app.config import Config, Scalar, parse_config
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.masks import random_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator, numpy_generator
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import message_to
from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.engine.store import new_run_key
from fedprune_app.learning import training as own_form
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.models.initial import initial_model
from fedprune_app.models.vision import load_state_tensors, prunable_names, state_tensors
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import run

_WARM_UP = 2  # first rounds of a run, in which Ray's workers import and load the data
_TEST_IMAGES = 1000
_TTL_SECONDS = 3600.0


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

    def training(round: int) -> None:
        with patch.object(own_form, "MOST_FLOPS", 0):
            for partition, (images, labels) in zip(partitions, tensors, strict=True):
                load_state_tensors(model, initial)
                train(model, images, labels, sgd, rng=generator(0, "train", partition, round), masks=masks)

    from fedprune_app import client_app

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    grid = InProcessGrid(client_app.app, num_clients, config.to_dict())
    nodes = list(grid.get_node_ids())
    run_key = new_run_key()

    def clients(round: int) -> None:
        content = wire.pack(wire.to_arrays(Payload(initial)), {"round": round, "run-key": run_key})
        to = [nodes[partition] for partition in partitions]
        messages = [message_to(node, content, MessageType.TRAIN, round, _TTL_SECONDS) for node in to]
        for reply in grid.pull_messages(grid.push_messages(messages)):
            if reply.has_error():
                raise RuntimeError(reply.error.reason)

    actions: dict[str, Callable[[int], None]] = {"training": training, "clients": clients}
    pipe.send("ready")
    for round, kind in enumerate(iter(pipe.recv, "stop"), start=1):
        actions[kind](round)
        pipe.send("done")


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


def bare_round(pipes: Sequence[Connection], kind: str) -> float:
    started = time.perf_counter()
    for pipe in pipes:
        pipe.send(kind)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - started


def bare_block(pipes: Sequence[Connection], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of rounds of both kinds, which are in turn."""
    found: dict[str, list[float]] = {"training": [], "clients": []}
    for _ in range(num_rounds):
        for kind, seconds in found.items():
            seconds.append(bare_round(pipes, kind))
    return found


# --- the product --------------------------------------------------------------------------------------------------


def run_block(engine: str, config: Config, options: argparse.Namespace, console: Console) -> list[float]:
    """Seconds of the rounds of one run in a folder of its own."""
    folder = Path(config.out_dir)
    prepared = prepare(RunInputs(config.to_dict()), Placement(engine, options.clients, options.workers))
    run(prepared, folder, console)
    rows = _rows(folder / "rounds.jsonl")
    for row in rows:
        if row["replies"] != options.per_round:
            raise SystemExit(f"round {row['round']} had {row['replies']} replies: {row['failure_reasons'][:1]}")
    return [row["seconds"] for row in rows if row["round"] > _WARM_UP]


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
    bare: Sequence[Mapping[str, list[float]]], runs: Mapping[str, list[list[float]]], server: float, per_round: int
) -> tuple[list[str], Table]:
    """A line per engine, and where a round's time goes. ``bare`` blocks stand before, between and after the turns."""
    training = [seconds for block in bare for seconds in block["training"]]
    clients = statistics.median(seconds for block in bare for seconds in block["clients"])
    one = statistics.median(training)
    parts = {
        "training in bare processes, one client after another": one,
        "clients in bare processes, as cohorts": clients,
        "server: sizes, decode, check, mean": server,
    }
    lines = []
    for engine, turns in runs.items():
        rounds = [seconds for turn in turns for seconds in turn]
        whole = statistics.median(rounds)
        by_turn = [
            statistics.median(turn) / statistics.median(bare[i]["training"] + bare[i + 1]["training"])
            for i, turn in enumerate(turns)
        ]
        undisturbed = _fastest_quarter(rounds) / _fastest_quarter(training)
        lines.append(
            f"round on {engine} / training in bare processes = {whole / one:.3f} "
            f"(by turn: {', '.join(f'{ratio:.2f}' for ratio in sorted(by_turn))}; "
            f"fastest quarter of the rounds: {undisturbed:.3f})"
        )
        parts[f"round on {engine}"] = whole
    table = Table(box=box.MARKDOWN)
    table.add_column("part of a round")
    for heading in ("of bare training", "ms a round", "ms a client"):
        table.add_column(heading, justify="right")
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds / one:.3f}", f"{1e3 * seconds:.0f}", f"{1e3 * seconds / per_round:.1f}")
    return lines, table


def _fastest_quarter(seconds: Sequence[float]) -> float:
    """Its mean: what a machine that others use meanwhile tells best."""
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) // 4)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=4, help="runs of each engine")
    parser.add_argument("--engines", nargs="+", default=["ray", "flower"], choices=["ray", "flower"])
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
        bare = []
        runs: dict[str, list[list[float]]] = {engine: [] for engine in options.engines}
        with bare_processes(parse_config({**settings, "out-dir": str(folder / "bare")}), options) as pipes:
            bare_block(pipes, 1)  # warm-up
            for turn in range(options.turns):
                bare.append(bare_block(pipes, options.rounds))
                for engine, turns in runs.items():
                    out = folder / f"{engine}-{turn}"
                    turns.append(run_block(engine, parse_config({**settings, "out-dir": str(out)}), options, console))
            bare.append(bare_block(pipes, options.rounds))
        server = server_seconds(parse_config(settings), options.per_round)
    lines, table = report(bare, runs, server, options.per_round)
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
