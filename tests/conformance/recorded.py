"""The final hashes of every system's conformance run, as they were recorded: ``recorded.json``.

A rebuild that is not meant to change results leaves this file alone. ``make record-hashes`` records anew. That is
legitimate only where a change is meant to change results: the commit that records does nothing else, and says which
systems changed and why.

Processors differ in how they round float32 sums, and libraries change it too. So the hashes are kept by the digest of
a few training steps in plain PyTorch, which know nothing of this project: a machine whose arithmetic is not among
those recorded skips the comparison and says so. ``make record-hashes`` adds its own; of a run that changed, it drops
the hashes of other arithmetics.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__).with_name("recorded.json")


@functools.cache
def arithmetic() -> str:
    """The digest of what this machine computes: convolutions and products, SGD steps, matrix functions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draw = torch.Generator().manual_seed(7)
        layers = (nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2))
        network = nn.Sequential(*layers, nn.Conv2d(6, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
        for parameter in network.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
        for _ in range(20):
            images = torch.randn(10, 1, 8, 8, generator=draw)
            labels = torch.randint(10, (10,), generator=draw)
            loss = nn.functional.cross_entropy(network(images), labels)
            for parameter, gradient in zip(
                network.parameters(), torch.autograd.grad(loss, list(network.parameters())), strict=True
            ):
                parameter.data.add_(gradient, alpha=-0.1)
        images = torch.randn(10, 12, 8, 8, generator=draw).requires_grad_()
        kernels = torch.randn(32, 3, 3, 3, generator=draw).requires_grad_()  # four clients' convolutions in one
        grouped = nn.functional.conv2d(images, kernels, groups=4)
        vectors = grouped.reshape(10, 4, -1).transpose(0, 1)
        matrices = torch.randn(4, vectors.shape[2], 10, generator=draw).requires_grad_()
        together = torch.autograd.grad((vectors @ matrices).square().sum(), (images, kernels, matrices))
        square = torch.randn(24, 200, generator=draw).double()
        values, _ = torch.linalg.eigh(square @ square.T)
        factor = torch.linalg.cholesky((square @ square.T).float() + torch.eye(24))
        total = hashlib.sha256(torch.__version__.encode())
        softmax = nn.functional.softmax(square.float(), dim=1)
        for tensor in (*network.parameters(), *together, values, factor, softmax):
            total.update(tensor.detach().numpy().tobytes())
        return total.hexdigest()
    finally:
        torch.set_num_threads(threads)


def hashes() -> dict[str, str] | None:
    """The recorded hashes by name of the run, for this machine's arithmetic; None where there are none."""
    entry = _read().get(arithmetic())
    return None if entry is None else dict(entry["final_sha256"])


def record(name: str, sha256: str) -> None:
    """Write one run's hash; those of other arithmetics are dropped where it differs from the one before."""
    found = _read()
    entry = found.get(arithmetic(), {"final_sha256": {}})
    if entry["final_sha256"].get(name, sha256) != sha256:
        for other in found.values():
            other["final_sha256"].pop(name, None)
    entry["machine"] = f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    entry["final_sha256"][name] = sha256
    found[arithmetic()] = entry
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _read() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}
