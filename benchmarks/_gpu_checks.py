"""Does a GPU compute what a CPU computes? Every check has a slow or a float64 computation beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _gpu import ROOT, Bench, equal, error_of
from _turns import SHAPES
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.cohort import run_cohort
from fedprune_app.core.graphs import CudaGraphs
from fedprune_app.core.masks import prune_and_grow, random_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.core.sparsegpt import Hessian, sparsegpt
from fedprune_app.learning import training
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.models.vision import build_model, prunable_names
from fedprune_app.privacy.clipped_sums import METHODS
from fedprune_app.privacy.dpsgd import DPSGD
from fedprune_app.privacy.noise import KeyedNoise

BATCHES = {"lenet5": 10, "cnn-gn": 32, "resnet18-gn": 128}


def correct(bench: Bench) -> None:
    models = ["lenet5"] if bench.tiny else list(BATCHES)
    for model in models:
        exact = Trained(bench, model, device="cpu", double=True).weights()
        for precision in ("float32",) if bench.tiny else ("float32", "tf32", "bf16"):
            bench.measure(f"{model}, {precision}, against float64", partial(against, bench, model, precision, exact))
    for model in models:
        bench.measure(f"private sums of {model}, against float64", partial(private_sums, bench, model))
    bench.measure("SparseGPT against the CPU", partial(sparsegpt_masks, bench))
    bench.measure("masks and means against the CPU", partial(masks_and_means, bench))
    for model in models:
        for deterministic in (True,) if bench.tiny else (True, False):
            bench.measure(f"{model}, deterministic={deterministic}, again", partial(again, bench, model, deterministic))


class Trained:
    """Three clients of different sizes, with masks and all settings that a step has, trained together or alone."""

    def __init__(
        self,
        bench: Bench,
        model: str,
        device: str = "",
        precision: str = "float32",
        *,
        double: bool = False,
        most: int = 16,  # examples in a batch
    ) -> None:
        self.model, self.precision, self.double = model, precision, double
        self.device = device or bench.device
        self.batch = 4 if bench.tiny else min(most, BATCHES[model])
        self.sizes = [3 * self.batch, 2 * self.batch + 3, self.batch + 1]

    def weights(self, cohort: bool = False, clients: int = 3, recorder: CudaGraphs | None = None) -> list[Tensor]:
        """Return each client's weights as one tensor; without ``cohort`` each trains in the network's own form."""
        works = [partial(self._train, number, recorder) for number in range(clients)]
        most = 1 << 62 if cohort else 0
        with patch.object(training, "MOST_FLOPS", most), patch.object(training, "MOST_PARAMETERS", most):
            found = dict(run_cohort(works))
        return [found[number] for number in range(clients)]

    def _train(self, number: int, recorder: CudaGraphs | None) -> Tensor:
        shape, draw = SHAPES[self.model], generator(0, "data", number)
        network = build_model(self.model, shape, 10, rng=generator(0, "init"))
        images = torch.randn(self.sizes[number], *shape, generator=draw)
        labels = torch.randint(10, (self.sizes[number],), generator=draw)
        shapes = {name: dict(network.named_parameters())[name].shape for name in prunable_names(network)}
        masks = random_masks(shapes, dict.fromkeys(shapes, 0.5), draw)
        if self.double:
            network, images = network.double(), images.double()
        sgd = SGD(0.05, momentum=0.5, weight_decay=5e-4, batch_size=self.batch, epochs=2, max_grad_norm=10.0)
        how: dict[str, Any] = {"masks": masks, "device": self.device, "precision": self.precision, "recorder": recorder}
        train(network, images, labels, sgd, rng=generator(0, "order", number), **how)
        return torch.cat([p.detach().flatten() for p in network.parameters()])


def against(bench: Bench, model: str, precision: str, exact: list[Tensor]) -> Mapping[str, Any]:
    """Return the errors of each form, and whether a client's bits depend on its company or on a graph."""
    bench.compute_in(precision)
    clients, expected = Trained(bench, model, precision=precision), torch.cat(exact)
    found = {"error_alone": error_of(torch.cat(clients.weights()), expected)}
    if precision == "bf16":  # which has no grouped form
        return found
    if precision == "float32" and bench.on_gpu:
        found["error_on_cpu"] = error_of(torch.cat(Trained(bench, model, device="cpu").weights()), expected)
    cohort, lone = clients.weights(cohort=True), clients.weights(cohort=True, clients=1)
    found |= {
        "error_in_cohort": error_of(torch.cat(cohort), expected),
        "bits_alone_as_in_cohort": equal(lone, cohort[:1]),
    }
    if recorder := bench.recorder():
        graph = clients.weights(cohort=True, recorder=recorder)
        found |= {
            "error_in_graph": error_of(torch.cat(graph), expected),
            "bits_in_graph_as_without": equal(graph, cohort),
        }
    return found


def again(bench: Bench, model: str, deterministic: bool) -> Mapping[str, Any]:
    """Return whether the same training, done again, ends with the same bits."""
    bench.compute_in("float32", deterministic=deterministic)
    try:
        clients = Trained(bench, model, most=128)  # which kernels there are depends on it
        forms: dict[str, Callable[[], list[Tensor]]] = {
            "alone": clients.weights,
            "in_cohort": partial(clients.weights, cohort=True),
            "in_graph": lambda: clients.weights(cohort=True, recorder=bench.recorder()),
        }
        return {f"same_bits_{name}": equal(form(), form()) for name, form in forms.items()}
    finally:
        bench.compute_in("float32")


def private_sums(bench: Bench, model: str) -> Mapping[str, Any]:
    """Return the errors of sums of clipped gradients per example, by how they are made."""
    shape, draw, count = SHAPES[model], generator(0, "data"), 4
    images, labels = torch.randn(count, *shape, generator=draw), torch.randint(10, (count,), generator=draw)
    slow = build_model(model, shape, 10, rng=generator(0, "init")).double()
    expected = torch.zeros(sum(p.numel() for p in slow.parameters()), dtype=torch.float64)
    for image, label in zip(images.double().split(1), labels.split(1), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(slow(image), label), list(slow.parameters()))
        gradient = torch.cat([each.flatten() for each in gradients])
        expected += gradient / max(1.0, float(gradient.norm()))
    found = {}
    for method in METHODS:
        network = build_model(model, shape, 10, rng=generator(0, "init")).to(bench.device).train()
        sums = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
        ones = {name: torch.ones_like(p) for name, p in network.named_parameters()}
        private = DPSGD(0.0, 1.0, 1.0, 1, KeyedNoise(bytes(32)), method)
        with private.attached(network, sums, ones, shape) as step:
            step.add(images.to(bench.device), labels.to(bench.device))
        found[f"error_{method}"] = error_of(torch.cat([each.flatten() for each in sums.values()]), expected)
    return found


def sparsegpt_masks(bench: Bench) -> Mapping[str, Any]:
    rows, columns = (16, 32) if bench.tiny else (1024, 1024)
    draw, found = torch.Generator().manual_seed(0), {}
    weight = torch.randn(rows, columns, generator=draw) * 0.02
    inputs = torch.randn(8, 4 * columns // 8, columns, generator=draw) * torch.rand(columns, generator=draw)
    for name, pattern in {"half": {"density": 0.5}, "2_of_4": {"n_of_m": (2, 4)}}.items():
        done = {}
        for device in ("cpu", bench.device):
            hessian = Hessian(columns, torch.device(device))
            hessian.add(inputs.to(device))
            done[device] = sparsegpt([weight.to(device)], hessian.matrix, **pattern)[0]  # type: ignore[arg-type]
        (expected, mask), here = done["cpu"], done[bench.device]
        found[f"{name}_equal_in_mask"] = float((mask == here[1].cpu()).double().mean())
        found[f"{name}_error"] = error_of(here[0], expected)
        if recorder := bench.recorder():
            graph = sparsegpt([weight.to(device)], hessian.matrix, recorder=recorder, **pattern)[0]  # type: ignore[arg-type]
            found[f"{name}_bits_in_graph_as_without"] = equal(graph, here)
    return found


def masks_and_means(bench: Bench) -> Mapping[str, Any]:
    size, draw = 10_000 if bench.tiny else 1_000_000, torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(size, generator=draw), torch.randn(size, generator=draw).round(decimals=2)
    mask, found = torch.rand(size, generator=draw) < 0.5, {}
    for device in dict.fromkeys(("cpu", bench.device)):
        w, g, m = weights.to(device), gradients.to(device), mask.to(device)
        mean = MaskedMean(3)
        for number in range(3):
            mean.add(Payload.pruned({"w": w * (number + 1)}, {"w": m.roll(number)}))
        found[device] = prune_and_grow({"w": w}, {"w": g}, {"w": m}, 0.3)["w"], mean.mixed()["w"]
    pairs = zip(found["cpu"], found[bench.device], strict=True)
    return dict(zip(("prune_and_grow_same", "mean_same_bits"), (equal([a], [b]) for a, b in pairs), strict=True))


def tests(bench: Bench) -> None:
    """Run the tests that are marked for a GPU, file by file, four at a time."""
    marks = ("mark.gpu", "DEVICES")
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if any(m in path.read_text() for m in marks)]
    if bench.tiny:
        files = [ROOT / "tests" / "core" / "test_masks.py"]  # the one that is imported soonest
    with ThreadPoolExecutor(4) as pool:
        done = [(path, pool.submit(_tested, path, bench)) for path in files]
        for path, future in done:
            bench.measure(f"tests of {path.name}", future.result)


def _tested(path: Path, bench: Bench) -> Mapping[str, Any]:
    seconds = max(1.0, bench.left)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "no:benchmark", str(path)]  # that plug-in warns, which is an error here
    command += ["--noconftest"] * bench.tiny  # which takes longer to import than the tests
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {seconds:.0f} s"}
    lines = done.stdout.splitlines() or [done.stderr[-300:]]
    told: dict[str, Any] = {"last": lines[-1]}
    if done.returncode:
        said = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
        told["failed"] = said[:20] or f"exit code {done.returncode}"
    return told
