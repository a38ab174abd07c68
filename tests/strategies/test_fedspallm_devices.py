"""FedSpaLLM end to end on every device there is, for both families, in the papers' dtype too."""

from __future__ import annotations

import math

import pytest
import torch

from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.core.masks import keep_count
from fedprune_app.engine.layers import LayerFiles
from fedprune_app.engine.simulated_grid import run_in_process
from tests.conftest import Finished
from tests.examples import full, in_test
from tests.models.tiny_llm import DEVICES, FAMILIES, text_folder, tiny_byte_model

CLIENTS, DENSITY = 2, 0.4


@pytest.fixture(params=in_test(FAMILIES, "llama"))
def run(request, tmp_path):
    model = tiny_byte_model(tmp_path / "model", request.param)
    texts = text_folder(tmp_path / "texts")

    def go(name, device, dtype):
        folder = tmp_path / name
        settings = {"system": "fedspallm", "dataset": "text", "num-server-rounds": 1, "fraction-train": 1.0}
        settings |= {"batch-size": 3, "evaluate-every": 1, "density": DENSITY, "model": str(model)}
        settings |= {"fedspallm.segments": 4, "fedspallm.segment-length": 24, "fedspallm.window": 32}
        settings |= {"fedspallm.block-size": 8, "fedspallm.dtype": dtype}
        settings |= {"data-dir": str(texts), "device": device, "out-dir": str(folder)}
        run_in_process(server_app.app, client_app.app, CLIENTS, parse_config(settings).to_dict())
        return Finished(folder)

    return go


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", full("float16"), full("bfloat16")])
def test_a_run_prunes_to_the_density_and_measures_as_on_the_cpu(run, device, dtype):
    standard, found = run("standard", "cpu", "float32"), run("found", device, dtype)
    (row,), (expected,) = found.rounds, standard.rounds
    assert row["failures"] == 0
    for layer in range(2):
        payload = LayerFiles(found.folder / "layers").load(layer, 1, 10**6)
        for name, mask in payload.masks.items():
            assert int(mask.sum()) == keep_count(mask.numel(), DENSITY)
            assert payload.tensors[name].dtype == getattr(torch, dtype)
            assert payload.tensors[name].isfinite().all()
    assert row["density_global"] == expected["density_global"]
    close = 1e-2 if dtype == "float32" else 0.15
    for key in ("perplexity_global", "perplexity_personal_mean"):
        assert math.isfinite(row[key])
        assert row[key] == pytest.approx(expected[key], rel=close)
