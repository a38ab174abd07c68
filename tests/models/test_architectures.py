"""Models of many architectures: pruned layer by layer, they are what transformers makes of the files."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from fedprune_app.models.embedded import byte_tokenizer
from fedprune_app.models.layer_pruning import Pruner, check_layers, prune_layer, same_inputs
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import load_packed, write_checkpoint, write_packed
from tests.examples import full
from tests.models.architectures import CONFIGS, stock_losses, tiny_folder
from tests.models.tiny_llm import text_folder

IDS = torch.randint(1, 256, (4, 24), generator=torch.Generator().manual_seed(1))
QUICK = ("GPT2", "GPTNeoX", "Gemma2", "Bloom", "Mixtral", "GptOss")
REFUSED = {
    "Mamba": "'mixer.dt_proj.weight' in layer 0 was given no input that is known",
    "Jamba": "'mamba.dt_proj.weight' in layer 0 was given no input that is known",
    "Rwkv": "was given no input that is known",
    "RecurrentGemma": "was given no input that is known",
    "Llama4Text": "'feed_forward.experts.down_proj.0' in layer 0 was given no input that is known",
    "Gemma3nText": "it calls them with more than their hidden states, or reads more than the last one's",
    "Zamba2": "it calls them with more than their hidden states, or reads more than the last one's",
}
WALKED = [kind for kind in CONFIGS if kind not in REFUSED]
QUICKLY_REFUSED = ("Mamba", "Llama4Text", "Gemma3nText")


def in_turn(kinds, quick, *quickest):
    """The quickest are in ``make test``, the quick in ``make full``, the others with the slow tests."""
    found = [pytest.param(kind, marks=pytest.mark.full if kind in quick else pytest.mark.slow) for kind in kinds]
    return [kind if kind in quickest else case for kind, case in zip(kinds, found, strict=True)]


def losses_of(model, hidden, layers):
    for layer in range(model.num_layers):
        hidden = torch.cat(list(model.run(model.layer(layer, layers(layer)), hidden, 3)))
    return model.losses(IDS, hidden)


def pruned_layers(model, pruner):
    hidden, found = model.embed(IDS, 3), {}
    for layer in range(model.num_layers):
        done = prune_layer(model, layer, model.layer(layer, model.layer_tensors(layer)), hidden, pruner, 3)
        hidden, found[layer] = done.hidden, done.payload
    return found, model.losses(IDS, hidden)


@pytest.mark.parametrize("kind", in_turn(WALKED, QUICK))
def test_a_model_is_pruned_layer_by_layer_and_is_then_what_transformers_loads(kind, tmp_path):
    folder = tiny_folder(tmp_path / "model", kind)
    model = LanguageModel(folder)
    check_layers(model)
    assert losses_of(model, model.embed(IDS, 3), model.layer_tensors) == pytest.approx(stock_losses(folder, IDS), 1e-6)
    layers, expected = pruned_layers(model, Pruner(density=0.5))
    kept = [payload.num_kept() for payload in layers.values()]
    assert sum(kept) == pytest.approx(model.num_parameters()[1] / 2, abs=100)
    write_checkpoint(model, layers.__getitem__, tmp_path / "pruned")
    assert stock_losses(tmp_path / "pruned", IDS) == pytest.approx(expected, 1e-6)
    again = LanguageModel(tmp_path / "pruned")
    for layer, payload in layers.items():
        tensors = again.layer_tensors(layer)
        assert {name: int(tensors[name].count_nonzero()) for name in payload.masks} == {
            name: int(tensor.count_nonzero()) for name, tensor in payload.tensors.items()
        }
    write_packed(model, layers.__getitem__, tmp_path / "packed")
    with torch.no_grad():
        logits = load_packed(tmp_path / "packed")(IDS, use_cache=False).logits
    found = F.cross_entropy(logits[:, :-1].transpose(1, 2), IDS[:, 1:], reduction="none").mean(1)
    assert found.tolist() == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss", "GPT2"])
@pytest.mark.parametrize("method", ["sparsegpt", full("wanda"), full("magnitude")])
def test_matrices_that_are_no_linear_module_are_pruned_by_their_own_inputs(kind, method, tmp_path):
    """An expert whose matrix is pruned by nothing but the tokens sent to it keeps what they say."""
    model = LanguageModel(tiny_folder(tmp_path / "model", kind))
    layers, _ = pruned_layers(model, Pruner(method, 0.5))
    dense = model.layer_tensors(0)
    for name, mask in layers[0].masks.items():
        assert mask.shape == dense[name].shape == model.layer_like(0)[name].shape
        assert mask.float().mean() == pytest.approx(0.5, abs=0.05)
        if method != "sparsegpt":
            assert torch.equal(layers[0].tensors[name], torch.where(mask, dense[name], 0))


def test_an_expert_to_which_no_token_is_sent_is_pruned_by_magnitude(tmp_path):
    model = LanguageModel(tiny_folder(tmp_path / "model", "Mixtral"))
    one_token = model.embed(torch.ones((1, 1), dtype=torch.int64), 1)
    tensors = model.layer_tensors(0)
    masks = {
        method: prune_layer(model, 0, model.layer(0, tensors), one_token, Pruner(method, 0.5), 1).payload
        for method in ("sparsegpt", "magnitude")
    }
    same = [
        expert
        for expert in range(4)
        if torch.equal(
            masks["sparsegpt"].tensors[f"mlp.experts.down_proj.{expert}"],
            masks["magnitude"].tensors[f"mlp.experts.down_proj.{expert}"],
        )
    ]
    assert len(same) == 2  # the token is sent to the two others


@pytest.mark.parametrize("kind", in_turn(REFUSED, QUICKLY_REFUSED, "Mamba"))
def test_a_model_that_cannot_be_walked_is_refused_with_its_class(kind, tmp_path):
    folder = tiny_folder(tmp_path / "model", kind)
    with pytest.raises(ValueError, match=f"is of {kind}Config, wh.*{REFUSED[kind]}") as refused:
        check_layers(LanguageModel(folder))
    assert "\n" not in str(refused.value)


def test_a_layer_of_experts_has_no_hessian_of_all_text(tmp_path):
    with pytest.raises(ValueError, match=r"is of MixtralConfig, .* allowed: fedspallm\.merge 'mean', without dp"):
        same_inputs(LanguageModel(tiny_folder(tmp_path / "model", "Mixtral")))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
@pytest.mark.parametrize("way", ["single", "sharded", full("stale")])
def test_the_files_are_those_that_transformers_loads(kind, way, tmp_path):
    folder = tiny_folder(tmp_path / "model", kind, **({"max_shard_size": "8KB"} if way == "sharded" else {}))
    if way == "stale":
        old = load_file(folder / "model.safetensors")
        save_file({name: tensor + 1 for name, tensor in old.items()}, folder / "old.safetensors")
        save_file({name: tensor + 1 for name, tensor in old.items()}, folder / "zz.safetensors")
        index = {"weight_map": dict.fromkeys(old, "old.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (folder / "model.safetensors.index.json").exists() == (way != "single")
    model = LanguageModel(folder)
    found = losses_of(model, model.embed(IDS, 3), model.layer_tensors)
    assert found == pytest.approx(stock_losses(folder, IDS), 1e-6)


def test_only_the_files_of_one_layer_are_read_for_one_layer(tmp_path, monkeypatch):
    model = LanguageModel(tiny_folder(tmp_path / "model", "Mixtral"))
    asked = []
    read = model.checkpoint._files.read
    monkeypatch.setattr(model.checkpoint._files, "read", lambda names: read(asked.extend(names) or asked))
    model.layer_tensors(1)
    assert asked
    assert all(".layers.1." in name for name in asked)


# --- before the start -------------------------------------------------------------------------------------------------


def quantized(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))


def eight_bits(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_words(folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["abc"])
    tokenizer.save_pretrained(folder)
    for path in folder.parent.glob("data/*/*.txt"):
        path.write_text("abc " * 2000)


@pytest.mark.parametrize(
    ("kind", "spoil", "says"),
    [
        ("Mamba", None, "is of MambaConfig, whose 'mixer.dt_proj.weight' in layer 0"),
        full("Gemma3nText", None, "is of Gemma3nTextConfig, which cannot be run layer by layer"),
        full("Llama", quantized, "is of LlamaConfig, whose weights are quantized (fp8), allowed: float32, float16"),
        full(
            "Llama", eight_bits, "is of LlamaConfig, and has tensor 'model.layers.0.self_attn.q_proj.weight' of F8_E4M3"
        ),
        full("Llama", other_words, "is of LlamaConfig, whose tokenizer gives the id 25"),
    ],
)
def test_check_and_run_refuse_what_cannot_be_pruned_before_the_start(fedprune, tmp_path, kind, spoil, says):
    text_folder(tmp_path / "data", 2, size=800)
    folder = tiny_folder(tmp_path / "model", kind)
    if spoil is not None:
        spoil(folder)
    for command, place in (("check", ()), ("run", ("--engine", "inprocess", "--out", "a"))):
        code, said = fedprune(command, *settings(), *place)
        assert code == 2, said
        assert says in said
        assert said.count("\n") == 1
    assert not (tmp_path / "a").exists()


def settings():
    own = {"segments": 3, "segment-length": 24, "window": 24}
    more = [f"fedspallm.{key}={value}" for key, value in own.items()]
    return ["system=fedspallm", "dataset=text", "data-dir=data", "model=model", "--clients", "2", *more]


@pytest.mark.parametrize("kind", in_turn(WALKED, ("GPTNeoX", "Mixtral")))
def test_a_run_records_the_density_and_the_perplexity_that_the_written_model_has(fedprune, tmp_path, kind):
    text_folder(tmp_path / "data", 2, size=800)
    folder = tiny_folder(tmp_path / "model", kind)
    assert fedprune("check", *settings())[0] == 0
    code, said = fedprune("run", *settings(), "--engine", "inprocess", "--out", "a", "num-server-rounds=1")
    assert code == 0, said
    row = json.loads((tmp_path / "a" / "rounds.jsonl").read_text().splitlines()[-1])
    written, dense = LanguageModel(tmp_path / "a" / "models" / "global"), LanguageModel(folder)
    kept = all_weights = 0
    for layer in range(written.num_layers):
        tensors = written.layer_tensors(layer)
        kept += sum(int(tensors[name].count_nonzero()) for name in dense.prunable(layer))
        all_weights += sum(tensors[name].numel() for name in dense.prunable(layer))
    assert all_weights == json.loads((tmp_path / "a" / "run.json").read_text())["model"]["prunable"]
    assert row["density_global"] == pytest.approx(kept / all_weights, abs=1e-3)
    assert row["density_global"] == pytest.approx(0.5, abs=1e-3)
    ids = written.encode((tmp_path / "data" / "test" / "first.txt").read_text())
    windows = ids[: len(ids) // 24 * 24].view(-1, 24)
    losses = stock_losses(tmp_path / "a" / "models" / "global", windows)
    assert row["perplexity_global"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
