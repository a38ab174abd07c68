"""Size and speed of the wire codec: one float32 tensor, random mask, over element counts and densities.

Sizes are ratios to the entropy bound, n H(k/n) + 32 k bits; "bitmap" is the usual packed mask beside the kept
values, without any header. Times are medians, and ratios to copying the dense tensor once, the same element count
in the same process. Example: ``python benchmarks/codec_size.py --elements 5000 11200000 --densities 0.1 0.5``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from fedprune_app.core.codec import KEY, decode, encode
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator


def bound_bytes(numel: int, kept: int) -> float:
    """n H(k/n) bits of mask and 32 bits a kept value, in bytes."""
    bits = sum(count * math.log2(numel / count) for count in (kept, numel - kept) if count)
    return (bits + 32 * kept) / 8


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    action()  # the first call pays for page faults
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(numel: int, density: float, repeats: int) -> list[str]:
    """One row of the table."""
    rng = generator(0, "codec benchmark")
    kept = round(numel * density)
    mask = torch.zeros(numel, dtype=torch.bool)
    mask[torch.randperm(numel, generator=rng)[:kept]] = True
    weights = torch.randn(numel, generator=rng)
    payload = Payload({"w": weights * mask}, {"w": mask})
    arrays = encode(payload)

    bound = bound_bytes(numel, kept)
    copy = median_seconds(weights.clone, repeats)
    encoding = median_seconds(lambda: encode(payload), repeats)
    decoding = median_seconds(lambda: decode(arrays), repeats)
    megabytes = weights.nbytes / 1e6
    return [
        f"{numel:,}",
        f"{density:g}",
        f"{arrays[KEY].nbytes:,}",
        f"{arrays[KEY].nbytes / bound:.4f}",
        f"{(math.ceil(numel / 8) + 4 * kept) / bound:.4f}",
        f"{1e3 * encoding:.1f}",
        f"{megabytes / encoding:,.0f}",
        f"{encoding / copy:.1f}",
        f"{1e3 * decoding:.1f}",
        f"{megabytes / decoding:,.0f}",
        f"{decoding / copy:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[4_100, 10_000, 100_001, 1_000_000, 11_200_000])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.05, 0.1, 0.3, 0.5, 0.9, 0.99])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    table = Table(title="Wire codec, one float32 tensor (MB of the dense tensor; x copy = times one dense copy)")
    for heading in (
        "elements",
        "density",
        "bytes",
        "/ bound",
        "bitmap / bound",
        "encode ms",
        "MB/s",
        "x copy",
        "decode ms",
        "MB/s",
        "x copy",
    ):
        table.add_column(heading, justify="right")
    for numel in arguments.elements:
        for density in arguments.densities:
            table.add_row(*measure(numel, density, arguments.repeats))
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
