"""A GGUF file is a model like any other: computed once into a cached folder, and refused in one line."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from fedprune_app.config import DEFAULTS, OPTIONS  # noqa: E402
from fedprune_app.models.gguf import _converted_folder  # noqa: E402
from fedprune_app.models.llm import LanguageModel  # noqa: E402
from fedprune_app.models.sources import model_digest, resolve_checkpoint  # noqa: E402
from fedprune_app.models.transformers import import_transformers  # noqa: E402
from tests.models.tiny_gguf import gguf_model, write_gguf  # noqa: E402
from tests.models.tiny_llm import text_folder  # noqa: E402

KINDS = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _converted_folder.cache_clear()
    return tmp_path / "cache" / "fedprune"


@pytest.mark.parametrize(
    ("kind", "apart"), [(KINDS.F32, 1e-6), (KINDS.F16, 1e-3), (KINDS.Q8_0, 0.01), (KINDS.Q4_1, 0.1)]
)
def test_its_weights_and_tokens_are_those_of_the_model_that_was_written(tmp_path, cache, kind, apart):
    model = gguf_model()
    folder = resolve_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", model, kind)), download=False)
    assert folder.parent == cache
    found = import_transformers().AutoModelForCausalLM.from_pretrained(folder)
    assert found.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=apart)
    opened = LanguageModel(folder)
    assert opened.encode("a text: é\n").tolist() == list("a text: é\n".encode())
    assert opened.encode("the").tolist() == [ord("t"), 256]
    assert opened.num_layers == 2


def test_it_is_computed_once_whatever_the_file_is_called_and_anew_where_the_copy_is_damaged(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf", gguf_model())
    folder = resolve_checkpoint(str(file), download=False)
    weights = folder / "model.safetensors"
    before, written = weights.read_bytes(), weights.stat().st_mtime_ns
    assert resolve_checkpoint(str(file.rename(tmp_path / "other.gguf")), download=False) == folder
    assert weights.stat().st_mtime_ns == written
    weights.write_bytes(before[:-1])
    _converted_folder.cache_clear()  # as in the next process
    assert resolve_checkpoint(str(tmp_path / "other.gguf"), download=False) == folder
    assert weights.read_bytes() == before
    write_gguf(tmp_path / "other.gguf", gguf_model(seed=1))
    assert resolve_checkpoint(str(tmp_path / "other.gguf"), download=False) != folder


def test_the_digest_of_a_gguf_file_is_its_own(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", gguf_model())
    folder = resolve_checkpoint(str(file), download=False)
    assert model_digest(str(file), folder) == hashlib.sha256(file.read_bytes()).hexdigest()


def refusal(path) -> str:
    with pytest.raises(ValueError, match=r"\.gguf|fedprune\[gguf\]") as error:
        resolve_checkpoint(str(path), download=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_transformers_leaves_out_of_a_file_is_refused(tmp_path):
    """Positions of LLaMA 3.1 and later are scaled by a tensor, others by a key: without them it is another network."""
    file = write_gguf(tmp_path / "tiny.gguf", gguf_model())
    assert resolve_checkpoint(str(file), download=False).is_dir()
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(tmp_path / "waves.gguf", "llama")
    scaled = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for each in (writer, scaled):
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                each.add_key_value(name, field.contents(), field.types[0], field.types[-1])
        for tensor in reader.tensors:
            each.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    scaled.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    for each in (writer, scaled):
        each.write_header_to_file()
        each.write_kv_data_to_file()
        each.write_tensors_to_file()
        each.close()
    for name, lost in {"waves": "4 numbers more, such as .'rope_freqs", "scaled": "llama.rope.scaling.type"}.items():
        told = rf"{name}.gguf' has {lost}.*, which transformers leaves out, allowed: "
        with pytest.raises(ValueError, match=told) as said:
            resolve_checkpoint(str(tmp_path / f"{name}.gguf"), download=False)
        assert "\n" not in str(said.value)


def test_what_is_no_model_is_refused_in_one_line(tmp_path, cache):
    model, path = gguf_model(), tmp_path / "tiny.gguf"
    assert refusal(path) == f"model is '{path}': no such file"
    whole = write_gguf(path, model).read_bytes()
    for size in (0, 3, 20, 2000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        assert refusal(path).startswith(f"model '{path}' cannot be read ("), size
    write_gguf(path, model, has_tokenizer=False)
    assert refusal(path).endswith("of a language model that transformers knows, with its tokenizer")
    write_gguf(path, model, architecture="bert")
    assert "bert" in refusal(path)
    assert [each for each in cache.iterdir() if each.suffix != ".lock"] == []


def test_its_tokenizer_is_its_own_and_never_that_of_files_beside_it(tmp_path):
    """The copy is named by the file's content alone, so it must follow from that."""
    path = write_gguf(tmp_path / "tiny.gguf", gguf_model(), has_tokenizer=False)
    for beside in resolve_checkpoint(str(write_gguf(tmp_path / "whole.gguf", gguf_model())), download=False).iterdir():
        if not beside.name.endswith(".safetensors"):
            (tmp_path / beside.name).write_bytes(beside.read_bytes())
    assert refusal(path).endswith("with its tokenizer")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    assert refusal(path) == "GGUF files need the package gguf: install the extra fedprune[gguf]"


def test_its_path_begins_at_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert OPTIONS["model"].from_here("models/tiny.gguf") == str(tmp_path / "models" / "tiny.gguf")
    assert OPTIONS["model"].from_here(DEFAULTS["model"]) == "auto"


@pytest.mark.full
def test_a_run_prunes_it(fedprune, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", gguf_model())
    text_folder(tmp_path / "texts")
    settings = ["system=fedspallm", "dataset=text", "data-dir=texts", "model=tiny.gguf", "num-server-rounds=1"]
    settings += ["fedspallm.segments=2", "fedspallm.segment-length=16", "fedspallm.window=16", "fraction-train=1"]
    code, said = fedprune("run", *settings, "--clients", "2", "--engine", "inprocess", "--out", "run")
    assert code == 0, said
    pruned = LanguageModel(tmp_path / "run" / "models" / "global")
    kept = [(tensor != 0).float().mean().item() for name, tensor in pruned.layer_tensors(0).items() if "proj" in name]
    assert kept == pytest.approx([0.5] * 7, abs=0.01)
    assert pruned.encode("abc").tolist() == list(b"abc")
