"""FedSpaLLM end to end on tiny models, against a slow reference that holds every client's whole model."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F

from clients.context import NodeContext
from clients.fedspallm import FedSpaLLMClient
from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.core.codec import unpack
from fedprune_app.engine import wire
from fedprune_app.engine.layers import LayerFiles
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.models.saving import load_packed
from fedprune_app.models.transformers import import_transformers
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.groups import group_runs
from fedprune_app.results.reader import load_run
from fedprune_app.results.tables import perplexity_rows
from strategies.fedspallm import FedSpaLLM
from tests.conftest import Finished, wrapped_app
from tests.core.test_sparsegpt import reference as sparsegpt_reference
from tests.examples import full
from tests.laws.test_l0_laws import reference as l0_reference
from tests.models.tiny_llm import text_folder, tiny_byte_model
from tests.refusing import refuses

SETTINGS = {
    "system": "fedspallm",
    "dataset": "text",
    "num-server-rounds": 1,
    "fraction-train": 1.0,
    "batch-size": 3,
    "fedspallm.segments": 4,
    "fedspallm.segment-length": 24,
    "fedspallm.window": 32,
    "fedspallm.block-size": 8,
    "evaluate-every": 1,
}
CLIENTS = 3


@pytest.fixture(scope="session", params=["llama", full("opt")])
def family(request):
    return request.param


@pytest.fixture(scope="session")
def llm(family, tmp_path_factory):
    return tiny_byte_model(tmp_path_factory.mktemp("llm") / family, family)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("texts") / "data")


@pytest.fixture
def settings(llm, texts):
    return {**SETTINGS, "model": str(llm), "data-dir": str(texts)}


@pytest.fixture
def run(federation, settings):
    """``run(clients=3, **settings)``: finished runs are shared between tests."""

    def go(clients=CLIENTS, **more):
        named = {key.replace("-", "_").replace(".", "_"): value for key, value in settings.items()}
        return federation(clients=clients, **{**named, **more})

    return go


def layers_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def whole(folder):
    return import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def segments_of(config, partition, num_clients, folder):
    return FedSpaLLMClient(config, NodeContext(partition, num_clients, folder)).segments()[0]


def pruned_by_hand(model, segments, config):
    """One client: each layer's inputs by running the whole model on the text again; SparseGPT by explicit inverses."""
    pruned = []
    for layer in layers_of(model):
        linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        seen = {name: [] for name in linears}
        hooks = [
            linear.register_forward_hook(lambda m, arguments, output, into=seen[name]: into.append(arguments[0]))
            for name, linear in linears.items()
        ]
        with torch.no_grad():
            for segment in segments:
                model(segment[None])
        for hook in hooks:
            hook.remove()
        result = {}
        for name, linear in linears.items():
            inputs = torch.stack([x.reshape(-1, x.shape[-1]) for x in seen[name]])
            pattern = config.fedspallm.n_of_m()
            target = {"n_of_m": pattern} if pattern else {"density": config.density}
            weight, mask = sparsegpt_reference(linear.weight.data, inputs, block_size=8, **target)
            result[f"{name}.weight"] = (weight, mask)
        for name, linear in linears.items():
            linear.weight.data = result[f"{name}.weight"][0].clone()
        pruned.append(result)
    return pruned


def perplexity_by_hand(model, text, window):
    tokens = torch.tensor(list(text.encode()))
    losses = []
    for start in range(0, len(tokens) - window + 1, window):
        with torch.no_grad():
            logits = model(tokens[None, start : start + window]).logits[0]
        losses.append(float(F.cross_entropy(logits[:-1], tokens[start + 1 : start + window])))
    return math.exp(sum(losses) / len(losses)), len(losses)


def global_layers(result):
    """(layer, name) -> (weight, mask) of the server's final model."""
    found = {}
    version = result.info["rounds_completed"]
    for layer in range(2):
        payload = LayerFiles(result.folder / "layers").load(layer, version, 10**6)
        found |= {(layer, name): (payload.tensors[name], payload.masks[name]) for name in payload.tensors}
    return found


def test_one_round_is_the_papers_algorithm(run, llm, texts, tmp_path):
    result = run()
    config = result.config
    clients, models = [], []
    for partition in range(CLIENTS):
        model = whole(llm)
        clients.append(pruned_by_hand(model, segments_of(config, partition, CLIENTS, tmp_path), config))
        models.append(model)
    found = global_layers(result)
    merged = whole(llm)
    for (layer, name), (weight, mask) in found.items():
        each = [client[layer][name] for client in clients]

        class One:
            def __init__(self, pair):
                self.tensors, self.masks = {"w": pair[0]}, {"w": pair[1]}

        mean, _, after = l0_reference([One(pair) for pair in each], config.density)
        assert mask.flatten().tolist() == after, (layer, name)
        expected = torch.tensor(mean).view(weight.shape) * torch.tensor(after).view(weight.shape)
        torch.testing.assert_close(weight, expected, atol=1e-4, rtol=1e-3)
        layers_of(merged)[layer].get_submodule(name.removesuffix(".weight")).weight.data = expected
    row = result.rounds[-1]
    for text in ("first", "second"):
        words = (texts / "test" / f"{text}.txt").read_text()
        value, windows = perplexity_by_hand(merged, words, 32)
        told = row["perplexity_by_text"][text]
        assert told["global"] == pytest.approx(value, rel=1e-3)
        assert (told["window"], told["windows"], told["tokens"]) == (32, windows, 32 * windows)
        own = [perplexity_by_hand(model, words, 32)[0] for model in models]
        assert [c["perplexity"][text] for c in result.clients] == pytest.approx(own, rel=1e-3)
        assert told["personal_mean"] == pytest.approx(sum(own) / CLIENTS, rel=1e-3)
    assert row["perplexity_global"] == row["perplexity_by_text"]["first"]["global"]
    dense = result.info["dense_perplexity"]["first"]["value"]
    assert dense == pytest.approx(
        perplexity_by_hand(whole(llm), (texts / "test" / "first.txt").read_text(), 32)[0], rel=1e-4
    )


def test_the_records_read_back(run):
    result = run()
    read = load_run(result.folder)
    assert read.last("perplexity_global") == result.rounds[-1]["perplexity_global"]
    assert [row["layers_pruned"] for row in read.clients] == [2] * CLIENTS
    assert all(row["accuracy_personal"] is None and row["perplexity_personal"] > 1 for row in read.clients)
    assert read.masks is not None


@pytest.mark.full
def test_every_matrix_has_exactly_the_density_asked_for_and_more_before_expansion(run):
    for density in (0.5, 0.3):
        result = run(density=density)
        for weight, mask in global_layers(result).values():
            assert int(mask.sum()) == math.floor(density * mask.numel() + 1e-6)
            assert not weight[~mask].any()
        row = result.rounds[-1]
        assert row["density_global"] == pytest.approx(density, abs=1e-2)
        assert row["density_before_expansion"] > row["density_global"] + 0.02


def cut_off(wanted, folder, monkeypatch):
    """Run until layer 1 would be installed, and stop there; returns the layers that came so far."""
    installed = []
    honest = FedSpaLLM._install

    def fail(self, layer, new):
        installed.append(layer)
        if layer == 1:
            raise KeyboardInterrupt
        honest(self, layer, new)

    config = parse_config({**wanted, "out-dir": str(folder)}).to_dict()
    with monkeypatch.context() as patched:
        patched.setattr(FedSpaLLM, "_install", fail)
        with pytest.raises(KeyboardInterrupt):
            run_in_process(server_app.app, client_app.app, CLIENTS, config)
    return installed


def resumed(wanted, folder):
    again = parse_config({**wanted, "resume-from": str(folder)})
    run_in_process(server_app.app, client_app.app, CLIENTS, again.to_dict())
    return Finished(folder)


def test_more_texts_are_measured_and_the_first_decides(run, texts):
    words = texts / "test" / "second.txt"
    result = run(fedspallm_evaluation_texts=f"a={words}, ptb={words}")
    row = result.rounds[-1]
    assert list(row["perplexity_by_text"]) == ["first", "second", "a", "ptb"]
    assert list(result.info["dense_perplexity"]) == ["first", "second", "a", "ptb"]
    assert row["perplexity_global"] == row["perplexity_by_text"]["first"]["global"]
    assert row["perplexity_by_text"]["a"] == row["perplexity_by_text"]["second"]
    for client in result.clients:
        assert client["perplexity_personal"] == client["perplexity"]["first"]
    assert result.sha256 == run().sha256


def test_a_pattern_holds_in_the_global_model(run):
    for _, mask in global_layers(run(fedspallm_pattern="2:4")).values():
        assert (mask.view(mask.shape[0], -1, 4).sum(2) == 2).all()


def test_in_the_first_round_only_numbers_go_down_and_packed_layers_come_up(run):
    result = run()
    trained = [m for m in result.wiretap.messages if m.kind == "train"]
    assert len(trained) == 2 * CLIENTS
    assert all(not m.down.tensors and m.bytes_down < 400 for m in trained)
    for message in trained:
        assert message.up.tensors.keys() == message.up.masks.keys()
        dense = 4 * message.up.num_elements()
        assert message.bytes_up < 0.5 * dense + message.up.num_elements() / 8 + 1500
    row = result.rounds[-1]
    assert row["bytes_up"] == sum(m.bytes_up for m in trained)
    assert row["bytes_down"] == sum(m.bytes_down for m in trained)
    assert row["replies"] == 2 * CLIENTS


@pytest.mark.full
def test_later_rounds_send_the_pruned_layer_and_go_on_from_it(run):
    result = run(num_server_rounds=2)
    first = global_layers(run())
    later = [m for m in result.wiretap.messages if m.kind == "train" and m.round > 2]
    assert len(later) == 2 * CLIENTS
    for message in later:
        layer = message.round - 3
        for name, tensor in message.down.tensors.items():
            weight, mask = first[layer, name]
            assert torch.equal(message.down.masks[name], mask)
            assert torch.equal(tensor, weight)
    assert result.info["rounds_completed"] == 2
    assert result.rounds[1]["density_global"] == pytest.approx(0.5, abs=1e-2)


@pytest.mark.full
def test_layers_nobody_asked_a_client_for_never_travel_and_all_are_pruned(run):
    result = run(fedspallm_layer_shares="0.5", clients=4)
    trained = [m for m in result.wiretap.messages if m.kind == "train"]
    assert sorted(m.partition for m in trained) == [0, 1, 2, 3]
    assert sorted(m.round for m in trained) == [1, 1, 2, 2]
    everything = run(clients=4)
    assert result.rounds[0]["bytes_up"] < 0.6 * everything.rounds[0]["bytes_up"]
    assert result.rounds[0]["density_global"] == pytest.approx(0.5, abs=1e-2)
    assert all(row["pruners"] == 2 for row in result.rounds[0]["layers"].values())
    densities = [row["density"] for row in result.clients]
    assert max(densities) < 1


def test_a_layer_that_was_not_asked_for_is_passed_as_the_dense_one(run, llm, tmp_path):
    result = run(fedspallm_layer_shares="0.5", clients=4)
    upper = next(m for m in result.wiretap.messages if m.kind == "train" and m.round == 2)
    model = whole(llm)
    linears = {n: m for n, m in layers_of(model)[1].named_modules() if isinstance(m, nn.Linear)}
    seen = {name: [] for name in linears}
    for name, linear in linears.items():
        linear.register_forward_hook(lambda m, arguments, output, into=seen[name]: into.append(arguments[0]))
    with torch.no_grad():
        for segment in segments_of(result.config, upper.partition, 4, tmp_path):
            model(segment[None])
    for name, linear in linears.items():
        inputs = torch.stack([x.reshape(-1, x.shape[-1]) for x in seen[name]])
        weight, mask = sparsegpt_reference(linear.weight.data, inputs, block_size=8, density=0.5)
        assert torch.equal(upper.up.masks[f"{name}.weight"], mask)
        torch.testing.assert_close(upper.up.tensors[f"{name}.weight"], weight, atol=1e-4, rtol=1e-3)


@pytest.mark.full
def test_layers_that_were_never_pruned_come_first_and_a_share_is_met_by_all_clients_together(run, tmp_path):
    more = {"model": str(tiny_byte_model(tmp_path / "five", "llama", num_layers=5))}
    alone = run(clients=1, num_server_rounds=3, fedspallm_layer_shares="0.4", **more)
    trained = [m.round - 1 for m in alone.wiretap.messages if m.kind == "train"]
    assert len({step % 5 for step in trained if step < 10}) == 4, "two rounds of two layers"
    assert {step % 5 for step in trained} == set(range(5))
    together = run(clients=4, fedspallm_layer_shares="0.5", **more)
    assert sorted(row["layers_pruned"] for row in together.clients) == [2, 2, 3, 3]
    assert [row["pruners"] for row in together.rounds[0]["layers"].values()] == [2] * 5


def test_the_papers_formula_knows_the_pattern(run):
    def formula(result, share):
        return CLIENTS * result.info["model"]["prunable"] * (4 * share + 1 / 8)

    for settings, share in (({"density": 0.3}, 0.3), ({"density": 0.3, "fedspallm_pattern": "2:4"}, 0.5)):
        result = run(**settings)
        assert result.rounds[-1]["paper_bytes_up"] == pytest.approx(formula(result, share)), settings


@pytest.mark.full
def test_clients_that_only_pass_a_layer_on_are_no_part_of_the_mean_error(run):
    more = {"num_server_rounds": 2, "fedspallm_layer_shares": "0.5", "fedspallm_unsampled": "current"}
    result = run(clients=4, **more)
    later = [m for m in result.wiretap.messages if m.kind == "train" and m.round > 2]
    pruned = [m.told["relative-error"] for m in later if m.up.tensors]
    assert (len(later), len(pruned)) == (8, 4)
    assert result.rounds[1]["loss_mean"] == pytest.approx(sum(pruned) / 4)
    assert [row["layers_pruned"] for row in result.clients] == [1] * 8
    assert not any("error_sum" in row for row in result.clients)


def test_the_record_says_of_how_many_windows_the_first_were_measured(run, texts):
    there_are = {name: len((texts / "test" / f"{name}.txt").read_bytes()) // 32 for name in ("first", "second")}
    result = run(fedspallm_test_windows=4)
    for found in (result.rounds[-1]["perplexity_by_text"], result.info["dense_perplexity"]):
        measured = {name: (each["windows"], each["windows_in_text"]) for name, each in found.items()}
        assert measured == {name: (4, number) for name, number in there_are.items()}
    (header, _) = perplexity_rows(group_runs([load_run(result.folder)]))
    assert header[1] == f"first: first 4 of {there_are['first']} × 32 tokens, dense model"
    header, _ = perplexity_rows(group_runs([load_run(run().folder)]))
    assert header[1] == f"first: {there_are['first']} × 32 tokens, dense model"


def test_unsampled_layers_can_be_the_current_ones(run):
    result = run(num_server_rounds=2, fedspallm_layer_shares="0.5", fedspallm_unsampled="current", clients=4)
    later = [m for m in result.wiretap.messages if m.kind == "train" and m.round > 2]
    assert len(later) == 8
    assert all(m.down.tensors for m in later)
    assert sum(bool(m.up.tensors) for m in later) == 4


def test_the_saved_model_loads_in_plain_transformers_and_the_packed_one_is_the_same_and_smaller(run):
    result = run(density=0.3)
    saved, packed = whole(result.folder / "models" / "global"), load_packed(result.folder / "models" / "global-packed")
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(saved(ids).logits, packed(ids).logits)
    for (layer, name), (weight, _) in global_layers(result).items():
        assert torch.equal(layers_of(saved)[layer].get_parameter(name), weight)
    sizes = result.info["final_model"]
    folder = result.folder / "models"
    on_disk = sum(path.stat().st_size for path in (folder / "global-packed").glob("*.fp"))
    assert sizes["packed_bytes"] == on_disk
    # 0.7 of the matrices are gone; embeddings are as large as before
    elements = result.info["model"]["prunable"]
    assert sizes["packed_bytes"] < sizes["checkpoint_bytes"] - 4 * 0.7 * elements + elements / 8 + 2000
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(folder / "global")
    assert tokenizer("é\n").input_ids == list("é\n".encode())


def introducing(**lies):
    """The app, in which client 1 says these things of itself."""

    def query(message, context):
        reply = client_app.query(message, context)
        if context.node_config["partition-id"] == 1:
            fields = {**wire.fields_of(reply.content), **lies}
            reply.content = RecordDict({"fields": wire.pack(None, fields)["fields"]})
        return reply

    app = ClientApp()
    app.query()(query)
    app.train()(client_app.train)
    app.evaluate()(client_app.evaluate)
    return app


@pytest.mark.parametrize(
    "lies",
    [{"shell-digest": "0" * 64}, full({"layer-digests": ["0" * 64]}), full({"layer-digests": ["0" * 64] * 2})],
)
def test_a_client_with_another_model_than_the_servers_is_left_out_and_named(settings, tmp_path, lies):
    config = parse_config({**settings, "out-dir": str(tmp_path / "run")})
    run_in_process(server_app.app, introducing(**lies), CLIENTS, config.to_dict())
    done = Finished(tmp_path / "run")
    assert done.info["clients_left_out"] == ["client 1 has another dense model than the server"]
    assert {row["partition"] for row in done.clients} == {*range(CLIENTS)} - {1}


def test_where_everybody_has_another_model_than_the_server_nothing_begins(settings, tmp_path):
    def query(message, context):
        reply = client_app.query(message, context)
        fields = {**wire.fields_of(reply.content), "shell-digest": "0" * 64}
        reply.content = RecordDict({"fields": wire.pack(None, fields)["fields"]})
        return reply

    app = ClientApp()
    app.query()(query)
    config = parse_config({**settings, "out-dir": str(tmp_path / "run")})
    with refuses("model", which="0 of 3 clients", hint="client 0 has another dense model"):
        run_in_process(server_app.app, app, CLIENTS, config.to_dict())


def test_partly_pruned_models_are_no_standalone_result(run):
    done = run(**{"fedspallm.layer-shares": "0.5"})
    assert {row["pruned_layers"] for row in done.clients if row["pruned_layers"] is not None} == {1}
    assert (done.rounds[-1]["personal_models"], done.rounds[-1]["perplexity_personal_mean"]) == (0, None)
    assert done.rounds[-1]["perplexity_global"] > 1
    assert run().rounds[-1]["personal_models"] == CLIENTS


def test_a_pattern_that_does_not_fit_the_matrices_is_refused_before_anything_is_measured(settings, tmp_path):
    more = {"fedspallm.pattern": "3:5", "fedspallm.block-size": 5}
    config = parse_config({**settings, **more, "out-dir": str(tmp_path / "run")})
    with refuses("fedspallm.pattern", "3:5"):
        run_in_process(server_app.app, client_app.app, CLIENTS, config.to_dict())


def test_a_run_cut_off_between_two_layers_goes_on_with_the_next(run, settings, tmp_path):
    asked = []

    def break_at_layer_1(message, context, honest):
        layer = wire.fields_of(message.content)["layer"]
        asked.append(layer)
        if layer == 1:
            raise RuntimeError("cut off")
        return honest(message, context)

    folder = tmp_path / "run"
    config = parse_config({**settings, "out-dir": str(folder)})
    with pytest.raises(Exception, match="decoder layer 1 in round 1 had 0 good replies"):
        run_in_process(server_app.app, wrapped_app(break_at_layer_1), CLIENTS, config.to_dict())
    assert Finished(folder).info["status"] == "failed"
    asked.clear()

    def listen(message, context, honest):
        asked.append(wire.fields_of(message.content)["layer"])
        return honest(message, context)

    again = parse_config({**settings, "resume-from": str(folder)})
    run_in_process(server_app.app, wrapped_app(listen), CLIENTS, again.to_dict())
    assert set(asked) == {1}
    assert Finished(folder).sha256 == run().sha256
    row, expected = Finished(folder).rounds[-1], run().rounds[-1]
    for key in ("bytes_up", "density_global", "density_before_expansion", "density_by_layer", "loss_mean"):
        assert row[key] == pytest.approx(expected[key]), key


@pytest.mark.full
def test_a_run_whose_newest_checkpoint_is_damaged_once_the_next_round_has_begun_goes_on(run, settings, tmp_path):
    def break_in_round_3(message, context, honest):
        fields = wire.fields_of(message.content)
        if (fields["of-round"], fields["layer"]) == (3, 1):
            raise RuntimeError("cut off")
        return honest(message, context)

    folder = tmp_path / "run"
    wanted = {**settings, "num-server-rounds": 3}
    config = parse_config({**wanted, "out-dir": str(folder)})
    with pytest.raises(Exception, match="decoder layer 1 in round 3 had 0 good replies"):
        run_in_process(server_app.app, wrapped_app(break_in_round_3), CLIENTS, config.to_dict())
    newest = folder / "checkpoints" / "round-00002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    again = parse_config({**wanted, "resume-from": str(folder)})
    run_in_process(server_app.app, client_app.app, CLIENTS, again.to_dict())
    assert Finished(folder).info["resumed_after_rounds"] == [1]
    assert Finished(folder).sha256 == run(num_server_rounds=3).sha256


@pytest.mark.full
def test_layers_that_no_checkpoint_needs_are_dropped(run):
    versions = {path.name for path in (run(num_server_rounds=5).folder / "layers").glob("layer-00000-*")}
    assert versions == {f"layer-00000-version-{version:05d}.fp" for version in (2, 3, 4, 5)}


def test_a_client_that_lost_its_state_computes_it_again(run, settings, tmp_path):
    folder = tmp_path / "run"

    def mark_lost(message, context, honest):
        if wire.fields_of(message.content)["layer"] == 1 and context.node_config["partition-id"] == 0:
            shutil.rmtree(folder / "clients" / "00000")
        return honest(message, context)

    config = parse_config({**settings, "out-dir": str(folder)})
    run_in_process(server_app.app, wrapped_app(mark_lost), CLIENTS, config.to_dict())
    finished = Finished(folder)
    assert finished.info["status"] == "completed"
    assert any("is lost" in note for note in finished.rounds[0]["notes"])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sparsegpt", "wanda", "magnitude"])
def test_every_pruner_runs_and_equal_seeds_give_equal_models(run, kind):
    one = run(fedspallm_pruner=kind)
    two = run(fedspallm_pruner=kind, fresh=True)
    assert one.sha256 == two.sha256
    assert math.isfinite(one.rounds[-1]["perplexity_global"])


@pytest.mark.full
def test_pruning_by_magnitude_makes_all_clients_agree(run):
    result = run(fedspallm_pruner="magnitude")
    row = result.rounds[-1]
    assert row["density_before_expansion"] == row["density_global"]
    assert all(layer["mask_distance"] == 0 for layer in row["layers"].values())
    masks = json.loads((result.folder / "masks.json").read_text())
    assert torch.tensor(masks["distance"]).sum() == 0


def test_masks_are_compared_entry_by_entry(run):
    result = run()
    masks = {}
    for message in result.wiretap.messages:
        if message.kind == "train":
            flat = torch.cat([m.flatten() for _, m in sorted(message.up.masks.items())])
            masks.setdefault(message.partition, []).append(flat)
    told = json.loads((result.folder / "masks.json").read_text())["distance"]
    joined = {partition: torch.cat(parts) for partition, parts in masks.items()}
    for i in range(CLIENTS):
        for j in range(CLIENTS):
            assert told[i][j] == pytest.approx(float((joined[i] != joined[j]).double().mean()), abs=1e-6)


def test_a_lying_reply_is_left_out_and_named(run, settings, tmp_path):
    def lie(message, context, honest):
        reply = honest(message, context)
        if context.node_config["partition-id"] == 2:
            payload = wire.payload_of(reply.content, 10**7)
            name = next(iter(payload.tensors))
            tensors = {**payload.tensors, name: payload.tensors[name] * float("inf")}
            reply.content["payload"] = wire.to_arrays(type(payload)(tensors, payload.masks))
        return reply

    config = parse_config({**settings, "out-dir": str(tmp_path / "run")})
    run_in_process(server_app.app, wrapped_app(lie), CLIENTS, config.to_dict())
    row = Finished(tmp_path / "run").rounds[-1]
    assert row["failures"] == 2
    assert all(reason.startswith("client 2: ") and "NaN or infinite" in reason for reason in row["failure_reasons"])


@pytest.mark.parametrize("dtype", ["bfloat16", full("float16")])
def test_half_precision_travels_as_such(run, dtype):
    result = run(fedspallm_dtype=dtype)
    message = next(m for m in result.wiretap.messages if m.kind == "train")
    assert {str(t.dtype) for t in message.up.tensors.values()} == {f"torch.{dtype}"}
    assert result.info["model"]["dtype"] == dtype
    saved = whole(result.folder / "models" / "global")
    assert saved.dtype == getattr(torch, dtype)
    assert math.isfinite(result.rounds[-1]["perplexity_global"])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("fedspallm.pattern", "4", ("fedspallm.pattern", "4")),
        ("fedspallm.pattern", "1:3", ("fedspallm.block-size", 128)),
        ("fedspallm.layer-shares", "0.5 2", ("fedspallm.layer-shares", "0.5 2")),
        ("dataset", "digits", ("dataset", "digits")),
        ("fedspallm.evaluation-texts", "a=b", ("fedspallm.evaluation-texts", "a=b")),
        ("fedspallm.evaluation-texts", "a=/x,a=/y", ("fedspallm.evaluation-texts", "a=/y")),
        ("fedspallm.pruner", "oracle", ("fedspallm.pruner", "oracle")),
    ],
)
def test_a_wrong_setting_is_one_line(key, value, says):
    with refuses(*says):
        prepare(RunInputs({"system": "fedspallm", "dataset": "stdlib", key: value}))


def test_a_packed_model_trusts_nothing(run, tmp_path):
    folder = tmp_path / "packed"
    shutil.copytree(run(density=0.3).folder / "models" / "global-packed", folder)
    part = folder / "part-00001.fp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cannot be read"):
        load_packed(folder)
    with pytest.raises(ValueError, match=r"too early|declares|do not use up"):
        unpack(part.read_bytes(), 10**6)


def test_a_second_round_at_the_same_density_says_how_many_weights_it_changed(run):
    once, twice = run(), run(num_server_rounds=2)
    before, after = global_layers(once), global_layers(twice)
    moved = sum(int((after[key][0] != before[key][0]).sum()) for key in after)
    assert sum(row["moved"] for row in twice.rounds[-1]["layers"].values()) == moved
    assert all("moved" not in row for row in once.rounds[-1]["layers"].values())


@pytest.mark.parametrize("pruner", ["sparsegpt", full("wanda"), full("magnitude")])
def test_no_weight_that_was_pruned_comes_back_and_none_that_is_kept_is_zero(run, pruner):
    settings = {"fedspallm_pruner": pruner, "density": 0.3, "fedspallm_block_size": 8}
    once, twice = run(**settings), run(**settings, num_server_rounds=2)
    before = global_layers(once)
    for key, (weight, mask) in global_layers(twice).items():
        assert not (mask & ~before[key][1]).any()
        zeros = mask & (weight == 0)
        assert not weight[:, zeros.any(dim=0)].any()  # but where no client ever saw an input


def test_a_mean_over_fewer_clients_than_were_asked_says_so(run):
    fewer = run(fraction_train=0.7)  # two of three clients prune; all of them are asked
    found = next(iter(fewer.rounds[-1]["perplexity_by_text"].values()))
    assert (found["personal_models"], found["asked"]) == (2, 3)
    header, ((_, *cells),) = perplexity_rows(group_runs([load_run(fewer.folder)]))
    shown = {title.rpartition(", ")[2]: cell for title, cell in zip(header[1:], cells, strict=True)}
    assert shown["standalone"].endswith(" (2 of 3 clients)")
    _, ((_, *cells),) = perplexity_rows(group_runs([load_run(run().folder)]))
    assert not any("of 3 clients" in cell for cell in cells)
