"""What a GPU is worth: does it compute the same, how fast is it, and where does the time of a run go?

    python benchmarks/gpu.py --out DIR [--data-dir CIFAR10] [--seconds 480]
    python benchmarks/gpu.py --out DIR --device cpu --tiny      # every part in a moment, to see that it works

DIR/results.json gets a row for each result as soon as it is there, so a run that is cut off loses nothing; rows of an
earlier run in DIR stay. The parts have shares of the seconds, in order of worth. A part that fails says so in a row.
Ratios are to a bare PyTorch loop on the same GPU, one client after the other, in the same precision.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from _gpu import ROOT, Bench, Busy, Part
from _gpu_checks import correct, tests
from _turns import SHAPES, Steps, compute_in
from cohort_step import cohort
from dp_step import noise_kinds, step_kinds
from llm_layer import bare_loop as bare_layer
from llm_layer import default_dtype, random_layer, whole_layer
from local_step import bare_loop
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.codec import pack, unpack
from fedprune_app.core.flops import forward_flops
from fedprune_app.core.graphs import CudaGraphs
from fedprune_app.core.masks import erk_densities, prune_and_grow, random_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.engine.store import write_tensors
from fedprune_app.learning.device import computing
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.models.layer_pruning import Pruner, prune_layer
from fedprune_app.models.vision import architecture, prunable_names, state_tensors

BATCHES = {"lenet5": 10, "resnet18-gn": 128, "cnn-gn": 32, "cnn5": 10}
PRECISIONS = ("float32", "tf32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", default="", help="CIFAR-10 for the federation; without it there are digits")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--workers", type=int, default=0, help="Ray's processes in the federation; 0: without Ray")
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES), help="whose steps are measured")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="of the steps")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS][:-1], help="by default all but the last")
    parser.add_argument("--tiny", action="store_true", help="the smallest of everything")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, allowed on this machine: cpu, with --tiny")
    Bench(options).run({name: PARTS[name] for name in options.parts})


# --- what the machine can do ---------------------------------------------------------------------------------------


def facts(bench: Bench) -> None:
    bench.measure("machine", partial(machine, bench))
    size = 64 if bench.tiny else 8192
    for precision in PRECISIONS:
        bench.measure(f"matrix product, {precision}", partial(matrix_product, bench, size, precision))
    bench.compute_in("float32")
    bench.measure("moves", partial(moves, bench, size))
    small = bench.randn(8)
    repeated = {
        "add": lambda: [small.add_(1) for _ in range(1000)],
        "item": lambda: [small[0].item() for _ in range(1000)],
    }
    bench.measure("a thousand operations", lambda: bench.milliseconds(**repeated))


def machine(bench: Bench) -> Mapping[str, Any]:
    found: dict[str, Any] = {"python": sys.version.split()[0], "cpus": os.cpu_count(), "threads": bench.threads}
    for name in ("torch", "numpy", "flwr", "opacus", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if bench.on_gpu:
        card = torch.cuda.get_device_properties(0)
        found |= {"device": card.name, "gb": card.total_memory / 1e9, "multiprocessors": card.multi_processor_count}
    return found


def matrix_product(bench: Bench, size: int, precision: str) -> Mapping[str, Any]:
    bench.compute_in(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = bench.randn(size, size, dtype=dtype), bench.randn(size, size, dtype=dtype)
    return {"tflops": 2 * size**3 / bench.seconds(lambda: a @ b, 0.5) / 1e12}


def moves(bench: Bench, size: int) -> Mapping[str, Any]:
    here, there = torch.randn(size * size), bench.randn(size * size)  # several times what a cache holds
    ways: dict[str, Callable[[], object]] = {
        "on_device_read_and_written": there.clone,
        "to_device": lambda: here.to(bench.device),
        "to_host": there.cpu,
    }
    if bench.on_gpu:
        pinned = here.pin_memory()
        ways["to_device_pinned"] = lambda: pinned.to(bench.device, non_blocking=True)
    return {
        f"gb_per_s_{name}": here.nbytes * (1 + name.startswith("on")) / bench.seconds(way) / 1e9
        for name, way in ways.items()
    }


# --- steps of clients -------------------------------------------------------------------------------------------------


def speed(bench: Bench) -> None:
    """Measure a client's step by network, cohort, precision, and with a graph or without."""
    for precision in PRECISIONS[:1] if bench.tiny else bench.options.precisions:
        for model in ("lenet5",) if bench.tiny else bench.options.models:
            bench.compute_in(precision)
            speed_of(bench, model, precision)
    eight = bench.per_step("lenet5", BATCHES["lenet5"], partial(cohort, size=8), "cpu")["us_per_step"] / 8
    bench.row("lenet5, float32, cohort of 8, on the CPU", us_per_step=eight)


def speed_of(bench: Bench, model: str, precision: str) -> None:
    batch, base = 2 if bench.tiny else BATCHES[model], 0.0
    flops = 3 * batch * sum(forward_flops(architecture(model, SHAPES[model], 10), SHAPES[model]).values())

    def of(what: str, prepare: Callable[[Steps], Callable[[], object]], clients: int = 1) -> float:
        def measured() -> Mapping[str, Any]:
            found = bench.per_step(model, batch, prepare)
            step = found["us_per_step"] / clients
            told = {"us_per_client_step": step, "times_bare": (base or step) / step, "tflops": flops / step / 1e6}
            told |= {"spread": found["spread"], "ms_per_training": found["ms_per_training"] / clients}
            return told | ({"gb": torch.cuda.max_memory_allocated() / 1e9} if bench.on_gpu else {})

        return float(bench.measure(f"{model}, {precision}, {what}", measured).get("us_per_client_step", 0.0))

    base = of("bare loop", partial(bare, precision=precision))
    large = model == "resnet18-gn"
    if large:
        of("bare loop, channels last", partial(bare, precision=precision, layout=torch.channels_last))
    if bench.on_gpu:
        of("bare loop in a graph", partial(bare_in_graph, precision=precision))
    for graph in (True, False) if bench.on_gpu else (False,):
        how = {"precision": precision, "recorder": bench.recorder(graph)}
        of(f"its own form{' in a graph' * graph}", partial(cohort, size=0, **how))
        # a large network gains nothing in company: eight of ResNet-18 take longer than one after the other
        for size in () if large or precision == "bf16" else (1, 2) if bench.tiny else (32, 8, 128) if graph else (32,):
            of(f"cohort of {size}{' in a graph' * graph}", partial(cohort, size=size, **how), size)


def bare(steps: Steps, precision: str, layout: torch.memory_format = torch.contiguous_format) -> Callable[[], object]:
    model = steps.new_model().to(memory_format=layout)  # type: ignore[call-overload]
    images = steps.images.to(memory_format=layout)
    return partial(bare_loop, model, images, steps.labels, steps.sgd, precision=precision)


def bare_in_graph(steps: Steps, precision: str) -> Callable[[], object]:
    """Return the bare loop of a user who records the step as a CUDA graph."""
    model, size = steps.new_model().train(), steps.sgd.batch_size
    images, labels = steps.images[:size].clone(), steps.labels[:size].clone()
    optimizer = torch.optim.SGD(model.parameters(), steps.sgd.learning_rate, momentum=steps.sgd.momentum)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with computing(steps.device, precision):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    graphs = CudaGraphs(steps.device)
    for _ in range(3):
        graphs.warm_up(step)
    repeat = graphs.record(step)

    def run() -> None:
        for start in range(0, steps.count, size):
            images.copy_(steps.images[start : start + size])
            labels.copy_(steps.labels[start : start + size])
            repeat()

    return run


# --- a run ------------------------------------------------------------------------------------------------------------


def federation(bench: Bench) -> None:
    """Run Dis-PFL for as long as there is time, and look where it goes: with Ray in the server's process."""
    with tempfile.TemporaryDirectory() as place:
        bench.measure(f"Dis-PFL, {bench.options.workers} workers", partial(run_of_clients, bench, Path(place) / "run"))


def run_of_clients(bench: Bench, folder: Path) -> Mapping[str, Any]:
    settings = ["dataset=digits", "model=cnn-small", "num-server-rounds=1", "local-epochs=1"]
    clients, watched = 2, bench.out / "watched.json"
    if bench.data_dir:
        settings = ["dataset=cifar10", f"data-dir={bench.data_dir}", "samples-per-client=250", "model=resnet18-gn"]
        settings += ["num-server-rounds=500", "evaluate-every=10", "precision=tf32"]
        clients = 40
    run = ["run", "-c", "dispfl", "--clients", str(clients), "--out", str(folder)]
    run += ["--workers", str(bench.options.workers)] if bench.options.workers else ["--engine", "inprocess"]
    settings += [f"device={bench.device}", f"num-threads={bench.threads}"]
    command = [sys.executable, str(Path(__file__).with_name("_watched.py")), str(watched), *run, *settings]
    with Busy(bench) as busy:
        _in_time(bench, {"run": command})
    rounds, answers = (lines_of(folder / name) for name in ("rounds.jsonl", "clients.jsonl"))
    seconds = [each["seconds"] for each in rounds]
    if not rounds:
        bench.row("no round came to its end", log=(bench.out / "run.log").read_text()[-500:])
    if watched.exists():
        told = json.loads(watched.read_text())
        for number, found in told.pop("rounds").items():  # with Ray the clients' processes are not among them
            bench.row(f"CPU seconds below each function, round {number}" if int(number) else "the start", **found)
        bench.row("CPU seconds below each function", **told)
    own = [each["seconds"] for each in answers if each.get("seconds")]
    return {
        "clients": clients,
        "seconds_by_round": seconds,
        "failures": sum(each["failures"] for each in rounds),
        "seconds_per_client": sum(seconds) / max(1, len(own)),
        "of_them_in_its_answer": statistics.mean(own) if own else None,
        "gpu_busy": busy.share,
    }


def _in_time(bench: Bench, commands: Mapping[str, list[str]]) -> None:
    """Let processes, whose words go to files of their names, run beside each other for as long as the part may."""
    processes = []
    for name, command in commands.items():
        with (bench.out / f"{name}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    for what, seconds in ((signal.SIGINT, bench.left - 5), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + max(5.0, seconds)
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(what)
    for process in processes:
        process.wait()


def accuracy(bench: Bench) -> None:
    """Run Dis-PFL and what its Table 1 compares with beside each other, at the paper's network and data of a client."""
    settings = ["dataset=digits", "model=cnn-small", "num-server-rounds=1", "local-epochs=1", "evaluate-every=1"]
    if bench.data_dir:
        settings = ["dataset=cifar10", f"data-dir={bench.data_dir}", "samples-per-client=500", "model=resnet18-gn"]
        settings += ["partition=dirichlet-client", "dirichlet-alpha=0.3", "test-split=proportional", "test-samples=100"]
        settings += ["augmentation=crop-flip", "batch-size=128", "learning-rate=0.1", "lr-decay=0.99", "momentum=0.0"]
        settings += ["weight-decay=5e-4", "max-grad-norm=10", "validation-fraction=0", "fraction-train=1.0"]
        settings += ["local-epochs=5", "num-server-rounds=500", "evaluate-every=4", "precision=tf32"]
    systems = {
        "dispfl": ["dispfl.neighbours=5", "density=0.5", "dispfl.growth=random", "dispfl.annealing-rounds=40"],
        "dpsgd-ft": ["dpsgd.neighbours=5"],
        "fedavg-ft": [],
        "standalone": [],
    }
    with tempfile.TemporaryDirectory() as place, Busy(bench) as busy:
        commands = {}
        for name, own in systems.items():
            run = [sys.executable, "-m", "fedprune_app.cli", "run", "-c", name, "--engine", "inprocess"]
            run += ["--clients", "20" if bench.data_dir else "2", "--out", str(Path(place) / name)]
            commands[name] = [*run, *settings, *own, f"device={bench.device}", f"num-threads={bench.threads // 2 or 1}"]
        _in_time(bench, commands)
        for name in systems:
            rounds = lines_of(Path(place) / name / "rounds.jsonl")
            by_round = {row["round"]: row["accuracy_personal_mean"] for row in rounds}
            values = {round: accuracy for round, accuracy in by_round.items() if accuracy is not None}
            seconds = statistics.median([row["seconds"] for row in rounds]) if rounds else None
            bench.row(name, rounds=len(rounds), seconds_per_round=seconds, accuracy_personal=values)
    bench.row("the card meanwhile", gpu_busy=busy.share)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# --- private steps ----------------------------------------------------------------------------------------------------


def private(bench: Bench) -> None:
    """Measure a step of DP-SGD, by how its sums are made, against Opacus' own loop; and noise alone."""
    size = 10_000 if bench.tiny else 11_173_962  # coordinates of ResNet-18
    for name, prepare in noise_kinds(size, bench.device).items():
        bench.measure(f"noise: {name.strip()}", lambda prepare=prepare: bench.milliseconds(once=prepare()))
    kinds = ("no privacy", "Opacus' own loop", "one-pass", "hooks")
    for model in ("lenet5",) if bench.tiny else ("resnet18-gn", "lenet5", "cnn-gn"):
        for kind in kinds[:3] if bench.tiny else kinds:
            prepare = partial(step_of_kind, kind=kind)
            step = partial(bench.per_step, model, 4 if bench.tiny else 64, prepare, few=2)
            bench.measure(f"{model}, {kind}", step)


def step_of_kind(steps: Steps, kind: str) -> Callable[[], object]:
    return step_kinds(steps)[kind]()


# --- a layer of a language model --------------------------------------------------------------------------------------


def layer(bench: Bench) -> None:
    """Measure what four clients and their server do with a layer of LLaMA-2-7b's shape, part by part."""
    shape, clients, segments, length = ("tiny", 2, 2, 16) if bench.tiny else ("llama-2-7b", 4, 32, 2048)
    model, tensors = random_layer(shape, default_dtype(bench.device), bench.device)
    width = model.config.hidden_size
    texts = [bench.randn(segments, length, width, dtype=model.dtype) for _ in range(clients)]
    parts: Counter[str] = Counter()

    def timed(part: str, do: Callable[[], Any]) -> Any:
        start = bench.clock()
        done = do()
        parts[part] += bench.clock() - start
        bench.row(f"so far, after {part}", **parts)
        return done

    def all_clients() -> Mapping[str, Any]:
        with Busy(bench) as busy:
            pruner = Pruner(density=0.5, recorder=bench.recorder())
            reply = whole_layer(model, tensors, texts, pruner, 8, timed)
        gb = torch.cuda.max_memory_allocated() / 1e9 if bench.on_gpu else None
        return {"seconds": sum(parts.values()), "gpu_busy": busy.share, "mb_of_a_reply": reply / 1e6, "gb": gb}

    def pruned(recorded: bool, batch_size: int) -> Mapping[str, Any]:
        one, how = model.layer(0, tensors), Pruner(density=0.5, recorder=bench.recorder(recorded))
        start = bench.clock()
        prune_layer(model, 0, one, texts[0], how, batch_size)
        return {"seconds": bench.clock() - start}

    def by_the_bare_loop() -> Mapping[str, Any]:
        one = model.layer(0, {name: tensor.clone() for name, tensor in tensors.items()})
        start = bench.clock()
        bare_layer(model, one, texts[0])
        return {"seconds": bench.clock() - start}

    bench.measure(f"{clients} clients", all_clients)
    bench.measure("one client pruned, by a bare loop", by_the_bare_loop)
    for recorded, batch_size in ((True, 8), (False, 8), (True, 1)):
        name = f"one client pruned, {'graphs' if recorded else 'no graphs'}, {batch_size} segments at once"
        bench.measure(name, partial(pruned, recorded, batch_size))


# --- what surrounds the training of a client --------------------------------------------------------------------------


def host(bench: Bench) -> None:
    """Measure what a client and the server of Dis-PFL do beside training, on the CPU and on the device."""
    steps = Steps("lenet5" if bench.tiny else "resnet18-gn", 2, 1)
    network = steps.new_model()
    tensors = state_tensors(network)
    shapes = {name: p.shape for name, p in network.named_parameters()}
    masks = random_masks(
        {n: shapes[n] for n in prunable_names(network)}, erk_densities(shapes, 0.5), generator(0, "masks")
    )
    gradients = {name: torch.randn_like(tensors[name]) for name in masks}
    payload = Payload.pruned(tensors, masks)
    sent = pack(payload)
    state = {f"weights/{n}": t for n, t in tensors.items()} | {f"masks/{n}": t for n, t in masks.items()}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        client = {
            "encode": partial(pack, payload),
            "decode": partial(unpack, sent, 2**31),
            "digest": payload.digest,
            "write_state": partial(write_tensors, Path(folder) / "state.safetensors", state, durable=False),
            "encode_eight_on_eight_threads": lambda: list(pool.map(pack, [payload] * 8)),
            "decode_eight_on_eight_threads": lambda: list(pool.map(lambda _: unpack(sent, 2**31), range(8))),
        }
        for name, do in client.items():
            bench.measure(f"a client: {name}", lambda name=name, do=do: bench.milliseconds(**{name: do}))
    for device in dict.fromkeys(("cpu", bench.device)):
        there = [{n: t.to(device) for n, t in each.items()} for each in (tensors, gradients, masks)]
        weights = {name: there[0][name] for name in masks}
        search = partial(prune_and_grow, weights, *there[1:], 0.3)
        bench.measure(f"prune and grow, {device}", lambda search=search: bench.milliseconds(once=search))
        mean = partial(mean_of, 11, Payload.pruned(there[0], there[2]))
        bench.measure(f"mean of 11 neighbours, {device}", lambda mean=mean: bench.milliseconds(once=mean))
    network.to(bench.device)
    images = bench.randn(100, *steps.shape), torch.zeros(100, dtype=torch.int64)
    bench.measure(
        "evaluation of 100 images",
        lambda: bench.milliseconds(once=lambda: evaluate(network, *images, device=bench.device)),
    )
    parameters, flat = list(network.parameters()), torch.cat([p.detach().flatten() for p in network.parameters()])
    each_or_all = {
        "finite_each": lambda: all(bool(p.isfinite().all()) for p in parameters),
        "finite_once": lambda: bool(flat.isfinite().all()),
        "to_host_each": lambda: [p.detach().cpu() for p in parameters],
        "to_host_once": flat.cpu,
    }
    bench.measure("asked and moved one by one, or at once", lambda: bench.milliseconds(**each_or_all))
    bench.measure("examples of 64 clients, one by one or at once", partial(gathered, bench))
    for size in (1_000,) if bench.tiny else (524_288, 1_409_024):  # blocks of SparseGPT in LLaMA-2-7b
        bench.measure(f"k-th smallest of {size}", partial(kth_smallest, bench, size))


def mean_of(count: int, payload: Payload) -> object:
    mean = MaskedMean(count)
    mean.add_all([payload] * count)
    return mean.mixed()


def gathered(bench: Bench) -> Mapping[str, Any]:
    """Compare two operations per client with two for all."""
    clients, batch, size = 64, 10, 50 if bench.tiny else 500
    images, labels = (
        bench.randn(clients, size, 3, 32, 32),
        torch.zeros(clients, size, dtype=torch.int64).to(bench.device),
    )
    order = torch.arange(clients * batch).view(clients, batch).to(bench.device) % size
    places = bench.randn(clients, batch, 3, 32, 32), torch.zeros_like(labels[:, :batch])
    flat = (order + size * torch.arange(clients, device=bench.device).unsqueeze(1)).flatten()

    def each() -> None:
        for k in range(clients):
            torch.index_select(images[k], 0, order[k], out=places[0][k])
            torch.index_select(labels[k], 0, order[k], out=places[1][k])

    def once() -> None:
        torch.index_select(images.flatten(0, 1), 0, flat, out=places[0].flatten(0, 1))
        torch.index_select(labels.flatten(), 0, flat, out=places[1].flatten())

    return bench.milliseconds(each=each, once=once)


def kth_smallest(bench: Bench, size: int) -> Mapping[str, Any]:
    scores, k = torch.rand(size, device=bench.device), size // 2
    return bench.milliseconds(
        kthvalue=lambda: scores.kthvalue(k),
        sort=lambda: scores.sort().values[k - 1],
        topk=lambda: scores.topk(k, largest=False, sorted=False).values.max(),
    )


# --- several processes, forms of convolutions, numbers of launches ----------------------------------------------------


def share(bench: Bench) -> None:
    """Measure what several processes on one GPU do together."""
    for count in (1,) if bench.tiny else (1, 4, 8):
        bench.measure(f"{count} processes, ResNet-18, tf32", partial(processes, bench, count))


def processes(bench: Bench, count: int) -> Mapping[str, Any]:
    begin = time.time() + (1 if bench.tiny else 10 + count / 2)
    way = "spawn" if bench.on_gpu else "fork"  # CUDA does not survive a fork
    with ProcessPoolExecutor(count, multiprocessing.get_context(way)) as pool:
        rates, late = zip(*pool.map(partial(rate, bench.device, bench.tiny), [begin] * count), strict=True)
    return {"steps_per_s": sum(rates), "slowest": min(rates), "seconds_late": max(late)}


def rate(device: str, tiny: bool, begin: float) -> tuple[float, float]:
    """Return the steps per second of this process in a few seconds from ``begin`` on, and how late it began."""
    compute_in("tf32", device, 1)
    steps = Steps("lenet5" if tiny else "resnet18-gn", 4 if tiny else 128, 4, device)
    loop = bare(steps, "tf32")
    loop()
    time.sleep(max(0.0, begin - time.time()))
    late = time.time() - begin
    done, start = 0, time.monotonic()
    while time.monotonic() - start < (0.1 if tiny else 3):
        loop()
        if device == "cuda":
            torch.cuda.synchronize()
        done += steps.steps
    return done / (time.monotonic() - start), late


def convolutions(bench: Bench) -> None:
    """Measure the forms that a convolution of many clients can have, forward and backward."""
    layers = {  # channels in and out, kernel, side, batch, clients
        "lenet5, second": (6, 16, 5, 14, 10, 64),
        "cnn-gn, second": (16, 32, 3, 16, 32, 64),
        "resnet18, first": (64, 64, 3, 32, 128, 8),
    }
    for name, how in layers.items() if not bench.tiny else [("tiny", (2, 2, 3, 6, 4, 2))]:
        for precision in PRECISIONS[:1] if bench.tiny else PRECISIONS:
            bench.compute_in(precision)
            bench.measure(f"{name}, {precision}", partial(convolution, bench, precision, *how))


def convolution(
    bench: Bench, precision: str, inputs: int, outputs: int, kernel: int, side: int, batch: int, clients: int
) -> Mapping[str, Any]:
    make = partial(bench.randn, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    x, w = make(clients, batch, inputs, side, side), make(clients, outputs, inputs, kernel, kernel)

    def grouped(halves: int, layout: torch.memory_format) -> Callable[[], object]:
        groups = clients * halves
        images = make(batch // halves, groups * inputs, side, side).to(memory_format=layout)
        weights = make(groups * outputs, inputs, kernel, kernel).to(memory_format=layout)
        return step(partial(F.conv2d, groups=groups), images, weights)

    def step(form: Callable[[Tensor, Tensor], Tensor], *given: Tensor) -> Callable[[], object]:
        images, weights = (each.detach().requires_grad_() for each in given)
        gradient = torch.ones_like(form(images, weights))
        return lambda: torch.autograd.grad(form(images, weights), (images, weights), gradient)

    def unfolded(images: Tensor, weights: Tensor) -> Tensor:
        columns = F.unfold(images.flatten(0, 1), kernel)  # (clients · B, C · k², L)
        columns = columns.view(clients, batch, *columns.shape[1:]).transpose(1, 2).flatten(2)
        return torch.bmm(weights.flatten(2), columns)

    return bench.milliseconds(
        one_by_one=step(lambda images, weights: torch.stack(list(map(F.conv2d, images, weights))), x, w),
        grouped=grouped(1, torch.contiguous_format),
        grouped_halves=grouped(2, torch.contiguous_format),
        grouped_channels_last=grouped(1, torch.channels_last),
        unfold_and_bmm=step(unfolded, x, w),
    )


def launches(bench: Bench) -> None:
    """Count what a step starts; last, since the profiler that counts may slow down what follows."""
    sizes = {"lenet5": (1, 2) if bench.tiny else (1, 32, 128)} | ({} if bench.tiny else {"resnet18-gn": (0, 1)})
    for model, cohorts in sizes.items():
        for size in cohorts:
            for graph in (False, True) if bench.on_gpu and size else (False,):
                name = f"{model}, cohort of {size}" if size else f"{model}, its own form"
                bench.measure(name + ", graph" * graph, partial(counted, bench, model, size, graph))


def counted(bench: Bench, model: str, size: int, graph: bool) -> Mapping[str, Any]:
    """Return what so many more steps add to the counts of a training, per step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * bench.on_gpu
    found: list[Counter[str]] = []
    few, many = 5, 10
    for steps in (few, few, many):  # the first warms up
        noise = Steps(model, 4 if bench.tiny else BATCHES[model], steps, bench.device)
        run = cohort(noise, size, recorder=bench.recorder(graph))
        with profile(activities=activities) as watched:
            start = bench.clock()
            run()
            seconds = bench.clock() - start
        counts = Counter({"ms": 1e3 * seconds})
        for event in watched.key_averages():
            if event.device_type == DeviceType.CUDA:
                counts["ms_of_kernels"] += event.self_device_time_total / 1e3
            for name, starts in COUNTED.items():
                counts[name] += event.count * event.key.startswith(starts)
        found.append(counts)
    names = ("ms", "ms_of_kernels", *COUNTED)
    return {f"{name}_per_step": (found[2][name] - found[1][name]) / (many - few) for name in names}


COUNTED = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel"),
    "graphs": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpy",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


PARTS: dict[str, tuple[Part, float]] = {  # and the share of each
    "facts": (facts, 15),
    "correct": (correct, 60),
    "tests": (tests, 60),
    "speed": (speed, 110),
    "federation": (federation, 150),
    "private": (private, 25),
    "layer": (layer, 40),
    "host": (host, 20),
    "share": (share, 45),
    "convolutions": (convolutions, 10),
    "launches": (launches, 15),
    "accuracy": (accuracy, 400),
}


if __name__ == "__main__":
    main()
