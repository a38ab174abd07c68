"""Whatever crosses a border is one ``ValueError`` or a valid result; ``devtools/fuzz`` tries the same for longer."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.data.datasets import load_dataset
from fedprune_app.engine import wire
from fedprune_app.engine.store import read_tensors, write_tensors
from fedprune_app.federation.clients import ImageClientInfo, TextClientInfo
from fedprune_app.results.reader import read_info, read_rows
from fedprune_app.sweeps.matrix import read_matrix
from tests.examples import examples

quick = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
HONEST = {"partition": 1, "num-examples": 9, "image-shape": [1, 8, 8], "num-classes": 2, "layer-digests": ["0"]}
SAID = (*HONEST, "capacity", "own-data", "labels-train", "labels-test", "classes", "data-dir", "documents")
SAID += ("normalisation-mean", "normalisation-std", "data-sha256")


def refusal(read: Callable[[], object]) -> str:
    """Why it was refused, or nothing."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return ""


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """Bytes with a piece replaced, removed, or doubled."""
    start, end = sorted((draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))))
    middle = draw(st.sampled_from([b"", whole[start:end] * 2, None]))
    return whole[:start] + (draw(st.binary(max_size=20)) if middle is None else middle) + whole[end:]


def payload() -> Payload:
    draw = torch.Generator().manual_seed(0)
    weight, mask = torch.randn(5, 3, generator=draw), torch.rand(5, 3, generator=draw) < 0.5
    return Payload.pruned({"weight": weight, "bias": torch.randn(5, generator=draw)}, {"weight": mask})


def state_file(folder: Path) -> bytes:
    path = folder / "honest.safetensors"
    if not path.exists():
        write_tensors(path, dict(payload().tensors), {"round": 3})
    return path.read_bytes()


def image_file() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 4), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


def image_folder(folder: Path, *contents: bytes) -> Path:
    for number, content in enumerate(contents):
        (folder / "train" / str(number)).mkdir(parents=True)
        (folder / "train" / str(number) / "x.png").write_bytes(content)
    return folder


@quick
@given(damaged(bytes(codec.pack(payload()))))
def test_a_reply_of_damaged_bytes_is_refused_or_fits(data):
    schema = wire.Schema.like(payload().tensors, frozenset(payload().masks))
    content = wire.pack(wire.from_bytes({codec.KEY: data}), {})
    with contextlib.suppress(ValueError):
        found = wire.payload_of(content, schema.max_bytes)
        schema.check(found)
        assert {name: tensor.shape for name, tensor in found.tensors.items()} == schema.shapes
        assert all(float(tensor.abs().max()) <= wire.LARGEST for tensor in found.tensors.values())


@quick
@given(st.data())
def test_a_damaged_state_is_refused_or_read(tmp_path, data):
    path = tmp_path / "state.safetensors"
    path.write_bytes(data.draw(damaged(state_file(tmp_path))))
    with contextlib.suppress(ValueError):
        read_tensors(path)


def test_a_state_whose_header_is_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    header = json.dumps({"__metadata__": {"fedprune-state": "[" * 100_000}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="is damaged"):
        read_tensors(path)


@quick
@given(damaged(b"systems: [fedavg, {system: fedprox, seed: &a [1]}]\ncommon: {fraction-train: 1.0}\nseeds: [0, 1]\n"))
def test_a_damaged_matrix_is_one_line_or_read(tmp_path, data):
    path = tmp_path / "matrix.yaml"
    path.write_bytes(data)
    assert "\n" not in refusal(lambda: read_matrix(path))


@quick
@given(JSON, damaged(b'{"round": 1, "loss_mean": 0.5, "density_by_layer": {"a": 1}}\n'))
def test_damaged_records_are_one_line_or_read(tmp_path, value, line):
    (tmp_path / "rounds.jsonl").write_bytes(line + b"\n")
    (tmp_path / "run.json").write_text(json.dumps(value))
    assert "\n" not in refusal(lambda: list(read_rows(tmp_path / "rounds.jsonl")))
    assert "\n" not in refusal(lambda: read_info(tmp_path))


@quick
@given(st.dictionaries(st.sampled_from(sorted(SAID)), JSON, max_size=4))
def test_an_introduction_is_refused_in_one_short_line_or_small(said):
    for kind in (ImageClientInfo, TextClientInfo):
        assert len(refusal(lambda kind=kind: kind.read(5, {**HONEST, **said}))) < 500
        with contextlib.suppress(ValueError):
            info = kind.read(5, {**HONEST, **said})
            hash(info.common())
            assert len(json.dumps(info.description(), allow_nan=False)) < 2000


@settings(quick, max_examples=examples(30))
@given(damaged(image_file()))
def test_a_damaged_image_is_named_or_read(tmp_path_factory, data):
    folder = image_folder(tmp_path_factory.mktemp("images"), data, image_file())
    with contextlib.suppress(ValueError):
        assert len(load_dataset("image-folder", folder, needs_test=False).train_images) == 2


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path):
    """A PNG of a few bytes that says it is of 100,000 x 100,000 pixels."""
    small = image_file()
    folder = image_folder(tmp_path, small[:16] + (100_000).to_bytes(4, "big") * 2 + small[24:], small)
    with pytest.raises(ValueError, match="cannot be read"):
        load_dataset("image-folder", folder, needs_test=False)
