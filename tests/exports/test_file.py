"""The file of an exported model: what comes back, and what a stranger's file can do, which is nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from fedprune_app.core import codec
from fedprune_app.core.digests import json_with_digest
from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import gather, shrink
from fedprune_app.exports.file import (
    ExportInfo,
    encode_export,
    full_density,
    load_model,
    network_of,
    read_export_info,
)
from fedprune_app.models.initial import channel_groups
from fedprune_app.models.vision import build_model, state_tensors


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def made_up_model(name, shape, classes=10, share=0.5):
    """A network with other running statistics than the initial ones, random channels removed, fc1 pruned; and the
    same made by shrinking, without a file."""
    full = build_model(name, shape, classes, rng=draw()).eval()
    for buffer in full.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=draw(1)) + 0.5)
    groups = channel_groups(full, shape)
    full.requires_grad_(False)
    kept = {group.name: torch.rand(group.size, generator=draw(2)) < share for group in groups}
    tensors = gather(state_tensors(full, include_buffers=True), groups, kept)
    fc = next(n for n in tensors if n.startswith("fc") and n.endswith("weight"))
    payload = Payload.pruned(tensors, {fc: torch.rand(tensors[fc].shape, generator=draw(3)) < 0.2})
    info = ExportInfo(
        system="subfedavg-hy",
        client=3,
        round=7,
        model=name,
        image_shape=shape,
        classes=classes,
        mean=(0.5,) * shape[0],
        std=(0.25,) * shape[0],
        density=full_density(full, payload),
        channels={name: tuple(mask.nonzero().squeeze(1).tolist()) for name, mask in kept.items()},
    )
    expected = shrink(full, groups, kept)
    expected.get_submodule(fc.removesuffix(".weight")).weight.data.copy_(payload.tensors[fc])
    return info, payload, expected


@pytest.fixture(scope="module")
def lenet():
    return made_up_model("lenet5-bn", (3, 32, 32))


@pytest.fixture(scope="module")
def content(lenet):
    return encode_export(*lenet[:2])


@pytest.fixture
def load(tmp_path):
    def write_and_load(content):
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return load_model(path)

    return write_and_load


def refusal(load, content):
    with pytest.raises(ValueError, match=r"exported model '.*model\.safetensors'") as caught:
        load(content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_computes_the_same(model, expected, shape):
    images = torch.randn(3, *shape, generator=draw(9))
    assert not model.training
    assert torch.equal(model(images), expected(images))


# --- what comes back ----------------------------------------------------------------------------------------------


def test_a_file_holds_the_small_network_and_what_it_is(lenet, content, load, tmp_path):
    info, _, expected = lenet
    model = load(content)
    assert_computes_the_same(model, expected, info.image_shape)
    assert [p.shape for p in model.parameters()] == [p.shape for p in expected.parameters()]
    assert str(model) == str(expected)  # layers know their sizes
    assert read_export_info(tmp_path / "model.safetensors") == info


def test_a_file_takes_the_bytes_of_what_is_kept(lenet, content):
    info, payload, _ = lenet
    mask = payload.masks["fc1.weight"]
    assert 4 * payload.num_kept() < len(content) < 4 * payload.num_kept() + mask.numel() / 8 + 1500
    dense = build_model(info.model, info.image_shape, info.classes, rng=draw())
    assert len(content) < len(safetensors.torch.save(state_tensors(dense))) / 2


@pytest.mark.full
def test_residual_networks_load_without_knowing_which_channels_depend_on_each_other(monkeypatch):
    info, payload, expected = made_up_model("resnet18-bn", (3, 8, 8))
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    assert_computes_the_same(network_of(info, payload), expected, info.image_shape)


def test_a_network_of_which_nothing_was_removed_loads(load):
    info, payload, expected = made_up_model("cnn5-bn", (1, 28, 28), share=2.0)
    assert info.channels["bn1"] == tuple(range(10))
    assert_computes_the_same(load(encode_export(info, payload)), expected, info.image_shape)


# --- files of strangers -------------------------------------------------------------------------------------------


def with_metadata(content, **changes):
    tensors = safetensors.torch.load(content)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["fedprune"])
    return safetensors.torch.save(tensors, metadata={"fedprune": json.dumps(json_with_digest({**metadata, **changes}))})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("format", None),
        ("system", 1),
        ("client", -1),
        ("client", True),
        ("round", 0.5),
        ("model", "transformer"),
        ("model", ["lenet5-bn"]),
        ("image_shape", [3, 32]),
        ("image_shape", [3, 32, 1 << 40]),
        ("image_shape", [3, 32, True]),
        ("classes", 1),
        ("classes", 1 << 40),
        ("mean", [0.5, 0.5, 1e31]),
        ("mean", [0.5]),
        ("std", [0.5, 0.5, 0.0]),
        ("density", 1.5),
        ("channels", []),
        ("channels", {"bn1": "012"}),
    ],
)
def test_metadata_that_cannot_be_is_refused_by_its_key(key, value, content, load):
    said = refusal(load, with_metadata(content, **{key: value}))
    assert f"'{key}'" in said or "model 'transformer' is of a plug-in" in said
    assert len(said) < 400


@pytest.mark.parametrize(
    "key",
    [
        "format",
        "system",
        "client",
        "round",
        "model",
        "image_shape",
        "classes",
        "mean",
        "std",
        "density",
        "channels",
        "class_names",
        "features",
        "image_fit",
        "inputs",
    ],
)
def test_metadata_that_lacks_a_key_is_refused_by_it(key, content, load, tmp_path):
    tensors = safetensors.torch.load(content)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["fedprune"])
    del metadata[key]
    changed = {"fedprune": json.dumps(json_with_digest(metadata))}
    assert f"has no '{key}'" in refusal(load, safetensors.torch.save(tensors, changed))
    with pytest.raises(ValueError, match=f"has no '{key}'"):
        read_export_info(tmp_path / "model.safetensors")


def test_tensors_that_are_cut_without_channels_that_say_so_are_refused(content, load):
    assert "and (6, 3, 5, 5)" in refusal(load, with_metadata(content, channels={}))


def test_a_claim_of_another_network_does_not_fit_the_tensors(content, load):
    assert "tensor" in refusal(load, with_metadata(content, model="lenet5"))
    assert "tensor" in refusal(load, with_metadata(content, model="resnet18-bn"))
    said = refusal(load, with_metadata(content, classes=9))
    assert "'fc3.weight' has dtype torch.float32 and shape (10, 84), allowed: torch.float32 and at most (9, 84)" in said
    # not more than the full network has, but other
    assert "outputs of shape (1, 10)" in refusal(load, with_metadata(content, classes=11))
    assert "do not fit each other" in refusal(load, with_metadata(content, image_shape=[3, 40, 40]))


def rewritten(lenet, **tensors):
    """The file with other tensors, and the density that they have."""
    info, payload, _ = lenet
    full = build_model(info.model, info.image_shape, info.classes, rng=draw())
    found = {name: t for name, t in {**payload.tensors, **tensors}.items() if t is not None}
    changed = Payload(found, {name: mask for name, mask in payload.masks.items() if name not in tensors})
    try:
        density = full_density(full, changed)
    except KeyError:
        density = 0.5
    return encode_export(replace(info, density=min(density, 1.0)), changed)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"fc2.weight": None}, "tensor 'fc2.weight' is missing"),
        ({"extra": torch.zeros(1)}, "tensor 'extra' is not in the model"),
        ({"fc2.weight": torch.zeros(84, 120, dtype=torch.float16)}, "dtype torch.float16"),
        ({"fc2.weight": torch.zeros(84, 120, 1)}, "shape (84, 120, 1)"),
        ({"fc2.weight": torch.zeros(0, 120)}, "shape (0, 120)"),
        ({"fc2.weight": torch.zeros(60, 120)}, "do not fit each other"),
        ({"fc3.weight": torch.zeros(9, 84), "fc3.bias": torch.zeros(9)}, "outputs of shape (1, 9)"),
    ],
)
def test_tensors_that_make_no_network_are_refused(lenet, load, tensors, says):
    assert says in refusal(load, rewritten(lenet, **tensors))


def test_few_bytes_cannot_claim_much_memory(lenet, load):
    info, payload, _ = lenet
    huge = Payload({**payload.tensors, "fc1.weight": torch.zeros(1).expand(1 << 12, 1 << 12)})
    names = list(huge.tensors)
    nothing = {name: torch.zeros(1, dtype=torch.bool).expand(t.shape) for name, t in huge.tensors.items()}
    content = encode_export(info, Payload(huge.tensors, {name: nothing[name] for name in names}))
    assert len(content) < 2000
    assert "decodes to more than the allowed" in refusal(load, content)


def test_what_is_no_exported_model_is_refused(content, load, tmp_path):
    body = safetensors.torch.load(content)[codec.KEY]
    said = "no model that `fedprune export"
    assert said in refusal(load, safetensors.torch.save({codec.KEY: body}))
    assert said in refusal(load, safetensors.torch.save({"x": body}, metadata={"fedprune": "{}"}))
    assert "no JSON object" in refusal(
        load, safetensors.torch.save({codec.KEY: body}, metadata={"fedprune": "[" * 9999})
    )
    for text in ("[]", "1", '"text"', '{"format": 1}', '{"mean": [NaN], "content_sha256": ""}'):
        refusal(load, safetensors.torch.save({codec.KEY: body}, metadata={"fedprune": text}))
    floats = body[:8].view(torch.bfloat16)
    info = with_metadata(content)
    metadata = json.loads(info[8 : 8 + int.from_bytes(info[:8], "little")])["__metadata__"]
    assert "torch.bfloat16" in refusal(load, safetensors.torch.save({codec.KEY: floats}, metadata=metadata))
    refusal(load, safetensors.torch.save({codec.KEY: body[:8].view(2, 4)}, metadata=metadata))
    for junk in (b"", b"PK\x03\x04", b"\x80\x04.", b"\xff" * 100):
        refusal(load, junk)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="cannot be read"):
            load_model(path)


def test_a_damaged_file_is_refused(content, load):
    rng = draw(5)
    for _ in range(80):
        damaged = bytearray(content)
        header = 8 + int.from_bytes(content[:8], "little")
        until = header + 400 if torch.rand((), generator=rng) < 0.5 else len(content)
        damaged[int(torch.randint(until, (), generator=rng))] ^= 1 << int(torch.randint(8, (), generator=rng))
        refusal(load, bytes(damaged))
    for size in (0, 7, 8, 300, len(content) // 2, len(content) - 1):
        refusal(load, content[:size])
