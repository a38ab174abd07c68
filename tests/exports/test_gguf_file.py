"""GGUF files of language models: weights, settings and tokens are the model's, and llama.cpp computes the same."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from fedprune_app import cli  # noqa: E402
from fedprune_app.exports.gguf_file import TYPES, write_gguf  # noqa: E402
from fedprune_app.models.embedded import byte_tokenizer  # noqa: E402
from fedprune_app.models.gguf import folder_of_gguf  # noqa: E402
from fedprune_app.models.llm import LanguageModel  # noqa: E402
from fedprune_app.models.transformers import import_transformers  # noqa: E402
from tests.examples import full  # noqa: E402
from tests.models.tiny_gguf import gguf_model  # noqa: E402
from tests.models.tiny_gguf import write_gguf as write_source  # noqa: E402
from tests.models.tiny_llm import drawn_model, tiny_byte_model  # noqa: E402

KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SHAPES = {
    "plain": {},
    "cut": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},  # more than width / heads
    "wide": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},  # transformers takes this as given
    "tied": {"tie_word_embeddings": True},
    "waves of LLaMA 3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}
CASES = [("llama", "cut"), ("qwen3", "wide"), ("mistral", "plain"), full("qwen2", "tied"), full("llama", "tied")]
LAYER = "model.layers.1.mlp."


def tiny(folder, family="llama", dtype=torch.float32, **settings):
    """A checkpoint of width 64, whose 88 feed-forward units are no multiple of 32, and whose tokens are bytes."""
    options = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **({"head_dim": 16} if family == "qwen3" else {}),
        **settings,
    }
    model = drawn_model(getattr(import_transformers(), f"{KINDS[family]}Config")(**options), seed=3).to(dtype)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def loaded(path):
    return import_transformers().AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)


def tensors_in(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_transformers_reads_the_model_that_was_written(family, shape, tmp_path):
    model, path = tiny(tmp_path / "model", family, **SHAPES[shape]), tmp_path / "model.gguf"
    assert write_gguf(LanguageModel(tmp_path / "model"), path) == "F32"
    found = loaded(path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    ids = torch.arange(40)[None]
    torch.testing.assert_close(found(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_matrices_are_rounded_and_units_filled_up_to_whole_blocks(kind, tmp_path):
    model, path = tiny(tmp_path / "model"), tmp_path / "model.gguf"
    assert write_gguf(LanguageModel(tmp_path / "model"), path, kind) == kind
    found = tensors_in(path)
    units = 88 if kind == "BF16" else 96
    assert found["blk.1.ffn_down.weight"].shape.tolist() == [units, 64]
    ends = {found[name].tensor_type.name for name in ("token_embd.weight", "output.weight")}
    assert ends == {"BF16" if kind == "BF16" else "Q8_0"}
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    for part in ("gate", "up", "down"):
        tensor = found[f"blk.1.ffn_{part}.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        values, rest = (values[:, :88], values[:, 88:]) if part == "down" else (values[:88], values[88:])
        expected = model.state_dict()[f"{LAYER}{part}_proj.weight"]
        assert (values - expected).abs().max() <= TYPES[kind] * expected.abs().max()
        assert part == "down" or not rest.any()  # what leaves a unit of 0 is multiplied by 0


def test_rows_below_the_steps_of_16_bit_scales_are_written(tmp_path):
    """Tokens that were never trained have such rows."""
    model = tiny(tmp_path / "model")
    with torch.no_grad():
        model.model.embed_tokens.weight[3:60] *= torch.logspace(-8, -2, 57)[:, None]
    model.save_pretrained(tmp_path / "model")
    for kind in ("Q8_0", "F16", "Q4_0"):
        write_gguf(LanguageModel(tmp_path / "model"), tmp_path / f"{kind}.gguf", kind)


def test_zeros_stay_zeros_in_blocks_of_type_q4_0(tmp_path):
    model, path = tiny(tmp_path / "model"), tmp_path / "model.gguf"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)) < 0.5] = 0
    model.save_pretrained(tmp_path / "model")
    write_gguf(LanguageModel(tmp_path / "model"), path, "Q4_0")
    tensor = tensors_in(path)["blk.0.attn_v.weight"]
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert not values[(model.state_dict()["model.layers.0.self_attn.v_proj.weight"] == 0).numpy()].any()


def test_codes_are_packed_as_they_are_and_must_be_the_models(tmp_path):
    model, path = tiny(tmp_path / "model"), tmp_path / "model.gguf"
    codes = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" not in name or parameter.dim() == 1:
                continue
            values = np.pad(parameter.numpy(), [(0, 0), (0, -parameter.shape[1] % 32)])
            data = gguf.quants.quantize(values * 1.5, gguf.GGMLQuantizationType.Q4_1)  # other scales than rounding has
            codes[name] = "Q4_1", torch.from_numpy(data)
            weights = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_1)[:, : parameter.shape[1]]
            parameter.copy_(torch.from_numpy(weights))
    model.save_pretrained(tmp_path / "model")
    assert write_gguf(LanguageModel(tmp_path / "model"), path, codes=codes) == "Q4_1"
    found, name = tensors_in(path), f"{LAYER}down_proj.weight"
    assert found["blk.1.ffn_down.weight"].data.tobytes() == codes[name][1].numpy().tobytes()
    assert torch.equal(
        loaded(path).state_dict()["model.layers.0.self_attn.q_proj.weight"],
        model.state_dict()["model.layers.0.self_attn.q_proj.weight"],
    )
    codes[name][1][5, 0] ^= 1
    with pytest.raises(ValueError, match=f"tensor '{name}' is another one in the GGUF file"):
        write_gguf(LanguageModel(tmp_path / "model"), path, codes=codes)


def test_an_export_of_a_gguf_files_model_has_that_files_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, path = write_source(tmp_path / "source.gguf", gguf_model()), tmp_path / "model.gguf"
    write_gguf(LanguageModel(folder_of_gguf(source)), path)
    before, after = (gguf.GGUFReader(file) for file in (source, path))
    for name, field in before.fields.items():
        if name.startswith(("tokenizer.", "llama.")):
            assert after.fields[name].contents() == pytest.approx(field.contents()), name
    contents = [{tensor.name: tensor.data.tobytes() for tensor in file.tensors} for file in (before, after)]
    assert contents[0] == contents[1]


def test_what_a_gguf_file_does_not_hold_is_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"

    def refuse(folder, match, kind=""):
        with pytest.raises(ValueError, match=match) as caught:
            write_gguf(LanguageModel(folder), path, kind)
        assert "\n" not in str(caught.value)

    refuse(tiny_byte_model(tmp_path / "phi", "phi"), "PhiConfig, .* with model_type 'phi', allowed: llama, mistral")
    tiny(tmp_path / "gelu", hidden_act="gelu")
    refuse(tmp_path / "gelu", "hidden_act 'gelu', allowed: silu")
    tiny(tmp_path / "yarn", rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0})
    refuse(tmp_path / "yarn", "rope_type 'yarn', allowed: default, linear, llama3")
    tiny(tmp_path / "qwen2", "qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    refuse(tmp_path / "qwen2", "rope_type 'linear', allowed: default")
    tiny(tmp_path / "cut", "qwen2", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    refuse(tmp_path / "cut", "with heads that were cut: llama.cpp reads Qwen 2 with all of its heads")
    refuse(tiny_byte_model(tmp_path / "narrow", "llama"), r"'model.embed_tokens.weight' has rows of 16 weights", "Q4_0")
    refuse(tmp_path / "narrow", "--type is 'Q3_K', allowed: F32, F16", "Q3_K")
    file = tmp_path / "narrow" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    content["model"]["merges"] = [["a", "b"]]
    file.write_text(json.dumps(content))
    refuse(tmp_path / "narrow", "tokenizer.json' is no tokenizer that a GGUF file can have, allowed: byte-level BPE")
    file.unlink()
    refuse(tmp_path / "narrow", "tokenizer.json' is no tokenizer")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fedprune(monkeypatch, capsys):
    """The command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprune", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return call


def test_the_command_writes_the_file_and_says_how_to_use_it(fedprune, tmp_path, monkeypatch):
    tiny(tmp_path / "model")
    path = tmp_path / "new" / "small.gguf"
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    code, out, err = fedprune("export", tmp_path / "model", "-o", path, "--type", "Q8_0")
    assert code == 0, err
    assert [each.name for each in path.parent.iterdir()] == ["small.gguf"]
    for words in ("Q8_0", f"{path.stat().st_size / 1e6:.2f}", "llama-cli -m", "ollama create small", "gguf_file="):
        assert words in out
    for arguments, says in (
        ((path,), "exists, allowed: a new file"),
        ((tmp_path / "a.gguf", "--type", "Q3_K"), "--type is 'Q3_K'"),
        ((tmp_path / "a.gguf", "--format", "packed"), "--format is 'packed'"),
        ((tmp_path / "a", "--type", "Q8_0"), "--type is 'Q8_0'"),
        ((tmp_path / "a.gguf", "--client", "1"), "--client is '1'"),
    ):
        code, _, err = fedprune("export", tmp_path / "model", "-o", *arguments)
        assert says in err
        assert (code, err.count("\n")) == (2, 1)
    assert {each.name for each in tmp_path.iterdir()} == {"model", "new"}
    assert fedprune("export", tmp_path / "model", "-o", path, "--force")[0] == 0
    code, _, err = fedprune("predict", path, "a text")
    assert (code, "the extra fedprune[llamacpp]" in err) == (2, True), err


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama_cpp():
    pytest.importorskip("xllamacpp")
    from fedprune_app.exports.llama_cpp import LlamaCpp

    return LlamaCpp


@pytest.mark.programs
@pytest.mark.parametrize(("family", "shape"), [*CASES, ("llama", "waves of LLaMA 3")])
def test_llama_cpp_continues_a_text_as_transformers_does(family, shape, llama_cpp, tmp_path):
    model, path = tiny(tmp_path / "model", family, **SHAPES[shape]), tmp_path / "model.gguf"
    opened = LanguageModel(tmp_path / "model")
    write_gguf(opened, path)
    prompt = opened.encode("Tokens of 32 bytes, naïve.\n")
    found = llama_cpp(path, threads=1).complete(prompt.tolist(), 32, ends=False)
    options = {"max_new_tokens": 32, "do_sample": False}
    assert found.tokens == model.generate(prompt[None], **options)[0, len(prompt) :].tolist()


@pytest.mark.programs
@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_llama_cpp_splits_a_text_as_the_tokenizer_does(split, llama_cpp, tmp_path):
    import httpx

    from fedprune_app.models.gguf_keys import _SPLITS

    tiny(tmp_path / "model", vocab_size=262)
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    steps = [{"add_prefix_space": False, "trim_offsets": True, "use_regex": False, **step} for step in _SPLITS[split]]
    for step in steps:
        if step["type"] == "Split":
            step |= {"behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
    merges = [["1", "2"], ["3", "4"], ["Ġ", "s"], ["Ċ", "Ċ"], ["n", "t"]]
    tokenizer["model"]["merges"] = merges
    tokenizer["model"]["vocab"] |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    tokenizer["added_tokens"] = [{"id": 261, "content": "<end>", "special": True, "single_word": False}]
    for flag in ("lstrip", "rstrip", "normalized"):
        tokenizer["added_tokens"][0][flag] = False
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    opened = LanguageModel(tmp_path / "model")
    write_gguf(opened, tmp_path / "model.gguf")
    runtime = llama_cpp(tmp_path / "model.gguf")
    for text in (
        "don't split 12,345 tokens:\n\n\t  x = f(3.14)  # naïve Żółć, 日本語 🙂",
        "Want  so\r\n\n so 1234<end>12",
    ):
        reply = httpx.post(
            f"{runtime._server.listening_address}/tokenize", json={"content": text, "parse_special": True}
        )
        assert reply.json()["tokens"] == opened.encode(text).tolist(), text


@pytest.mark.programs
def test_the_command_times_a_token_and_predict_continues_texts(llama_cpp, fedprune, tmp_path):
    tiny(tmp_path / "model")
    path = tmp_path / "small.gguf"
    code, out, err = fedprune("export", tmp_path / "model", "-o", path, "--type", "Q4_0")
    assert code == 0, err
    (row,) = [line.split() for line in out.splitlines() if "Q4_0" in line]
    assert float(row[-2]) > 0
    code, out, err = fedprune("predict", path, "a//text", "--json")
    assert code == 0, err
    assert len(json.loads(out)["a//text"]) > 0
    path.write_bytes(b"GGUF")
    code, _, err = fedprune("predict", path, "a text")
    assert (code, "llama.cpp cannot load" in err) == (2, True), err


def test_codes_whose_rows_end_within_a_block_are_refused_but_for_feed_forward_units(tmp_path):
    tiny(tmp_path / "llm", num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    model = LanguageModel(tmp_path / "llm")
    name = "model.layers.0.self_attn.o_proj.weight"
    codes = {name: ("Q4_1", torch.zeros(64, 20, dtype=torch.uint8))}
    with pytest.raises(ValueError, match=f"of type Q4_1: '{name}' has rows of 16 weights"):
        write_gguf(model, tmp_path / "model.gguf", codes=codes)
