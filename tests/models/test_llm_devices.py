"""Pruning and perplexity on every device there is; the CPU in float32 is the standard. Bodies are the same for all."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.core.masks import keep_count
from fedprune_app.core.sparsegpt import Hessian
from fedprune_app.models.layer_pruning import Pruner, prune_layer
from fedprune_app.models.llm import LanguageModel
from tests.core.one_matrix import sparsegpt
from tests.core.test_sparsegpt import reference
from tests.docs.scripts import script
from tests.examples import full, in_test
from tests.models.tiny_llm import DEVICES, FAMILIES, perplexity, tiny_checkpoint, tokens

DENSITY = 0.25  # of every row a whole number, so that Wanda, which counts by row, comes to the same


@pytest.fixture(params=in_test(FAMILIES, "llama"))
def folder(request, tmp_path):
    return tiny_checkpoint(tmp_path / request.param, request.param)


def pruned(folder, device, dtype="float32", **pruner):
    """(model, the second layer pruned)."""
    model = LanguageModel(folder, dtype, device)
    hidden = model.embed(tokens(7, 24), 3)
    module = model.layer(1, model.layer_tensors(1))
    return model, prune_layer(model, 1, module, hidden, Pruner(block_size=8, **pruner), 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [{"density": DENSITY}, {"n_of_m": (2, 4)}], ids=str)
def test_sparsegpt_is_the_papers_on_every_device(device, target):
    draw = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(12, 32, generator=draw), torch.randn(5, 20, 32, generator=draw)
    hessian = Hessian(32, device)
    for part in torch.split(inputs, 2):
        hessian.add(part.to(device))
    found, mask = sparsegpt(weight.to(device), hessian.matrix, block_size=8, **target)
    assert found.device.type == mask.device.type == torch.device(device).type
    expected, expected_mask = reference(weight, inputs, block_size=8, **target)
    assert torch.equal(mask.cpu(), expected_mask)
    torch.testing.assert_close(found.cpu(), expected.float(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["sparsegpt", full("wanda"), full("magnitude")])
def test_a_layer_in_float32_is_pruned_as_on_the_cpu(folder, device, method):
    _, standard = pruned(folder, "cpu", method=method, density=DENSITY)
    model, found = pruned(folder, device, method=method, density=DENSITY)
    assert next(iter(model.layer(1, model.layer_tensors(1)).parameters())).device.type == torch.device(device).type
    for name, mask in standard.payload.masks.items():
        assert torch.equal(found.payload.masks[name], mask), name
        assert int(mask.sum()) == keep_count(mask.numel(), DENSITY)
        torch.testing.assert_close(found.payload.tensors[name], standard.payload.tensors[name], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.hidden.cpu(), standard.hidden, atol=1e-3, rtol=1e-3)
    assert found.relative_error == pytest.approx(standard.relative_error, rel=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", full("bfloat16")])
@pytest.mark.parametrize("method", ["sparsegpt", full("wanda"), full("magnitude")])
def test_a_layer_in_half_precision_keeps_its_dtype_and_exactly_its_density(folder, device, dtype, method):
    _, standard = pruned(folder, "cpu", method=method, density=DENSITY)
    model, found = pruned(folder, device, dtype, method=method, density=DENSITY)
    assert model.dtype == found.hidden.dtype == getattr(torch, dtype)
    assert found.hidden.isfinite().all()
    assert found.payload.masks.keys() == standard.payload.masks.keys()
    for name, mask in found.payload.masks.items():
        tensor = found.payload.tensors[name]
        assert (tensor.dtype, tensor.device.type, mask.device.type) == (model.dtype, "cpu", "cpu")
        assert tensor.isfinite().all()
        assert int(mask.sum()) == keep_count(mask.numel(), DENSITY)
        assert not tensor[~mask].any()
        assert (mask == standard.payload.masks[name]).double().mean() > 0.9, name
    assert found.relative_error == pytest.approx(standard.relative_error, rel=0.15)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", full("float16"), full("bfloat16")])
def test_perplexity_is_that_of_the_cpu(folder, device, dtype):
    model, windows = LanguageModel(folder, dtype, device), tokens(5, 32)
    standard = LanguageModel(folder, "float32")
    expected = perplexity(standard, standard.layer_tensors, windows, 2)
    found = perplexity(model, model.layer_tensors, windows, 2)
    assert found.value == pytest.approx(expected.value, rel=1e-4 if dtype == "float32" else 0.05)
    assert (found.window, found.windows) == (expected.window, expected.windows)


def test_the_benchmark_is_in_the_papers_dtype_on_a_gpu():
    default_dtype = script("llm_layer").default_dtype
    assert [default_dtype(device) for device in ("cpu", "cuda", "cuda:1")] == ["float32", "float16", "float16"]
