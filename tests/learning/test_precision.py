"""A network computes in the format that the key ``precision`` names; weights and what is told stay float32."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.config import parse_config
from fedprune_app.core.rng import generator
from fedprune_app.learning.device import prepare_torch
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.models.vision import build_model, state_tensors
from tests.refusing import refuses

IMAGES, LABELS = torch.randn(20, 1, 8, 8, generator=generator(0, "images")), torch.arange(20) % 10


def trained(precision):
    """The result, the weights, and the formats in which a convolution gave its outputs in training and in a test."""
    model = build_model("cnn-small", (1, 8, 8), 10, rng=generator(0, "init"))
    formats = []
    # in float64 two layouts are compared, once
    model.conv1.register_forward_hook(lambda *_: formats.append(_[-1].dtype) if _[-1].dtype != torch.float64 else None)
    result = train(model, IMAGES, LABELS, SGD(0.1), rng=generator(0, "order"), precision=precision)
    accuracy = evaluate(model, IMAGES, LABELS, precision=precision)
    return result, accuracy, state_tensors(model), formats


def test_bfloat16_is_for_the_passes_and_weights_stay_float32(monkeypatch):
    monkeypatch.setattr("fedprune_app.learning.training.MOST_FLOPS", 0)  # hooks see the network's own form alone
    in_bf16, in_float32 = trained("bf16"), trained("float32")
    assert in_bf16[3] == [torch.bfloat16] * 3  # two steps of ten examples and a test
    assert set(in_float32[3]) == {torch.float32}
    for name, weights in in_bf16[2].items():
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights, in_float32[2][name], rtol=0.1, atol=0.02)
    assert any(not torch.equal(weights, in_float32[2][name]) for name, weights in in_bf16[2].items())
    assert in_bf16[0].loss_mean == pytest.approx(in_float32[0].loss_mean, rel=0.02)
    assert in_bf16[1].loss_mean == pytest.approx(in_float32[1].loss_mean, rel=0.02)


PRIVATE = {"dp.enabled": True, "dp.noise-multiplier": 1.0, "subfedavg.gate-split": "none"}


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        (PRIVATE, "bf16"),
        (PRIVATE, "tf32"),
        ({"system": "fedspallm"}, "bf16"),
    ],
)
def test_what_needs_more_bits_refuses_fewer(settings, precision):
    with refuses("precision", precision, condition="with ", allowed="float32"):
        parse_config({**settings, "precision": precision})


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("float32", False)])
def test_tf32_is_on_where_it_is_asked_for(precision, allowed):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not allowed
    try:
        prepare_torch(parse_config({"precision": precision, "device": "cpu", "num-threads": torch.get_num_threads()}))
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (allowed, allowed)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_algorithms_are_asked_of_a_cuda_device(deterministic, monkeypatch):
    settings = {"deterministic": deterministic, "num-threads": torch.get_num_threads()}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
        prepare_torch(parse_config({**settings, "device": device}))
        asked = device == "cuda" and deterministic
        assert torch.are_deterministic_algorithms_enabled() == asked
        assert torch.backends.cudnn.deterministic == asked
        torch.use_deterministic_algorithms(False)
