"""Models that are made of the sums which a run kept: the very models that runs with these settings make."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from rich.console import Console
from safetensors.torch import load_file, save_file

from clients.fedspallm import FedSpaLLMClient
from clients.node import NodeContext
from fedprune_app.config import parse_config
from fedprune_app.core import hessians
from fedprune_app.exports.compressed import combine, compress
from fedprune_app.exports.language import export_gguf
from fedprune_app.models.layer_pruning import input_matrices
from fedprune_app.models.llm import LanguageModel, open_model
from fedprune_app.models.saving import read_codes
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.reader import load_run, read_info
from fedprune_app.running import Session
from strategies.merging import Compression, load_sums
from strategies.pruned_model import PrunedModel
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
            fedspallm_segments=4,
            fedspallm_segment_length=16,
            fedspallm_window=32,
            **{"data_dir": str(texts), "model": str(llm), "num_server_rounds": 1, "density": 0.5, **ALL, **more},
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


def test_zeros_that_a_dense_model_has_are_not_pruned_weights(run, llm, tmp_path):
    """With density 1 they once took the minimums from the grid: a model from a Q4_1 file was rounded to Q4_0."""
    folder = shutil.copytree(llm, tmp_path / "llm")
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensor[0, ::3] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    result = run(model=str(folder), density=1.0, fedspallm_bits=4)
    assert check_codes(result.folder) == {"Q4_1"}
    assert result.rounds[-1]["density_mean"] == 1.0


def test_the_sums_of_all_layers_are_those_of_the_dense_model(run, llm):
    result = run()
    model = LanguageModel(llm)
    assert not any(message.down.tensors for message in result.wiretap.messages if message.kind == "train")
    assert len(list((result.folder / "sums").iterdir())) == model.num_layers


@pytest.mark.full
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
    with pytest.raises(ValueError, match=r"keeps no sums.*fedspallm\.keep-sums"):
        compress(run(fedspallm_keep_sums=False).folder, {}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def with_other_weights(llm, folder, file="model.safetensors"):
    tensors = load_file(llm / file)
    save_file({name: 1.01 * tensor for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
    open_model.cache_clear()


def test_neither_a_run_nor_its_sums_go_on_with_a_dense_model_that_has_changed_since(run, llm, tmp_path):
    """Its layers would be the old one's, and its embeddings, norms and head the new one's."""
    folder = shutil.copytree(llm, tmp_path / "llm")
    result = run(model=str(folder))
    paper = {"fedspallm_merge": "mean", "fedspallm_keep_sums": False, "model": str(folder)}
    longer = run(**paper)
    with_other_weights(llm, folder)
    with refuses("model", str(folder), condition=""):
        compress(result.folder, {"fedspallm.bits": 4}, tmp_path / "new")
    with refuses("model", str(folder), condition=""):
        run(**{**paper, "num_server_rounds": 2, "resume_from": str(longer.folder)})
    assert not (tmp_path / "new").exists()


def test_perplexities_before_and_after_are_of_the_same_texts(run, texts, tmp_path, fedprune):
    """A test text changed after the run, and another one was added."""
    folder = shutil.copytree(texts, tmp_path / "texts")
    result = run(data_dir=str(folder))
    (folder / "test" / "first.txt").write_text("bad cab " * 60)
    (folder / "test" / "third.txt").write_text("a cabbage " * 60)
    code, said = fedprune("compress", result.folder, "fedspallm.bits=8", "-o", tmp_path / "new")
    assert (code, said.count("perplexity:")) == (0, 3), said
    info, before = read_info(tmp_path / "new"), result.info["dense_perplexity"]
    assert info["dense_perplexity"]["first"] != before["first"]
    assert info["dense_perplexity"]["second"] == before["second"]


@pytest.fixture
def alone(run):
    """Runs in which some of the three clients take part, by their numbers; none means all."""
    return lambda *numbers, **more: run(only_clients=" ".join(map(str, numbers)), fraction_train=1.0, **more)


def test_a_client_joins_and_is_forgotten_as_if_it_had_always_or_never_been_there(alone, tmp_path):
    everybody, others, client = alone(), alone(0, 2), alone(1)
    assert [each["partition"] for each in others.info["partition"]] == [0, 2]
    joined = combine(others.folder, client.folder, tmp_path / "joined")
    forgotten = combine(everybody.folder, client.folder, tmp_path / "forgotten", forgets=True)
    assert joined["final_sha256"] == everybody.info["final_sha256"]
    assert forgotten["final_sha256"] == others.info["final_sha256"] != everybody.info["final_sha256"]
    assert (joined["joined"], forgotten["forgotten"]) == ([1], [1])
    assert (
        compress(tmp_path / "joined", {"density": 0.7}, tmp_path / "more")["final_sha256"]
        == (alone(density=0.7).info["final_sha256"])
    )


@pytest.mark.full
def test_clients_may_join_and_be_forgotten_in_any_order(alone, tmp_path):
    """The sums are what counts: the model is made of them by the code of every run."""
    order, config = random.Random(0), alone().config
    model = LanguageModel(Path(config.model))
    compression = Compression(config, model)

    def sums(result):
        return load_sums(PrunedModel(model, result.folder, result.info["run_key"]).sums, 1, compression)

    expected = {numbers: sums(alone(*numbers)) for numbers in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]}
    there, total = {0}, sums(alone(0))
    for _ in range(20):
        client = order.choice([each for each in range(3) if there != {each}])
        total.include(sums(alone(client)), -1 if client in there else 1)
        there ^= {client}
        wanted = expected[tuple(sorted(there))]
        assert total.digests == wanted.digests
        for name, each in total.sums.items():
            tensors, others = each.tensors("x"), wanted.sums[name].tensors("x")
            assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items())


def test_who_is_not_in_the_sums_or_is_already_or_is_all_that_there_is_changes_nothing(alone, tmp_path):
    everybody, client, new = alone(), alone(1), tmp_path / "new"
    with pytest.raises(ValueError, match=r"in the sums already: digest [0-9a-f]{16}, allowed: once"):
        combine(everybody.folder, client.folder, new)
    with pytest.raises(ValueError, match="has the sums of client 1, allowed: to forget that client first"):
        combine(everybody.folder, alone(1, seed=5).folder, new)
    with pytest.raises(ValueError, match="not of what the client sends now, allowed: the same bytes as then"):
        combine(everybody.folder, alone(1, seed=5).folder, new, forgets=True)
    private = {"dp_enabled": True, "dp_noise_multiplier": 1.0, "dp_accuracies": "none"}
    with refuses("dp.enabled", True, condition=""):
        combine(alone(0, 2).folder, alone(1, **private).folder, new)
    with refuses("fedspallm.start-token", True, condition=""):
        combine(alone(0, 2).folder, alone(1, fedspallm_start_token=True).folder, new)
    with pytest.raises(ValueError, match="nothing would be left of the sums"):
        combine(client.folder, client.folder, new, forgets=True)
    assert not new.exists()


@pytest.mark.full
def test_what_clients_trained_or_noised_is_not_forgotten_with_the_reason_in_one_line(alone, federation, tmp_path):
    client, layer_by_layer = alone(1).folder, alone(fedspallm_layers_per_exchange=1).folder
    recovered = alone(num_server_rounds=2, fedspallm_recovery_rounds=1, fedspallm_recovery_segments=8).folder
    private = alone(dp_enabled=True, dp_noise_multiplier=1.0, dp_accuracies="none").folder
    trained = federation(2, system="fedavg", num_server_rounds=1).folder
    for run, reason in (
        (layer_by_layer, "each sum depends on those before it"),
        (recovered, "clients trained its weights"),
        (private, "nobody can send the same noise again"),
        (trained, "what a client gave cannot be told from its weights"),
    ):
        with pytest.raises(ValueError, match=f"stays as it is: .*{reason}.*, allowed: ") as error:
            combine(run, client, tmp_path / "new", forgets=True)
        assert "\n" not in str(error.value)


def test_the_command_says_what_remains_of_a_forgotten_client(alone, fedprune, tmp_path):
    code, said = fedprune("forget", alone().folder, alone(1).folder, "-o", "new")
    assert (code, "client 1 took part" in said, "until you delete the folders" in said) == (0, True, True), said
    code, said = fedprune("join", "new", alone(1).folder, "-o", "newer")
    assert (code, "perplexity:" in said) == (0, True), said


def test_a_private_runs_models_say_what_was_paid_for_them(alone, fedprune, tmp_path):
    result = alone(dp_enabled=True, dp_noise_multiplier=1.0, dp_accuracies="none")
    code, said = fedprune("compress", result.folder, "fedspallm.bits=4", "-o", "new")
    paid = result.rounds[-1]["epsilon_max"]
    assert (code, read_info(tmp_path / "new")["epsilon_paid"]) == (0, paid)
    assert f"ε: {paid:.2f} at most was paid" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("engine", ["ray", "gRPC with TLS"])
def test_a_client_that_sends_again_elsewhere_is_forgotten_and_joins_to_the_same_model(alone, tmp_path, engine):
    nodes = tuple({"partition-id": k, "num-partitions": 3} for k in range(3))
    placement = Placement("ray", 3, num_workers=1) if engine == "ray" else Placement(num_clients=3, nodes=nodes)
    here = {numbers: alone(*numbers) for numbers in [(), (0, 2), (1,)]}
    values = {**here[1,].config.to_dict(), "out-dir": str(tmp_path / "client"), "deadline-seconds": 600.0}
    with Session(Console(stderr=True)) as session:
        session.run(prepare(RunInputs(values), placement), tmp_path / "client")
    forgotten = combine(here[()].folder, tmp_path / "client", tmp_path / "forgotten", forgets=True)
    assert forgotten["final_sha256"] == here[0, 2].info["final_sha256"]
    joined = combine(here[0, 2].folder, tmp_path / "client", tmp_path / "joined")
    assert joined["final_sha256"] == here[()].info["final_sha256"]


@pytest.mark.parametrize(
    "more",
    [{}, full({"fedspallm_hessian_form": "diagonal"}), full({"fedspallm_pattern": "cut"})],
    ids=str,
)
def test_an_importance_matrix_has_the_squares_of_all_clients_inputs(alone, fedprune, tmp_path, more):
    tiny(tmp_path / "llm")
    result = alone(model=str(tmp_path / "llm"), **more)
    code, said = fedprune("export", result.folder, "-o", "texts.gguf", "--imatrix")
    assert (code, "of 12 segments" in said) == (0, True), said
    reader = GGUFReader(tmp_path / "texts.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert [reader.fields[f"imatrix.{key}"].contents() for key in ("chunk_count", "chunk_size")] == [12, 16]
    found = {each.name: each.data for each in reader.tensors}
    export_gguf(result.folder, tmp_path / "model.gguf")
    matrices = {each.name: each for each in GGUFReader(tmp_path / "model.gguf").tensors if "_norm" not in each.name}
    for name, matrix in matrices.items():
        if name.startswith("blk."):  # as llama.cpp quantizes: a weight for each input
            assert found[f"{name}.in_sum2"].shape == (1, matrix.shape[0]), name
            assert found[f"{name}.counts"].tolist() == [[12 * 16]]
    model, total = LanguageModel(tmp_path / "llm"), 0.0
    for partition in range(3):
        segments = FedSpaLLMClient(result.config, NodeContext(partition, 3, tmp_path)).segments()[0]
        total += model.layer(0, model.layer_tensors(0)).input_layernorm(model.embed(segments, 4)).square().sum((0, 1))
    squares = torch.from_numpy(found["blk.0.attn_q.weight.in_sum2"].copy())[0]
    torch.testing.assert_close(squares, total, rtol=1e-4, atol=1e-4)


def test_an_importance_matrix_needs_kept_sums_and_a_gguf_file(run, fedprune):
    folder = run(fedspallm_keep_sums=False).folder
    assert fedprune("export", folder, "-o", "x.gguf", "--imatrix")[0] == 2
    code, said = fedprune("export", folder, "-o", "x", "--imatrix")
    assert (code, "--imatrix is true, allowed:" in said) == (2, True), said
