"""Coverage-guided fuzzing of everything that crosses a border: whatever the bytes, a ValueError or a valid result.

    python devtools/fuzz/fuzz.py codec_bytes -runs=1000000 -rss_limit_mb=2048 -timeout=10 CORPUS

Targets are the names of the functions below marked ``@target``. Any other exception, a hang or memory above the limit
is a finding, and libFuzzer leaves the input beside it. Options are libFuzzer's. `make fuzz` runs each for a while.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["fedprune_app", "strategies.base", "flwr.app.message", "flwr.common", "flwr.supercore.inflatable"]
):
    from fedprune_app.config import DEFAULTS, ConfigError, parse_config, read_toml, to_toml
    from fedprune_app.core import codec
    from fedprune_app.core.payload import Payload
    from fedprune_app.data import folders
    from fedprune_app.data.dataset import Form
    from fedprune_app.data.text import own_documents
    from fedprune_app.engine import replies, wire
    from fedprune_app.engine.store import State, read_tensors, write_tensors
    from fedprune_app.exports.file import ExportInfo, encode_export, full_density, load_model, read_export_info
    from fedprune_app.federation import evaluation
    from fedprune_app.federation.budgets import Budgets
    from fedprune_app.federation.clients import ImageClientInfo, TextClientInfo
    from fedprune_app.models.vision import build_model, state_tensors
    from fedprune_app.preflight.inputs import RunInputs
    from fedprune_app.results.metrics import ReplyKind
    from fedprune_app.results.reader import read_info, read_masks, read_rows
    from fedprune_app.results.recorder import row_of
    from fedprune_app.sweeps.matrix import read_matrix

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from PIL import Image
from safetensors.torch import save

MAX_BYTES = 1 << 20  # what a decoder may make of its input here
CONFIG = parse_config({})
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
    return (bytes(codec.pack(payload)) for payload in payloads())


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
    own = {"name": "drift", "title": "Drift", "source": "server", "least": 0, "percent": True, "over_rounds": "total"}
    info = {"status": "completed", "rounds_completed": 2, "seconds": 3, "seed": 0, "system": "mine", "config": {}}
    yield json.dumps({**info, "measures": [own]}).encode()
    yield b'{"round": 2, "partitions": [0, 1], "distance": [[0, 0.5], [0.5, 0]]}'


def encoded_replies() -> Iterable[bytes]:
    return (bytes([kind]) + data for data in encoded_payloads() for kind in range(4))


def deflated_replies() -> Iterable[bytes]:
    """The objects of a reply as Flower sends them, a byte for their number before each body."""
    for number, (_, content) in enumerate(reply_objects()):
        yield bytes([number]) + content.partition(b"\0")[2]


def introductions() -> Iterable[bytes]:
    who = {"partition": 1, "num-examples": 9, "capacity": 0.5}
    counts = {f"labels-{part}": [3, 4] for part in ("train", "validation", "test")}
    yield json.dumps({**who, "image-shape": [3, 8, 8], "num-classes": 2, **counts}).encode()
    own = {"own-data": True, "classes": ["a", "b"]}
    yield json.dumps({**who, "image-shape": [1, 8, 8], "num-classes": 2, **own}).encode()
    yield json.dumps({**who, "shell-digest": "0", "layer-digests": ["0", "1"], "documents": ["a"]}).encode()


def statements() -> Iterable[bytes]:
    yield json.dumps({"loss": 0.5, "density": 1.0, "seconds": 2.5, "flops": 10, "epsilon": 1.5, "note": "x"}).encode()
    digest = {"digest": "0" * 64, "density": 0.5, "inference-flops": 10, "density/fc.weight": 0.5}
    yield json.dumps({**digest, "accuracy-personal": 0.5, "accuracy-global": 0.25, "channel-density": 1.0}).encode()


def exports() -> Iterable[bytes]:
    """The metadata and the payload of a small network, a byte of zero between them; and a file of both."""
    draw, shape = torch.Generator().manual_seed(0), (1, 8, 8)
    for name, channels in (("cnn-small", {}), ("cnn-small-bn", {"bn1": tuple(range(16))})):
        model = build_model(name, shape, 3, rng=draw)
        tensors = state_tensors(model, include_buffers=True)
        masks = {weight: torch.rand(t.shape, generator=draw) < 0.05 for weight, t in tensors.items() if t.dim() > 1}
        payload = Payload.pruned(tensors, masks)
        info = ExportInfo("fedavg", 3, 7, name, shape, 3, (0.5,), (0.25,), full_density(model, payload), channels)
        yield b"1" + info.to_json().encode() + b"\0" + codec.pack(payload)
        yield b"0" + encode_export(info, payload)


def images() -> Iterable[bytes]:
    for mode, format in (("L", "PNG"), ("RGB", "PNG"), ("P", "PNG"), ("L", "JPEG"), ("RGB", "BMP"), ("RGB", "GIF")):
        file = io.BytesIO()
        Image.new(mode, (5, 4), 7 if mode != "RGB" else (1, 2, 3)).save(file, format)
        yield file.getvalue()


def texts() -> Iterable[bytes]:
    yield b'{"text": "one"}\n{"text": "two \\u00e9", "id": 3}\n'
    yield "a line\nand é another\n".encode()


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


@target(encoded_replies)
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
    wire.peer_updates_of(content, schema)
    for field in ("num-examples", "loss"):
        with contextlib.suppress(ValueError):
            wire.number(wire.fields_of(content), field, 0, 1e6)
    schema.check(wire.payload_of(content, schema.max_bytes))


@functools.cache
def reply_objects() -> list[tuple[str, bytes]]:
    """Of an honest reply, by id, children first: a chunk, an array, arrays, fields, records, the message."""
    content = wire.pack(wire.from_bytes({codec.KEY: next(iter(encoded_payloads()))}), {"num-examples": 9, "loss": 0.5})
    facts = Metadata(1, "", 7, 1, "0" * 64, "1", 1.8e9, 60.0, "train")
    objects = get_all_nested_objects(make_message(facts, content))
    return [(key, found.deflate()) for key, found in objects.items()]


@target(deflated_replies)
def reply_object(data: bytes) -> None:
    """One of a reply's objects with another body, as a SuperLink lets it pass: one line or content, nothing else."""
    number, body = (data[0] if data else 0), data[1:]
    objects = reply_objects()
    renamed: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    for position, (key, content) in enumerate(objects):
        for old, new in renamed.items():
            content = content.replace(old.encode(), new.encode())
        if position == number % len(objects):
            kind, children, _ = content.partition(b"\0")[0].decode().split(" ")
            content = f"{kind} {children} {len(body)}".encode() + b"\0" + body
        renamed[key] = hashlib.sha256(content).hexdigest()
        contents[renamed[key]] = content
    found = replies.read("0", list(contents)[-1], contents, MAX_BYTES)
    assert (found.content is None) == bool(found.error)
    assert found.num_bytes <= MAX_BYTES
    assert found.error.isprintable()
    assert len(found.error) <= 500


@target(state_files)
def state(data: bytes) -> State:
    """A state or checkpoint file, damaged or made by a stranger."""
    path = written("state.safetensors", data)
    return read_tensors(path)


@target(exports)
def export(data: bytes) -> None:
    """An exported model of a stranger's: a network that answers, or one line."""
    content = data[1:]
    if data[:1] == b"1":
        text, _, body = content.partition(b"\0")
        tensor = torch.frombuffer(bytearray(body or b"\0"), dtype=torch.uint8)
        content = save({codec.KEY: tensor}, metadata={"fedprune": text.decode(errors="replace")})
    path = written("export.safetensors", content)
    said = ""
    try:
        assert not load_model(path).training
        read_export_info(path)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000


@target(run_configs)
def run_config(data: bytes) -> None:
    path = written("config.toml", data)
    parse_config(read_toml(path))


@target(matrices)
def matrix(data: bytes) -> None:
    path = written("matrix.yaml", data)
    read_matrix(path).cells(RunInputs(out=FOLDER))


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


def fields_in(data: bytes) -> dict[str, object]:
    """A message's fields, of any kinds that JSON has."""
    with contextlib.suppress(RecursionError):  # it is JSON's, which no message is made of
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    raise ValueError("no fields")


@target(introductions)
def registration(data: bytes) -> None:
    """What a client says of itself: what is accepted is small, and can be compared with what others say."""
    fields = fields_in(data)
    honest = [json.loads(seed) for seed in introductions()]
    for kind, others in ((ImageClientInfo, honest[:2]), (TextClientInfo, honest[2:])):
        with contextlib.suppress(ValueError):
            info = kind.read(7, fields)
            hash(info.common())
            for other in others:
                info.difference(kind.read(8, other))
            assert len(json.dumps(info.description(), allow_nan=False)) < max(10_000, 2 * len(data))


@target(statements)
def statement(data: bytes) -> None:
    """What a client says of its training and evaluation: what is accepted can be recorded."""
    fields = fields_in(data)
    kept: list[object] = []
    with contextlib.suppress(ValueError):
        kept += [row_of(ReplyKind.TRAINING, fields), Budgets.check(fields)]
    with contextlib.suppress(ValueError):
        kept += [evaluation.digest_in(fields), row_of(ReplyKind.EVALUATION, fields, layers={"fc.weight"})]
    assert len(json.dumps(kept, allow_nan=False)) < 5000


@target(images)
def image_folder(data: bytes) -> None:
    """One bad file among a client's images."""
    folder = FOLDER / "images"
    for name, content in (("a", data), ("b", next(iter(images())))):
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
        written(f"images/train/{name}/x.png", content)
    try:
        dataset = folders.image_folder("image-folder", folder, form=Form(needs_test=False))
        assert len(dataset.train_images) == len(dataset.train_labels) == 2
    finally:
        shutil.rmtree(folder)


@target(texts)
def text_folder(data: bytes) -> None:
    """One bad file among a client's texts."""
    folder = FOLDER / "texts"
    folder.mkdir(exist_ok=True)
    for name in ("a.jsonl", "b.txt"):
        try:
            written(f"texts/{name}", data)
            documents, test = own_documents(str(folder), 0.2, 0)
            assert all(isinstance(document.text, str) for document in documents)
            assert isinstance(test, str)
        finally:
            (folder / name).unlink()


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
