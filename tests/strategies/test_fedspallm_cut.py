"""FedSpaLLM that cuts heads and units: an ordinary smaller checkpoint, which computes what the run has measured."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from clients.context import NodeContext
from clients.fedspallm import FedSpaLLMClient
from fedprune_app.config import parse_config
from fedprune_app.models.cutting import Cut
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import load_packed
from fedprune_app.models.transformers import import_transformers
from tests.models.tiny_llm import perplexity, text_folder, tiny_byte_model, tokens
from tests.refusing import refuses

CUT = {"fedspallm_merge": "hessians", "fedspallm_pattern": "cut", "density": 0.5}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def llm(request, tmp_path_factory):
    return tiny_byte_model(tmp_path_factory.mktemp("llm"), request.param)


@pytest.fixture
def run(federation, texts):
    def go(llm, **more):
        return federation(
            3,
            system="fedspallm",
            dataset="text",
            data_dir=str(texts),
            model=str(llm),
            num_server_rounds=more.pop("num_server_rounds", 1),
            fedspallm_segments=4,
            fedspallm_segment_length=16,
            fedspallm_window=32,
            **{**CUT, **more},
        )

    return go


def test_the_written_model_is_small_and_has_the_perplexity_that_was_measured(run, llm, texts):
    result = run(llm)
    folder = result.folder / "models" / "global"
    small = import_transformers().AutoModelForCausalLM.from_pretrained(folder)
    config = small.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (2, 1, 8)
    dense = import_transformers().AutoModelForCausalLM.from_pretrained(llm)
    kept, all_of_it = (sum(p.numel() for n, p in m.named_parameters() if "_proj.weight" in n) for m in (small, dense))
    assert 0.4 <= kept / all_of_it <= 0.5
    model = LanguageModel(folder)
    name = next(iter(result.info["dense_perplexity"]))
    windows = model.encode((texts / "test" / f"{name}.txt").read_text())
    windows = windows[: len(windows) // 32 * 32].view(-1, 32)
    found = perplexity(model, model.layer_tensors, windows, 8).value
    assert found == pytest.approx(result.rounds[-1]["perplexity_global"], rel=1e-4)


def test_the_packed_model_computes_as_the_small_one_does(run, llm):
    models = run(llm).folder / "models"
    small = import_transformers().AutoModelForCausalLM.from_pretrained(models / "global").eval()
    packed = load_packed(models / "global-packed")
    ids = tokens(2, 12)
    torch.testing.assert_close(packed(ids).logits, small(ids).logits)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_byte_model(tmp_path_factory.mktemp("llama"), "llama")


def test_clients_send_the_hessians_of_two_inputs_alone(run, llama):
    """Those of what heads and units give; all others would be sent for nothing."""
    few, many = run(llama), run(llama, fedspallm_pattern="")
    assert few.rounds[0]["bytes_up"] < 0.75 * many.rounds[0]["bytes_up"]


def test_a_private_client_plans_for_two_releases_a_layer(llama, texts, tmp_path):
    """So it adds less noise for the same epsilon than a client that sends the sums of all four inputs."""
    common = {"system": "fedspallm", "dataset": "text", "data-dir": str(texts), "model": str(llama), "seed": 1}
    common |= {"fedspallm.merge": "hessians", "dp.enabled": True, "dp.target-epsilon": 8.0}
    common |= {"num-server-rounds": 1, "fedspallm.segments": 4, "fedspallm.segment-length": 16}
    noise = []
    for pattern in ("cut", ""):
        client = FedSpaLLMClient(parse_config({**common, "fedspallm.pattern": pattern}), NodeContext(0, 3, tmp_path))
        noise.append(client.privacy.noise_multiplier)
    assert noise[0] == pytest.approx(noise[1] / math.sqrt(2), rel=0.05)


def test_recovery_trains_what_is_left(run, llama):
    result = run(
        llama,
        num_server_rounds=2,
        fedspallm_recovery_rounds=1,
        fedspallm_recovery_steps=5,
        fedspallm_recovery_segments=4,
    )
    for path in sorted((result.folder / "models" / "global").glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert tensor.shape[0] not in (24,), name
    assert result.rounds[1]["density_global"] == result.rounds[0]["density_global"]


@pytest.mark.parametrize("family", ["opt", "phi"])
def test_a_model_of_another_kind_is_refused(tmp_path, family):
    model = LanguageModel(tiny_byte_model(tmp_path / family, family))
    with pytest.raises(ValueError, match=r"allowed with fedspallm.pattern 'cut': one whose layers have q_proj"):
        Cut(model, 0.5)


def test_the_papers_mean_cannot_cut():
    with refuses("fedspallm.pattern", "cut"):
        parse_config({"system": "fedspallm", "dataset": "text", "data-dir": "/x", "fedspallm.pattern": "cut"})


@pytest.mark.parametrize("density", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_cut_keeps_the_share_that_was_asked_for(llama, density):
    model = LanguageModel(llama)
    cut, names = Cut(model, density), model.prunable(0)
    dense = model.layer_tensors(0)
    inputs = {name: torch.randn(50, dense[name].shape[1]) for name in names}
    layer = cut.layer(dense, {name: x.T @ x for name, x in inputs.items()})
    kept = layer.num_kept() / layer.num_elements()
    assert kept <= density + 1e-9 or cut.units == 1
    assert kept > density - 0.25  # one of two groups, or eight of 24 units
    if density == 1:
        assert all(torch.equal(layer.tensors[name], dense[name]) for name in names)
