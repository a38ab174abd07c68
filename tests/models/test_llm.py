"""A language model one decoder layer at a time, against transformers with the whole model in memory."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedprune_app.core.payload import Payload
from fedprune_app.models.checkpoints import TensorFiles
from fedprune_app.models.layer_pruning import Pruner, prune_layer
from fedprune_app.models.llm import LanguageModel, dense_perplexities, perplexities
from fedprune_app.models.saving import load_packed, write_packed
from fedprune_app.models.sources import resolve_checkpoint
from fedprune_app.models.transformers import import_transformers
from tests.core.one_matrix import sparsegpt
from tests.examples import full, in_test
from tests.models.tiny_llm import FAMILIES, perplexity, tiny_checkpoint, tiny_model, tokens


@pytest.fixture(scope="module", params=in_test(FAMILIES, "opt", "llama"))
def folder(request, tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


def whole(folder):
    return import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def layers_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def walk(model, ids, batch_size=3):
    hidden = model.embed(ids, batch_size)
    for layer in range(model.num_layers):
        module = model.layer(layer, model.layer_tensors(layer))
        hidden = torch.cat(list(model.run(module, hidden, batch_size)))
    return hidden


def test_layer_by_layer_is_the_whole_model(folder):
    model, ids = LanguageModel(folder), tokens(7, 20)
    with torch.no_grad():
        logits = whole(folder)(ids).logits
    expected = [float(F.cross_entropy(x[:-1], y[1:])) for x, y in zip(logits, ids, strict=True)]
    assert model.losses(ids, walk(model, ids)) == pytest.approx(expected, rel=1e-5)


def test_hidden_states_lie_on_a_gpu_if_they_take_little_of_it(tmp_path, monkeypatch):
    model = LanguageModel(tiny_checkpoint(tmp_path / "model", "llama"))
    assert model.home(1) == torch.device("cpu")
    model.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=4000))
    assert model.home(1000 // model.token_bytes) == model.device
    assert model.home(1000 // model.token_bytes + 1) == torch.device("cpu")


def test_perplexity_is_the_papers(folder):
    model, ids = LanguageModel(folder), tokens(4, 16)
    with torch.no_grad():
        logits = whole(folder)(ids).logits.double()
    total = 0.0
    for window in range(4):
        nll = -sum(float(logits[window, i].log_softmax(0)[ids[window, i + 1]]) for i in range(15)) / 15
        total += nll * 16
    found = perplexity(model, model.layer_tensors, ids, batch_size=3)
    assert found.value == pytest.approx(math.exp(total / (4 * 16)), rel=1e-5)
    assert (found.window, found.windows) == (16, 4)


def test_the_dense_model_is_measured_once_for_the_same_windows(tmp_path, monkeypatch):
    model = LanguageModel(tiny_checkpoint(tmp_path / "dense", "llama"))
    texts, others = {"a": tokens(4, 16), "b": tokens(2, 16)}, {"a": tokens(4, 12)}
    first = dense_perplexities(model, texts, batch_size=3)
    assert first == perplexities(model, model.layer_tensors, texts, batch_size=3)
    assert dense_perplexities(model, others, batch_size=3)["a"].window == 12
    monkeypatch.setattr(model, "embed", None)
    assert dense_perplexities(model, dict(texts), batch_size=3) == first


def test_all_matrices_of_a_layer_are_prunable_and_nothing_else(folder):
    model, reference = LanguageModel(folder), layers_of(whole(folder))
    for layer in range(model.num_layers):
        expected = {f"{n}.weight" for n, m in reference[layer].named_modules() if isinstance(m, nn.Linear)}
        assert set(model.prunable(layer)) == expected
        tensors = model.layer_tensors(layer)
        assert tensors.keys() == reference[layer].state_dict().keys()
        assert all(torch.equal(tensors[n], t) for n, t in reference[layer].state_dict().items())
    everything = whole(folder)
    num_all, num_prunable = model.num_parameters()
    assert num_all == sum(p.numel() for p in everything.parameters())
    assert num_prunable == sum(m.weight.numel() for m in reference.modules() if isinstance(m, nn.Linear))


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("target", [{"density": 0.5}, {"n_of_m": (2, 4)}])
def test_pruning_layer_by_layer_is_running_the_whole_model_anew_for_each(folder, target, batch_size):
    """The reference keeps all layers, and before each one runs the tokens through the whole model again."""
    ids = tokens(6, 24, seed=3)
    reference = whole(folder)
    reference_layers = layers_of(reference)
    model = LanguageModel(folder)
    hidden = model.embed(ids, batch_size)
    for layer in range(model.num_layers):
        pruned = prune_layer(
            model, layer, model.layer(layer, model.layer_tensors(layer)), hidden, Pruner(**target), batch_size
        )
        hidden = pruned.hidden
        seen = {name: [] for name, m in reference_layers[layer].named_modules() if isinstance(m, nn.Linear)}
        hooks = [
            reference_layers[layer]
            .get_submodule(name)
            .register_forward_hook(lambda module, arguments, output, inputs=inputs: inputs.append(arguments[0]))
            for name, inputs in seen.items()
        ]
        with torch.no_grad():
            for sequence in ids:
                reference(sequence[None])
        for hook in hooks:
            hook.remove()
        for name, inputs in seen.items():
            flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs]).double()
            hessian = (2 / len(ids) * flat.T @ flat).float()
            linear = reference_layers[layer].get_submodule(name)
            weight, mask = sparsegpt(linear.weight.data, hessian, **target)
            assert torch.equal(pruned.payload.masks[f"{name}.weight"], mask), (layer, name)
            torch.testing.assert_close(pruned.payload.tensors[f"{name}.weight"], weight, atol=1e-4, rtol=1e-3)
            linear.weight.data = weight


def test_the_error_told_is_that_of_the_layers_outputs(folder):
    model, ids = LanguageModel(folder), tokens(5, 12)
    hidden = model.embed(ids, 2)
    tensors = model.layer_tensors(0)
    before = torch.cat(list(model.run(model.layer(0, tensors), hidden, 2)))
    pruned = prune_layer(model, 0, model.layer(0, tensors), hidden, Pruner(density=0.3), 2)
    after = torch.cat(list(model.run(model.layer(0, {**tensors, **pruned.payload.tensors}), hidden, 2)))
    assert torch.equal(after, pruned.hidden)
    assert pruned.relative_error == pytest.approx(float((after - before).square().sum() / before.square().sum()))
    untouched = prune_layer(model, 0, model.layer(0, tensors), hidden, Pruner(density=1.0), 2)
    assert untouched.relative_error == 0


@pytest.mark.parametrize("method", ["wanda", full("magnitude")])
def test_other_pruners_keep_the_weights_that_stay(folder, method):
    model, ids = LanguageModel(folder), tokens(5, 12)
    tensors = model.layer_tensors(1)
    pruned = prune_layer(model, 1, model.layer(1, tensors), model.embed(ids, 2), Pruner(method, 0.5), 2)
    for name, mask in pruned.payload.masks.items():
        assert int(mask.sum()) == mask.numel() // 2
        assert torch.equal(pruned.payload.tensors[name], torch.where(mask, tensors[name], 0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_models_stay_what_they_are(tmp_path, dtype):
    folder = tiny_checkpoint(tmp_path, "llama", dtype=getattr(torch, dtype))
    model, ids = LanguageModel(folder), tokens(3, 12)
    assert model.dtype == getattr(torch, dtype)
    hidden = model.embed(ids, 2)
    pruned = prune_layer(model, 0, model.layer(0, model.layer_tensors(0)), hidden, Pruner(), 2)
    assert {t.dtype for t in pruned.payload.tensors.values()} == {hidden.dtype} == {model.dtype}
    assert math.isfinite(perplexity(model, model.layer_tensors, ids, 2).value)
    assert LanguageModel(folder, "float32").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", in_test(FAMILIES, "opt"))
def test_half_precision_models_compute_what_transformers_does_far_into_a_text_too(tmp_path, family, dtype):
    folder = tiny_checkpoint(tmp_path / "model", family, dtype=dtype)
    model, ids = LanguageModel(folder), tokens(2, 64)
    with torch.no_grad():
        logits = whole(folder)(ids).logits
        losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
        assert model.losses(ids, walk(model, ids)) == pytest.approx(losses.double().mean(1).tolist(), rel=1e-3)
        write_packed(model, lambda layer: Payload({}), tmp_path / "packed")
        assert torch.equal(load_packed(tmp_path / "packed")(ids).logits, logits)


@pytest.mark.full
def test_a_model_that_is_no_causal_language_model_is_refused_in_one_line(tmp_path):
    transformers = import_transformers()
    config = transformers.T5Config(vocab_size=37, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    transformers.T5Model(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="is of T5Config, allowed: a causal language model") as refused:
        LanguageModel(tmp_path / "t5")
    assert "\n" not in str(refused.value)


def test_more_tokens_than_the_model_was_made_for_are_refused(tmp_path):
    model = LanguageModel(tiny_checkpoint(tmp_path, "opt"))
    with pytest.raises(ValueError, match="sequences have 65 tokens, allowed with this model: 64"):
        model.embed(tokens(1, 65), 1)


def test_sequences_are_as_long_as_the_papers_where_the_model_takes_that(tmp_path):
    model = LanguageModel(tiny_checkpoint(tmp_path, "llama"))
    assert (model.sequence_length(0), model.sequence_length(32)) == (64, 32)
    model.max_length = 4096
    assert model.sequence_length(0) == 2048


@pytest.mark.parametrize(("key", "name"), [("intermediate_size", "model.layers.0.mlp"), ("vocab_size", "lm_head")])
def test_a_config_of_other_widths_is_refused_in_one_line(tmp_path, key, name):
    folder = tiny_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: config[key] + 4}))
    with pytest.raises(ValueError, match=f"tensor '{name}.*' is missing, or has another shape") as refused:
        walk(LanguageModel(folder), tokens(1, 4))
    assert "\n" not in str(refused.value)


def test_a_matrix_that_cannot_be_pruned_is_named(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    model = LanguageModel(folder)
    module = model.layer(1, model.layer_tensors(1))
    hidden = torch.full((2, 8, 16), 1e30)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight: .*(NaN|positive definite)"):
        prune_layer(model, 1, module, hidden * float("nan"), Pruner(), 1)


def test_digests_tell_layers_apart(tmp_path):
    a = LanguageModel(tiny_checkpoint(tmp_path / "a", "opt"))
    changed = tiny_model("opt")
    with torch.no_grad():
        layers_of(changed)[1].fc1.weight[0, 0] += 1
    changed.save_pretrained(tmp_path / "b")
    b = LanguageModel(tmp_path / "b")
    assert a.shell_digest() == b.shell_digest()
    assert [a.layer_digest(i) == b.layer_digest(i) for i in range(3)] == [True, False, True]


def test_sharded_checkpoints_and_old_names_are_read(tmp_path):
    model = tiny_model("opt")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    one, many = LanguageModel(tiny_checkpoint(tmp_path / "one", "opt")), LanguageModel(tmp_path / "sharded")
    assert one.layer_digest(2) == many.layer_digest(2)
    model.model.save_pretrained(tmp_path / "old")  # without the head model's prefix
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    (tmp_path / "old" / "config.json").write_text(json.dumps({**config, "architectures": ["OPTForCausalLM"]}))
    old = LanguageModel(tmp_path / "old")
    assert old.layer_digest(2) == one.layer_digest(2)
    ids = tokens(2, 8)
    assert old.losses(ids, walk(old, ids)) == one.losses(ids, walk(one, ids))


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        LanguageModel(tmp_path / "empty")
    folder = tiny_checkpoint(tmp_path / "a", "llama")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        LanguageModel(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no safetensors"):
        LanguageModel(folder)
    with pytest.raises(ValueError, match=r"of dtype torch\.int8, allowed: float32"):
        LanguageModel(tiny_checkpoint(tmp_path / "b", "llama"), "int8")


def test_a_missing_tensor_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"its tensor 'model\.norm\.weight' is missing"):
        LanguageModel(folder)
    assert "model.norm.weight" not in TensorFiles(folder).like


def test_a_hub_name_is_found_in_the_cache_and_never_fetched_unasked(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"not in the hub cache \(download=true fetches it\)"):
        resolve_checkpoint("someone/tiny", download=False)
    repository = tmp_path / "models--someone--tiny"
    tiny_checkpoint(repository / "snapshots" / "abc", "llama")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert resolve_checkpoint("someone/tiny", download=False) == repository / "snapshots" / "abc"
    with pytest.raises(ValueError, match=r"allowed: 'auto', a folder, a \.gguf file, or a name"):
        resolve_checkpoint("no such/fold er/x", download=False)
