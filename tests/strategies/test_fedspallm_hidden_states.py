"""Clients of FedSpaLLM may write their hidden states every few layers: models are the same, also after losses."""

from __future__ import annotations

import pytest
import torch

from clients.fedspallm import FedSpaLLMClient
from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.engine import wire
from fedprune_app.engine.inprocess import run_in_process
from fedprune_app.models import hidden_states
from tests.conftest import Finished, wrapped_app
from tests.models.tiny_llm import text_folder, tiny_byte_model
from tests.strategies import test_fedspallm

CLIENTS, LAYERS = 2, 5
SETTINGS = {**test_fedspallm.SETTINGS, "density": 0.4, "fedspallm.test-windows": 4}
WAYS = {
    "one round": {},
    "two rounds": {"num-server-rounds": 2},
    "shares": {"num-server-rounds": 2, "fedspallm.layer-shares": "0.6 0.4"},
    "current layers": {"num-server-rounds": 2, "fedspallm.layer-shares": "0.6 0.4", "fedspallm.unsampled": "current"},
    "Hessians": {"fedspallm.merge": "hessians"},
    "private": {"fedspallm.merge": "hessians", "dp.enabled": True, "dp.noise-multiplier": 2.0},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hidden")
    model = tiny_byte_model(folder / "model", "llama", LAYERS)
    return {"model": str(model), "data-dir": str(text_folder(folder / "texts"))}


def run(folder, places, app=client_app.app, **more):
    config = parse_config({**SETTINGS, **places, **more, "out-dir": str(folder)})
    run_in_process(server_app.app, app, CLIENTS, config.to_dict())
    return Finished(folder)


def in_fresh_processes(train=lambda message, context, honest: honest(message, context)):
    """The client app, whose processes end after each message."""

    def forget(message, context, honest):
        hidden_states.forget()
        return train(message, context, honest)

    return wrapped_app(forget)


@pytest.mark.parametrize("every", [2, 3, 9])
@pytest.mark.parametrize("way", WAYS)
def test_models_are_the_same_however_seldom_hidden_states_are_written(places, tmp_path, way, every):
    often = run(tmp_path / "often", places, **WAYS[way])
    seldom = {**WAYS[way], "fedspallm.hidden-every": every}
    held = run(tmp_path / "held", places, **seldom)
    again = run(tmp_path / "again", places, in_fresh_processes(), **seldom)
    assert held.sha256 == again.sha256 == often.sha256
    assert held.rounds[-1]["perplexity_global"] == again.rounds[-1]["perplexity_global"]


def test_states_have_hidden_states_after_every_so_many_layers_and_memory_has_the_others(places, tmp_path, monkeypatch):
    states, taken = [], []
    reached, take = FedSpaLLMClient._reached, hidden_states.take

    def kept(self, *arguments, **more):
        states.append("hidden" in reached(self, *arguments, **more).tensors)
        return reached(self, *arguments, **more)

    def counted(key):
        taken.append(take(key) is not None)

    monkeypatch.setattr(FedSpaLLMClient, "_reached", kept)
    run(tmp_path / "run", places, **{"fedspallm.hidden-every": 2})
    of_one_client = states[::CLIENTS]
    assert of_one_client == [False, True, False, True]  # after the last layer there are none
    monkeypatch.setattr(hidden_states, "take", counted)
    run(tmp_path / "counted", places, **{"fedspallm.hidden-every": 2})
    assert taken == [True] * CLIENTS * (LAYERS - 1)


def test_hidden_states_whose_file_is_lost_are_computed_again_from_the_text(places, tmp_path, caplog):
    folder = tmp_path / "run"

    def lose(message, context, honest):
        if wire.fields_of(message.content)["layer"] == 3 and context.node_config["partition-id"] == 0:
            (folder / "clients" / "00000" / "round-00002.safetensors").unlink()  # the state after layer 1
        return honest(message, context)

    found = run(folder, places, in_fresh_processes(lose), **{"fedspallm.hidden-every": 2})
    assert "computed again from the text" in caplog.text
    assert found.sha256 == run(tmp_path / "often", places).sha256


def test_hidden_states_after_a_layer_that_came_from_the_server_are_written_since_text_does_not_lead_there(
    places, tmp_path
):
    folder = tmp_path / "run"
    lost = []

    def lose(message, context, honest):
        fields = wire.fields_of(message.content)
        if fields["of-round"] == 2 and not fields["prunes"] and not lost:
            reply = honest(message, context)
            newest = max((folder / "clients" / f"{context.node_config['partition-id']:05d}").glob("round-*"))
            lost.append(newest)
            newest.write_bytes(b"")
            return reply
        return honest(message, context)

    more = {**WAYS["current layers"], "fedspallm.hidden-every": 4}
    found = run(folder, places, in_fresh_processes(lose), **more)
    assert lost
    assert any("lost" in note for row in found.rounds for note in row["notes"])


def test_a_run_that_was_cut_off_goes_on_to_the_same_model(places, tmp_path):
    folder = tmp_path / "run"
    more = {"fedspallm.hidden-every": 3}

    def break_at_layer_4(message, context, honest):
        if wire.fields_of(message.content)["layer"] == 4:
            raise RuntimeError("cut off")
        return honest(message, context)

    with pytest.raises(Exception, match="decoder layer 4 in round 1 had 0 good replies"):
        run(folder, places, in_fresh_processes(break_at_layer_4), **more)
    again = parse_config({**SETTINGS, **places, **more, "resume-from": str(folder)})
    run_in_process(server_app.app, in_fresh_processes(), CLIENTS, again.to_dict())
    assert Finished(folder).sha256 == run(tmp_path / "whole", places).sha256


def test_memory_holds_no_more_than_its_bound_and_lets_the_oldest_go(monkeypatch):
    monkeypatch.setattr(hidden_states, "bound_of", lambda device: 1000)
    monkeypatch.setattr(hidden_states, "_held", type(hidden_states._held)())
    for client in range(3):
        hidden_states.hold((f"client {client}", "run", 1), torch.zeros(100))  # 400 bytes each
    assert hidden_states.take(("client 0", "run", 1)) is None
    hidden_states.hold(("client 1", "run", 2), torch.ones(100))  # the step before is forgotten
    assert hidden_states.take(("client 1", "run", 1)) is None
    taken = hidden_states.take(("client 1", "run", 2))
    assert taken is not None
    assert hidden_states.take(("client 1", "run", 2)) is None  # it is the taker's now
    hidden_states.hold(("client 2", "run", 2), torch.zeros(1000))
    assert not hidden_states._held  # larger than all that may be held


def test_hidden_states_lie_on_the_device_if_they_take_little_of_it(monkeypatch):
    monkeypatch.setattr(hidden_states, "bound_of", lambda device: 1000)
    gpu = torch.device("cuda", 0)
    assert hidden_states.home_of(1000, gpu) == gpu
    assert hidden_states.home_of(1001, gpu) == torch.device("cpu")
