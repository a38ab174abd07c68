"""The frame of gpu.py: rows that are written as they come, parts that share the seconds, and times."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from _turns import Steps, clock_of, compute_in
from torch import Tensor

from fedprune_app.config import parse_config
from fedprune_app.core.graphs import CudaGraphs
from fedprune_app.files import replace_file
from fedprune_app.learning.device import recorder_of

ROOT = Path(__file__).parents[1]
Part = Callable[["Bench"], None]


class Bench:
    """The settings, the rows so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.tiny, self.threads = options.device, options.tiny, options.threads
        self.options = options
        self.out: Path = options.out
        self.data_dir: str = options.data_dir
        self.on_gpu = self.device == "cuda"
        self.clock = clock_of(self.device)
        self.started = time.monotonic()
        self.end = self.part_end = self.started + options.seconds
        self.part = ""
        self.parts_left: list[str] = []
        gc.freeze()  # what is imported by now stays, and need not be looked at again and again
        self.out.mkdir(parents=True, exist_ok=True)
        self.file = self.out / "results.json"
        self.rows: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []

    # --- time and rows ---

    @property
    def left(self) -> float:
        """The seconds that are left to the part at work."""
        return self.part_end - time.monotonic()

    def run(self, parts: Mapping[str, tuple[Part, float]]) -> None:
        """Do the parts in their order; each has its share of what is left, and leaves to the others what it leaves."""
        self.parts_left = list(parts)
        for name, (part, share) in parts.items():
            now, shares = time.monotonic(), sum(parts[each][1] for each in self.parts_left)
            self.part, self.part_end = name, now + (self.end - now) * share / shares
            self.parts_left.remove(name)
            self.measure("whole part", partial(self._whole, part))
        self.part = "end"
        self.row("rows that say why they failed", number=sum("failed" in row for row in self.rows))

    def _whole(self, part: Part) -> Mapping[str, Any]:
        started = time.monotonic()
        self.compute_in("float32")
        part(self)
        return {"seconds": time.monotonic() - started}

    def measure(self, what: str, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Add the row that ``work`` returns, and return it; where it fails the row says why.

        Nothing is done where the part's time is over.
        """
        if self.left <= 0:
            self.row(f"no time for {what}")
            return {}
        try:
            values = work()
        except Exception as error:
            values = {"failed": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-1500:]}
        self.row(what, **values)
        self._clean()
        return values

    def row(self, what: str, **values: Any) -> None:
        at = round(time.monotonic() - self.started, 1)
        self.rows.append({"part": self.part, "what": what, **values, "at": at})
        lines = ",\n".join(json.dumps(row, default=str) for row in self.rows)
        replace_file(self.file, f"[\n{lines}\n]\n".encode(), durable=False)
        shown = {key: f"{value:.4g}" if isinstance(value, float) else str(value)[:120] for key, value in values.items()}
        print(f"{at:6.1f} {self.part:12} {what}:", *(f"{key}={text}" for key, text in shown.items()), flush=True)

    def _clean(self) -> None:
        """Give memory back. After an error that a device does not recover from, go on in a fresh process."""
        gc.collect()
        if not self.on_gpu:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        except RuntimeError as error:
            self.row("the device is lost: the other parts go on in a new process", failed=str(error)[:200])
            seconds = self.end - time.monotonic()
            if not self.parts_left or seconds < 10:
                raise SystemExit(1) from error
            left = ["--seconds", str(seconds), "--parts", *self.parts_left]
            os.execv(sys.executable, [sys.executable, *sys.argv, *left])

    # --- what is timed ---

    def compute_in(self, precision: str, *, deterministic: bool = False) -> None:
        compute_in(precision, self.device, self.threads, deterministic=deterministic)

    def recorder(self, wanted: bool = True) -> CudaGraphs | None:
        return recorder_of(parse_config({"cuda-graphs": wanted}), torch.device(self.device))

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def seconds(self, work: Callable[[], object], most: float = 0.3) -> float:
        """Return the median seconds of work that is done again and again, for so long at most, after a first time."""

        def once() -> float:
            start = self.clock()
            work()
            return self.clock() - start

        once()
        first = once()
        more = 0 if self.tiny else min(50, int(most / max(first, 1e-6)))
        return statistics.median([first, *(once() for _ in range(more))])

    def milliseconds(self, **works: Callable[[], object]) -> dict[str, float]:
        return {f"ms_{name}": 1e3 * self.seconds(work) for name, work in works.items()}

    def per_step(
        self,
        model: str,
        batch: int,
        prepare: Callable[[Steps], Callable[[], object]],
        device: str = "",
        few: int = 6,  # three warm up before a step is recorded
    ) -> dict[str, float]:
        """Return the microseconds of a step, and the milliseconds that a training takes beside its steps.

        ``prepare`` gets more steps and fewer, which tells the two apart. The longer training is timed twice: what
        differs less than ``spread``, a share, does not differ.
        """

        def taken(count: int) -> float:
            run = prepare(Steps(model, batch, count, device or self.device))
            start = self.clock()
            run()
            return self.clock() - start

        taken(few)
        short = taken(few)
        more = 2 if self.tiny else max(3 * few, min(60, int(0.4 * few / short)))
        first, second = (max(taken(few + more) - short, 1e-9) / more for _ in range(2))
        step = (first + second) / 2
        return {
            "us_per_step": 1e6 * step,
            "spread": abs(first - second) / step,
            "ms_per_training": 1e3 * max(0.0, short - few * step),
        }


class Busy:
    """The share of the time in which the GPU computed, as ``nvidia-ml-py`` samples it; None without."""

    def __init__(self, bench: Bench) -> None:
        self._on_gpu = bench.on_gpu
        self._over = threading.Event()
        self._found: list[float] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def share(self) -> float | None:
        return statistics.mean(self._found) if self._found else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        with suppress(Exception):  # the driver or its package may be missing
            while self._on_gpu and not self._over.wait(0.2):
                self._found.append(torch.cuda.utilization() / 100)


def error_of(found: Tensor, exact: Tensor) -> float:
    """Return ‖found - exact‖ / ‖exact‖, in float64 on the CPU."""
    found, exact = found.double().cpu(), exact.double().cpu()
    return float((found - exact).norm() / exact.norm())


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether the bits are the same, wherever the tensors are."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))
