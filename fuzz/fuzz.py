"""Coverage-guided fuzzing of everything that crosses a border: whatever the bytes, a ValueError or a valid result.

    python fuzz/fuzz.py codec_bytes -runs=1000000 -rss_limit_mb=2048 -timeout=10 fuzz/corpus/codec_bytes

Targets are the names of the functions below marked ``@target``. Any other exception, a hang or memory above the limit
is a finding, and libFuzzer leaves the input beside it. Options are libFuzzer's. `make fuzz` runs each for a while.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedprune_app"]):
    from fedprune_app.config import DEFAULTS, ConfigError, parse_config, read_toml, to_toml
    from fedprune_app.core import codec
    from fedprune_app.core.payload import Payload
    from fedprune_app.engine import wire
    from fedprune_app.engine.store import State, read_tensors, write_tensors
    from fedprune_app.results.reader import read_info, read_masks, read_rows
    from fedprune_app.sweep import read_matrix

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

MAX_BYTES = 1 << 20  # what a decoder may make of its input here
Target = Callable[[bytes], object]
TARGETS: dict[str, tuple[Target, Callable[[], Iterable[bytes]]]] = {}
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


def target(seeds: Callable[[], Iterable[bytes]]) -> Callable[[Target], Target]:
    def register(function: Target) -> Target:
        TARGETS[function.__name__] = (function, seeds)
        return function

    return register


# --- seeds: valid inputs, from which libFuzzer goes on ----------------------------------------------------------------


def payloads() -> Iterable[Payload]:
    draw = torch.Generator().manual_seed(0)
    for density in (0.0, 0.1, 0.5, 0.9, 1.0):
        weight, bias = torch.randn(7, 3, 2, generator=draw), torch.randn(5, generator=draw)
        mask = torch.rand(7, 3, 2, generator=draw) < density
        yield Payload.pruned({"conv.weight": weight, "bias": bias}, {"conv.weight": mask})
    yield Payload(
        {
            "half": torch.ones(3, dtype=torch.float16),
            "count": torch.tensor(3),
            "bytes": torch.zeros(0, dtype=torch.uint8),
        }
    )
    yield Payload({})


def encoded_payloads() -> Iterable[bytes]:
    return (codec.pack(payload) for payload in payloads())


def state_files() -> Iterable[bytes]:
    for payload in payloads():
        write_tensors(FOLDER / "seed.safetensors", dict(payload.tensors), {"round": 3, "state-rounds": {"0": 1}})
        yield (FOLDER / "seed.safetensors").read_bytes()


def run_configs() -> Iterable[bytes]:
    yield to_toml(DEFAULTS).encode()
    yield b'system = "dispfl"\n[dispfl]\ntopology = "ring"\n'


def matrices() -> Iterable[bytes]:
    return (path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("configs/matrices/*.yaml")))


def records() -> Iterable[bytes]:
    yield b'{"round": 1, "seconds": 1.5, "replies": 2, "bytes_up": 10, "accuracy_personal_mean": 0.5, "x": null}\n'
    yield b'{"round": 1, "partition": 0, "density": 0.5}\n{"round": 2, "partition": 1, "density": 1'


def infos() -> Iterable[bytes]:
    yield b'{"status": "completed", "rounds_completed": 2, "seconds": 3, "config": {"system": "fedavg"}}'
    yield b'{"round": 2, "partitions": [0, 1], "distance": [[0, 0.5], [0.5, 0]]}'


def replies() -> Iterable[bytes]:
    return (bytes([kind]) + data for data in encoded_payloads() for kind in range(4))


# --- targets ----------------------------------------------------------------------------------------------------------


def written(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


@target(encoded_payloads)
def codec_bytes(data: bytes) -> None:
    """What is accepted is spelled in one way only, and stays within the stated memory."""
    payload = codec.unpack(data, MAX_BYTES)
    assert sum(t.numel() * t.element_size() for t in payload.tensors.values()) <= MAX_BYTES
    assert codec.pack(payload) == data, "accepted, but spelled otherwise"


@target(replies)
def reply(data: bytes) -> None:
    """A reply's record, its kinds and types mixed up, against the schema of an honest one."""
    kind, body = data[:1] or b"\0", data[1:]
    dtype, stype = ("uint8", "fedprune.codec") if kind[0] & 1 else (body[:5].decode("latin1"), "numpy.ndarray")
    arrays = ArrayRecord({codec.KEY: Array(dtype, (len(body),), stype, body)})
    fields = ConfigRecord(
        {"num-examples": len(body), "loss": body.decode("latin1")} if kind[0] & 2 else {"loss": [1.0]}
    )
    name = wire.PAYLOAD if kind[0] & 4 == 0 else body[:8].decode("latin1")
    content = RecordDict({"fields": fields, name: arrays})
    honest = next(iter(payloads()))
    schema = wire.Schema.like(honest.tensors, frozenset(honest.masks))
    wire.letters_of(content, schema)
    for field in ("num-examples", "loss"):
        with contextlib.suppress(ValueError):
            wire.number(wire.fields_of(content), field, 0, 1e6)
    schema.check(wire.payload_of(content, schema.max_bytes))


@target(state_files)
def state(data: bytes) -> State:
    """A state or checkpoint file, damaged or made by a stranger."""
    path = written("state.safetensors", data)
    return read_tensors(path)


@target(run_configs)
def run_config(data: bytes) -> None:
    path = written("config.toml", data)
    parse_config(read_toml(path))


@target(matrices)
def matrix(data: bytes) -> None:
    path = written("matrix.yaml", data)
    read_matrix(path).cells(FOLDER, {}, resume=False)


@target(records)
def jsonl(data: bytes) -> None:
    path = written("rounds.jsonl", data)
    list(read_rows(path))


@target(infos)
def run_info(data: bytes) -> None:
    for name, read in (("run.json", read_info), ("masks.json", read_masks)):
        path = written(name, data)
        with contextlib.suppress(ValueError):
            read(FOLDER)
        path.unlink()


def main() -> None:
    names = ", ".join(TARGETS)
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: fuzz.py TARGET [libFuzzer options] [CORPUS]; targets: {names}")
    name = sys.argv.pop(1)
    function, seeds = TARGETS[name]
    for corpus in [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]:
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            (corpus / f"seed-{number}").write_bytes(seed)

    def one(data: bytes) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ValueError):
            function(data)

    assert issubclass(ConfigError, ValueError)
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
