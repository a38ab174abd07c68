"""Models that are made of the sums which a run kept: the very models that runs with these settings make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import load_file

from clients.fedspallm import FedSpaLLMClient
from clients.node import NodeContext
from fedprune_app.config import parse_config
from fedprune_app.core import hessians
from fedprune_app.exports.compressed import compress
from fedprune_app.exports.language import export_gguf
from fedprune_app.models.layer_pruning import input_matrices
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import read_codes
from fedprune_app.results.reader import load_run
from tests.examples import full
from tests.exports.test_gguf_file import tiny
from tests.models.tiny_llm import text_folder, tiny_byte_model
from tests.refusing import refuses

ALL = {"fedspallm_merge": "hessians", "fedspallm_keep_sums": True, "fedspallm_layers_per_exchange": 0}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return tiny_byte_model(tmp_path_factory.mktemp("llm"), "llama")


@pytest.fixture
def run(federation, texts, llm):
    def go(**more):
        return federation(
            3,
            system="fedspallm",
            dataset="text",
            data_dir=str(texts),
            fedspallm_segments=4,
            fedspallm_segment_length=16,
            fedspallm_window=32,
            **{"model": str(llm), "num_server_rounds": 1, "density": 0.5, **ALL, **more},
        )

    return go


def weights_in(folder):
    files = sorted((folder / "models" / "global").glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def check_codes(folder):
    """The rounded matrices are the model's weights, as llama.cpp reads their bytes."""
    weights, codes = weights_in(folder), read_codes(folder / "models" / "codes")
    assert codes.keys() == {name for name in weights if name.endswith("_proj.weight")}
    for name, (kind, packed) in codes.items():
        read = quants.dequantize(packed.numpy(), GGMLQuantizationType[kind])[:, : weights[name].shape[1]]
        assert np.array_equal(read, weights[name].numpy()), name
    return {kind for kind, _ in codes.values()}


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"fedspallm.bits": 4}, {"Q4_0"}),
        ({"density": 0.7}, set()),
        ({"fedspallm.pattern": "cut", "fedspallm.bits": 4}, {"Q4_1"}),
        full({"density": 1.0, "fedspallm.bits": 3}, {"Q4_1"}),
        full({"fedspallm.pattern": "2:4", "fedspallm.bits": 8}, {"Q8_0"}),
        full({"fedspallm.refine": True, "fedspallm.bits": 5}, {"Q5_0"}),
    ],
    ids=str,
)
def test_a_model_of_kept_sums_is_the_one_that_a_run_with_its_settings_makes(run, tmp_path, changes, kinds):
    info = compress(run().folder, changes, tmp_path / "new")
    own = run(**{key.replace(".", "_"): value for key, value in changes.items()})
    assert info["final_sha256"] == own.info["final_sha256"]
    assert info["perplexity"]["first"] == own.rounds[-1]["perplexity_global"]
    new = weights_in(tmp_path / "new")
    assert all(torch.equal(new[name], tensor) for name, tensor in weights_in(own.folder).items())
    assert load_run(tmp_path / "new").flaw == ""
    if kinds:
        assert check_codes(tmp_path / "new") == check_codes(own.folder) == kinds


def test_the_sums_of_all_layers_are_those_of_the_dense_model(run, llm):
    result = run()
    model = LanguageModel(llm)
    assert not any(message.down.tensors for message in result.wiretap.messages if message.kind == "train")
    assert len(list((result.folder / "sums").iterdir())) == model.num_layers


def test_layers_of_one_exchange_follow_the_pruned_ones_before_the_first_of_them(run, tmp_path):
    llm = tiny_byte_model(tmp_path / "llm", "llama", num_layers=4)
    result = run(model=str(llm), fedspallm_layers_per_exchange=2, fraction_train=1.0)
    model, pruned = LanguageModel(llm), LanguageModel(result.folder / "models" / "global")
    sent = {(m.partition, m.round - 1): m for m in result.wiretap.messages if m.kind == "train"}
    for partition in range(3):
        segments = FedSpaLLMClient(result.config, NodeContext(partition, 3, tmp_path)).segments()[0]
        hidden = model.embed(segments, 4)
        for layer in range(4):
            received = {int(name.partition("/")[0]) for name in sent[partition, layer].down.tensors}
            assert received == ({0, 1} if layer == 2 else set())
            if layer == 2:
                hidden = model.embed(segments, 4)
                for before in (0, 1):
                    hidden = model.pass_through(pruned.layer(before, pruned.layer_tensors(before)), hidden, 4)
            module = model.layer(layer, model.layer_tensors(layer))
            expected = hessians.encoded(input_matrices(model, module, model.prunable(layer), hidden, 4))
            for name, tensor in sent[partition, layer].up.tensors.items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)
            hidden = model.pass_through(module, hidden, 4)


@pytest.mark.parametrize("form", ["int8", "diagonal"])
def test_hessians_in_fewer_bits_travel_as_such_and_prune_to_the_density(run, form):
    result, plain = run(fedspallm_hessian_form=form), run()
    assert result.rounds[-1]["bytes_up"] < (0.55 if form == "int8" else 0.25) * plain.rounds[-1]["bytes_up"]
    assert result.rounds[-1]["density_global"] == pytest.approx(0.5)
    if form == "int8":
        assert result.rounds[-1]["perplexity_global"] == pytest.approx(plain.rounds[-1]["perplexity_global"], rel=0.02)


def test_a_recovered_model_is_rounded_as_it_is(run, tmp_path, fedprune):
    recovered = run(
        fedspallm_pattern="cut", num_server_rounds=2, fedspallm_recovery_rounds=1, fedspallm_recovery_segments=8
    )
    code, said = fedprune("compress", recovered.folder, "fedspallm.bits=8", "-o", "new")
    assert (code, "perplexity:" in said, "new/models/global:" in said) == (0, True, True), said
    assert check_codes(tmp_path / "new") == {"Q8_0"}
    before = weights_in(recovered.folder)
    for name, tensor in weights_in(tmp_path / "new").items():
        torch.testing.assert_close(tensor, before[name], atol=0.05 * float(before[name].abs().max()), rtol=0)


def test_a_gguf_file_of_a_rounded_model_has_the_bytes_that_the_run_found(run, tmp_path):
    tiny(tmp_path / "llm")
    rounded = run(model=str(tmp_path / "llm"), fedspallm_bits=4)
    export_gguf(rounded.folder, tmp_path / "model.gguf")
    codes = read_codes(rounded.folder / "models" / "codes")
    found = {each.name: each for each in GGUFReader(tmp_path / "model.gguf").tensors}
    kind, packed = codes["model.layers.0.self_attn.v_proj.weight"]
    assert (kind, found["blk.0.attn_v.weight"].tensor_type.name) == ("Q4_0", "Q4_0")
    assert np.array_equal(found["blk.0.attn_v.weight"].data, packed.numpy())


def test_a_run_that_pruned_layer_by_layer_can_only_be_rounded(run, tmp_path):
    result = run(fedspallm_layers_per_exchange=1)
    info = compress(result.folder, {"fedspallm.bits": 4}, tmp_path / "new")
    assert info["final_sha256"] != result.info["final_sha256"]
    with refuses("fedspallm.layers-per-exchange", 1):
        compress(result.folder, {"density": 0.7}, tmp_path / "newer")


@pytest.mark.parametrize(
    ("key", "value", "more"),
    [
        ("fedspallm.bits", 6, {}),
        ("fedspallm.bits", 4, {"num-server-rounds": 2, "fedspallm.recovery-rounds": 1}),
        ("fedspallm.hessian-form", "diagonal", {"fedspallm.refine": True}),
    ],
)
def test_bits_and_forms_that_cannot_be_are_refused(key, value, more):
    base = {"system": "fedspallm", "dataset": "text", "num-server-rounds": 1, "fedspallm.merge": "hessians"}
    with refuses(key, value):
        parse_config({**base, **more, key: value})


def test_what_cannot_be_compressed_is_refused(run, tmp_path):
    with refuses("seed", 7):
        compress(run().folder, {"seed": 7}, tmp_path / "new")
    with pytest.raises(ValueError, match=r"fedspallm\.keep-sums"):
        compress(run(fedspallm_keep_sums=False).folder, {}, tmp_path / "new")
    assert not (tmp_path / "new").exists()
