"""FedSpaLLM's merges by Hessians, against one place that has all clients' text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedprune_app import server_app
from fedprune_app.config import parse_config
from fedprune_app.core import hessians
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.results.reader import load_run
from tests.conftest import Finished, wrapped_app
from tests.refusing import refuses
from tests.strategies.test_fedspallm import (
    CLIENTS,
    cut_off,
    family,
    global_layers,
    layers_of,
    llm,
    perplexity_by_hand,
    pruned_by_hand,
    resumed,
    run,
    segments_of,
    settings,
    texts,
    whole,
)

__all__ = ["family", "llm", "run", "settings", "texts"]  # fixtures


def all_segments(result, folder):
    parts = [segments_of(result.config, partition, CLIENTS, folder) for partition in range(CLIENTS)]
    assert [*map(len, parts)] == [4, 4, 4]
    return torch.cat(parts)


def test_hessians_of_all_clients_prune_as_one_place_with_all_text_would(run, llm, texts, tmp_path):
    result = run(fedspallm_merge="hessians")
    model = whole(llm)
    expected = pruned_by_hand(model, all_segments(result, tmp_path), result.config)
    for (layer, name), (weight, mask) in global_layers(result).items():
        there, kept = expected[layer][name]
        assert int((mask != kept).sum()) <= 2, (layer, name)  # a tie can go either way by rounding
        same = mask == kept
        torch.testing.assert_close(weight[same], there[same], atol=2e-3, rtol=2e-2)
        assert int(mask.sum()) == int(kept.sum())
    words = (texts / "test" / "first.txt").read_text()
    central = perplexity_by_hand(model, words, 32)[0]
    assert result.rounds[-1]["perplexity_global"] == pytest.approx(central, rel=5e-3)


def test_hessians_travel_in_place_of_weights_and_clients_get_the_pruned_layers_before(run):
    result = run(fedspallm_merge="hessians")
    for message in (m for m in result.wiretap.messages if m.kind == "train"):
        assert not message.up.masks
        assert all(name.startswith(hessians.HESSIAN) for name in message.up.tensors)
        assert {name.partition("/")[0] for name in message.down.tensors} == ({"0"} if message.round == 2 else set())
        assert message.down.masks.keys() == message.down.tensors.keys()
    row = result.rounds[-1]
    assert row["personal_models"] == 0
    assert row["perplexity_personal_mean"] is None
    assert [client["perplexity_personal"] for client in result.clients] == [None] * CLIENTS
    assert [client["pruned_layers"] for client in result.clients] == [2] * CLIENTS
    assert {client["density"] for client in result.clients} == {result.clients[0]["density"]}
    assert load_run(result.folder).masks is None


def test_refining_solves_each_row_and_is_nearer_to_the_dense_layer_than_sparsegpt(run, llm, tmp_path):
    refined = run(fedspallm_merge="hessians", fedspallm_refine=True)
    found, before = global_layers(refined), global_layers(run(fedspallm_merge="hessians"))
    model = whole(llm)
    linears = {f"{name}.weight": m for name, m in layers_of(model)[0].named_modules() if isinstance(m, nn.Linear)}
    seen = {name: [] for name in linears}
    for name, linear in linears.items():
        linear.register_forward_hook(lambda m, arguments, output, into=seen[name]: into.append(arguments[0]))
    with torch.no_grad():
        for segment in all_segments(refined, tmp_path):
            model(segment[None])
    for name, linear in linears.items():
        weight, mask = found[0, name]
        assert int(mask.sum()) == int(before[0, name][1].sum())
        inputs = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen[name]]).double()
        damped = inputs.T @ inputs
        damped.diagonal().add_(0.01 * damped.diagonal().mean())
        dense = linear.weight.data.double()
        moved, moved_before = (each[0, name][0].double() - dense for each in (found, before))
        assert float(((moved @ damped) * moved).sum()) < float(((moved_before @ damped) * moved_before).sum())
        for row in range(0, len(weight), 7):
            kept = mask[row].nonzero().squeeze(1)
            exact = torch.linalg.solve(damped[kept][:, kept], damped[kept] @ dense[row])
            torch.testing.assert_close(weight[row, kept].double(), exact, atol=3e-3, rtol=1e-2)


def test_a_run_that_was_cut_off_goes_on_to_the_same_model(run, settings, tmp_path, monkeypatch):
    wanted = {**settings, "fedspallm.merge": "hessians"}
    folder = tmp_path / "run"
    cut_off(wanted, folder, monkeypatch)
    assert resumed(wanted, folder).sha256 == run(fedspallm_merge="hessians").sha256


def test_a_client_that_missed_a_layer_is_sent_what_it_missed(settings, tmp_path):
    received = {}

    def listen(message, context, honest):
        layer = message.content["fields"]["layer"] if "fields" in message.content else None
        client = context.node_config["partition-id"]
        if client == 1 and layer == 0:
            raise ValueError("away")
        reply = honest(message, context)
        if layer is not None:
            received[client, layer] = reply
        return reply

    folder = tmp_path / "run"
    config = parse_config({**settings, "fedspallm.merge": "hessians", "out-dir": str(folder), "min-replies": 1})
    run_in_process(server_app.app, wrapped_app(listen), CLIENTS, config.to_dict())
    result = Finished(folder)
    assert (1, 1) in received
    assert (1, 0) not in received
    assert result.info["status"] == "completed"
    assert [row["pruned_layers"] for row in result.clients if row["round"] == 1] == [2] * CLIENTS


def test_a_reply_that_is_refused_for_its_last_part_adds_none_of_its_first(settings, tmp_path):
    """Client 1 sends Hessians a thousand times too large, and beside them what cannot be added."""

    def lie(message, context, honest):
        reply = honest(message, context)
        if context.node_config["partition-id"] == 1:
            sent = wire.payload_of(reply.content, 10**9)
            first, *_, last = [name for name in sent.tensors if name.startswith(hessians.HESSIAN)]
            tensors = {**sent.tensors, first: sent.tensors[first] * 1000, last: -sent.tensors[last]}
            reply.content[wire.PAYLOAD] = wire.to_arrays(Payload(tensors, sent.masks))
        return reply

    def fail(message, context, honest):
        reply = honest(message, context)
        if context.node_config["partition-id"] == 1:
            raise ValueError("away")
        return reply

    found = []
    for name, train in (("lie", lie), ("fail", fail)):
        more = {"fedspallm.merge": "hessians", "out-dir": str(tmp_path / name), "min-replies": 1}
        run_in_process(server_app.app, wrapped_app(train), CLIENTS, parse_config({**settings, **more}).to_dict())
        found.append(Finished(tmp_path / name))
    lied, failed = found
    assert [row["failures"] for row in lied.rounds] == [row["failures"] for row in failed.rounds] == [2]
    assert lied.sha256 == failed.sha256


def test_hessians_that_are_none_are_refused():
    total = hessians.HessianSum(3)
    good = torch.tensor([[2.0, 1, 0], [1, 3, -1], [0, -1, 1]])
    total.add("a", hessians.encoded({"a": good}), 2)
    for wrong in (torch.diag(torch.tensor([1.0, -1, 1])), good + 100 * (1 - torch.eye(3))):
        with pytest.raises(ValueError, match="no sum of products"):
            total.add("a", hessians.encoded({"a": wrong}), 1)
    with pytest.raises(ValueError, match="has magnitude"):
        total.add("a", hessians.encoded({"a": 1e30 * good}), 1)
    assert torch.equal(total.matrix(), good)


def test_sums_of_hessians_have_the_same_bits_in_any_order():
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(20, 9, generator=draw) * 10 ** (k - 2) for k in range(6)]
    sent = [hessians.encoded({"a": each.T @ each}) for each in inputs]
    sums = []
    for order in (range(6), range(5, -1, -1)):
        total = hessians.HessianSum(9)
        for number in order:
            total.add("a", sent[number], number + 1)
        sums.append(total.matrix())
    assert torch.equal(*sums)
    exact = sum((number + 1) * (each.double().T @ each.double()) for number, each in enumerate(inputs)) / 21
    torch.testing.assert_close(sums[0].double(), exact, rtol=1e-3, atol=1e-3 * float(exact.max()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fedspallm.merge": "hessians", "fedspallm.pruner": "wanda"}, ("fedspallm.pruner", "wanda")),
        ({"fedspallm.merge": "hessians", "num-server-rounds": 2}, ("num-server-rounds", 2)),
        ({"fedspallm.merge": "best"}, ("fedspallm.merge", "best")),
    ],
)
def test_merges_that_cannot_be_are_refused(settings, options, message):
    with refuses(*message):
        parse_config({**settings, **options})


def test_a_packed_triangle_comes_back():
    matrix = torch.randn(7, 7, dtype=torch.float64)
    matrix = matrix @ matrix.T
    packed = hessians.packed_upper(matrix)
    assert packed.shape == (28,)
    assert torch.equal(hessians.unpacked(packed, 7), torch.triu(matrix) + torch.triu(matrix, 1).T)
    sent, like = hessians.encoded({"x": matrix.float()}), hessians.like({"x": 7})
    assert sent.keys() == like.keys()
    assert all(sent[name].shape == like[name].shape for name in like)


def test_by_masks_alone_the_dense_weights_stay_that_most_clients_vote_for(run, llm):
    """FedPrLLM again, entry by entry: votes first, then the size of the dense weight, then the place."""
    result = run(fedspallm_merge="masks", fedspallm_pruner="wanda")
    dense = dict(whole(llm).named_parameters())
    sent = {}
    for message in (message for message in result.wiretap.messages if message.kind == "train"):
        for name, mask in message.up.masks.items():
            assert torch.equal(message.up.tensors[name], mask)  # nothing but the mask is sent
            sent.setdefault((message.round - 1, name), []).append(mask.flatten().tolist())
        assert message.bytes_up < sum(mask.numel() for mask in message.up.masks.values()) / 8 + 400
    for (layer, name), (weight, mask) in global_layers(result).items():
        before = next(tensor for key, tensor in dense.items() if key.endswith(f"layers.{layer}.{name}"))
        size, masks = before.detach().abs().flatten().tolist(), sent[layer, name]
        assert len(masks) == CLIENTS
        order = sorted(range(len(size)), key=lambda j: (sum(m[j] for m in masks), size[j], j))
        kept = torch.ones(len(size), dtype=torch.bool)
        kept[order[: len(size) - int(0.5 * len(size))]] = False
        assert torch.equal(mask.flatten(), kept)
        assert torch.equal(weight, torch.where(mask, before.detach(), 0))


@pytest.mark.parametrize("more", [{"num-server-rounds": 2}, {"fedspallm.pattern": "cut"}])
def test_masks_are_voted_for_once_and_cut_no_heads(more):
    with refuses(next(iter(more)), condition="fedspallm.merge"):
        parse_config(
            {"system": "fedspallm", "dataset": "stdlib", "fedspallm.merge": "masks", "num-server-rounds": 1, **more}
        )


def test_where_no_pruner_changes_weights_votes_and_the_mean_end_with_the_same_model(run):
    votes, mean = (run(fedspallm_merge=merge, fedspallm_pruner="wanda") for merge in ("masks", "mean"))
    layers = global_layers(mean)
    for key, (weight, mask) in global_layers(votes).items():
        assert torch.equal(mask, layers[key][1])
        torch.testing.assert_close(weight, layers[key][0], rtol=1e-6, atol=1e-9)
    sent = [sum(row["bytes_up"] for row in result.rounds) for result in (votes, mean)]
    assert sent[1] > 7 * sent[0]  # names and counts are a part of so small messages
