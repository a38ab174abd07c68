"""FedSpaLLM's rounds of recovery: the server averages the kept weights that clients trained, and masks stay."""

from __future__ import annotations

import pytest
import torch

from clients.context import NodeContext
from clients.fedspallm import FedSpaLLMClient
from fedprune_app.config import parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.models.layer_pruning import Schedule, recovered
from fedprune_app.models.llm import LanguageModel
from tests.refusing import refuses
from tests.strategies.conftest import config_key
from tests.strategies.test_fedspallm import CLIENTS, family, global_layers, llm, run, segments_of, settings, texts

__all__ = ["family", "llm", "run", "settings", "texts"]  # fixtures
RECOVERY = {
    "num_server_rounds": 2,
    "fedspallm_recovery_rounds": 1,
    "fedspallm_recovery_segments": 3,
    "fedspallm_recovery_steps": 5,
    "fedspallm_recovery_learning_rate": 0.01,
}


def layers_of(result):
    found = {}
    for (layer, name), (weight, mask) in global_layers(result).items():
        before = found.get(layer, Payload({}))
        found[layer] = Payload({**before.tensors, name: weight}, {**before.masks, name: mask})
    return found


@pytest.mark.full
def test_the_new_weights_are_the_mean_of_what_each_client_trains(run, llm, tmp_path):
    before, result = run(num_server_rounds=1), run(**RECOVERY)
    model, pruned = LanguageModel(llm), layers_of(before)
    found = []
    for client in range(CLIENTS):
        config = parse_config({**result.info["config"], "fedspallm.segments": 3})
        segments = segments_of(config, client, CLIENTS, tmp_path)
        schedule = Schedule(5, config.batch_size, 0.01)
        found.append(recovered(model, pruned, segments, schedule, generator(config.seed, "recovery", client, 2))[0])
    for layer, payload in layers_of(result).items():
        for name, mask in payload.masks.items():
            assert torch.equal(mask, pruned[layer].masks[name])
            mean = torch.stack([each[layer].tensors[name].double() for each in found]).mean(0)
            torch.testing.assert_close(payload.tensors[name].double(), mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("deal", ["segments", "documents", "one"])
def test_a_client_recovers_on_text_of_its_own_that_it_has_calibrated_with(run, settings, tmp_path, deal):
    given = {
        **settings,
        "fedspallm.segments": 2,
        "fedspallm.deal": deal,
        **{config_key(key): value for key, value in RECOVERY.items()},
    }
    clients = [FedSpaLLMClient(parse_config(given), NodeContext(k, CLIENTS, tmp_path / str(k))) for k in range(CLIENTS)]

    def rows(segments):
        return {tuple(row) for row in segments.tolist()}

    calibration = [rows(client.segments()[0]) for client in clients]
    recovery = [rows(client.segments(3)[0]) for client in clients]
    for k, own in enumerate(recovery):
        assert calibration[k] < own
        assert not any(own & other for number, other in enumerate(recovery) if number != k)


def test_kept_weights_alone_travel_and_the_record_says_what_was_lost(run):
    result = run(**RECOVERY)
    sent = [message for message in result.wiretap.messages if message.kind == "train" and not message.up.masks]
    assert len(sent) == CLIENTS
    for message in sent:
        assert message.up.tensors.keys() == message.down.masks.keys()
        for name, tensor in message.up.tensors.items():
            assert tensor.shape == (int(message.down.masks[name].sum()),)
    first, second = result.rounds
    assert "recovery_loss" not in first
    assert second["recovery_loss"] > 0
    assert second["density_global"] == first["density_global"]
    # what clients pruned alone stays what it was
    assert second["perplexity_personal_mean"] == first["perplexity_personal_mean"]
    rows = [row for row in result.clients if row["round"] == 2]
    assert all(row["recovery_loss"] > 0 for row in rows)


def test_recovery_follows_a_round_of_hessians(run):
    result = run(fedspallm_merge="hessians", **RECOVERY)
    first, second = result.rounds
    assert second["density_global"] == first["density_global"]
    assert second["perplexity_global"] != first["perplexity_global"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"fedspallm.recovery-rounds": 1, "num-server-rounds": 1},
            ("fedspallm.recovery-rounds", 1),
        ),
        (
            {"fedspallm.recovery-rounds": 1, "num-server-rounds": 3, "fedspallm.merge": "hessians"},
            ("num-server-rounds", 3),
        ),
    ],
)
def test_rounds_that_cannot_be_are_refused(wrong, says):
    with refuses(*says):
        parse_config({"system": "fedspallm", "dataset": "stdlib", "model": "auto", **wrong})
