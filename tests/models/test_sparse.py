"""Layers with zeros left out: they compute the same, and are there only where they are faster."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedprune_app.core.payload import Payload
from fedprune_app.core.sparse_linear import instructions, pack
from fedprune_app.exports.formats import pack_model
from fedprune_app.models import sparse
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import load_packed, write_packed
from fedprune_app.models.sparse import (
    SparseLinear,
    Speed,
    sparsify,
    speed_of,
)
from tests.examples import full
from tests.models.tiny_llm import tiny_checkpoint, tokens

compiled = pytest.mark.skipif(not instructions(), reason="needs the library in C")


@pytest.fixture
def always_faster(monkeypatch):
    """Packed layers count as faster than dense ones, however small they are."""
    monkeypatch.setattr(sparse, "speed_of", lambda *_: Speed(2.0, 1.0))


def pruned_network(density=0.3):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(70, 40), nn.ReLU(), nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 5))
    )
    for module in network.modules():
        if isinstance(module, nn.Linear) and module.out_features > 5:
            module.weight.data *= torch.rand_like(module.weight) < density
    return network.requires_grad_(False)


@compiled
def test_a_network_computes_the_same_from_its_kept_weights(always_faster):
    network = pruned_network()
    small = copy.deepcopy(network)
    assert sparsify(small) == ["0", "2.0"]  # the last layer has no zeros
    assert [type(each) for each in (small[0], small[2][1])] == [SparseLinear, nn.Linear]
    for inputs in (torch.randn(1, 70), torch.randn(50, 70)):
        torch.testing.assert_close(small(inputs), network(inputs))
    assert f"in_features=70, out_features=40, density={small[0].matrix.density:.3f}" in repr(small)


@compiled
def test_a_sparse_network_is_saved_and_read_as_any_other(always_faster):
    network, other = pruned_network(), pruned_network()
    sparsify(network), sparsify(other)
    other[0].values.zero_()
    other.load_state_dict(network.state_dict())
    inputs = torch.randn(3, 70)
    assert torch.equal(other(inputs), network(inputs))


def test_layers_that_are_faster_dense_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(sparse, "speed_of", lambda *_: Speed(1.0, 1.0))
    network = pruned_network()
    assert sparsify(network) == []
    assert type(network[0]) is nn.Linear


@compiled
@pytest.mark.parametrize("num_bytes", [0, 10**6])
def test_both_ways_are_measured(num_bytes):
    speed = speed_of(torch.eye(16), pack(torch.eye(16)), num_bytes)
    assert min(speed.dense, speed.packed) > 0


@pytest.mark.parametrize(("packed", "is_faster"), [(0.5, True), (0.95, True), (0.96, False), (2.0, False)])
def test_a_packed_layer_must_be_faster_by_more_than_the_noise(packed, is_faster):
    assert Speed(1.0, packed).is_packed_faster == is_faster


@compiled
@pytest.mark.parametrize("family", ["opt", "llama", full("qwen2"), full("qwen3"), full("mistral"), full("phi")])
@pytest.mark.parametrize("dtype", [torch.float32, full(torch.bfloat16)])
def test_a_packed_language_model_computes_from_its_kept_weights(family, dtype, tmp_path, always_faster):
    model = LanguageModel(tiny_checkpoint(tmp_path / "dense", family, dtype=dtype))
    write_packed(model, half_of(model), tmp_path / "packed")
    dense, small = load_packed(tmp_path / "packed"), load_packed(tmp_path / "packed", sparse=True)
    assert sum(isinstance(module, SparseLinear) for module in small.modules()) == 3 * len(model.prunable(0))
    with torch.inference_mode():
        for ids in (tokens(1, 1), tokens(2, 5), tokens(2, 30)):
            expected, found = dense(ids).logits, small(ids).logits
            assert float((expected - found).abs().max() / expected.abs().max()) < (
                1e-4 if dtype == torch.float32 else 0.05
            )
        if dtype == torch.float32:
            said = [each.generate(tokens(1, 4), max_new_tokens=8, do_sample=False) for each in (dense, small)]
            assert torch.equal(*said)


def half_of(model):
    def layer(number):
        tensors = model.layer_tensors(number)
        names = model.prunable(number)
        draw = torch.Generator().manual_seed(number)
        masks = {name: torch.rand(tensors[name].shape, generator=draw) < 0.5 for name in names}
        return Payload.pruned({name: tensors[name] for name in names}, masks)

    return layer


@compiled
def test_a_checkpoint_whose_weights_are_zeros_is_packed_and_measured(tmp_path, always_faster):
    model = LanguageModel(tiny_checkpoint(tmp_path / "dense", "llama"))
    write_packed(model, half_of(model), tmp_path / "first")
    load_packed(tmp_path / "first").save_pretrained(tmp_path / "zeros")
    found = pack_model(tmp_path / "zeros", tmp_path / "packed")
    assert found.density == pytest.approx(0.5, abs=0.05)
    assert (found.layers, found.sparse_layers) == (21, 21)
    assert found.sparse.disk < found.dense.disk
    assert min(found.dense.milliseconds, found.sparse.milliseconds) > 0
    assert torch.equal(
        load_packed(tmp_path / "packed")(tokens(1, 5)).logits, load_packed(tmp_path / "first")(tokens(1, 5)).logits
    )


def test_a_damaged_packed_model_is_refused(tmp_path):
    model = LanguageModel(tiny_checkpoint(tmp_path / "dense", "llama"))
    write_packed(model, half_of(model), tmp_path / "packed")
    part = tmp_path / "packed" / "part-00001.fp"
    part.write_bytes(part.read_bytes()[:-1])
    for is_sparse in (False, True):
        with pytest.raises(ValueError, match=r"part-00001\.fp is damaged"):
            load_packed(tmp_path / "packed", sparse=is_sparse)
