"""Every field of every reply is one that the system's client declares: on the wire, private or not."""

from __future__ import annotations

import pytest
from flwr.app import MessageType

from clients.node import ReplyFields, declared, undeclared
from fedprune_app.config import parse_config
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.registry import SYSTEMS
from tests.conformance.conftest import CLIENTS, PRIVATE, ROUNDS, SYSTEM, TWO_SYSTEMS

KINDS = {MessageType.QUERY: "registration", MessageType.TRAIN: "training", MessageType.EVALUATE: "evaluation"}
PRIVATELY = {
    "subfedavg": {"subfedavg.gate-split": "none"},
    "dispfl": {"dispfl.growth": "random"},
    "fedltp": {"dp.count-scale": 20.0},
}
"""What a system needs, beside ``PRIVATE``, to run with ``dp.enabled``."""


def private_settings(settings_of, system):
    """What makes the system's run a private one; None where it cannot be."""
    more = {**PRIVATE, **PRIVATELY.get(system, {})}
    reason = SYSTEMS[system].client.why_not_private(parse_config({**settings_of(system), **more}))
    return None if reason else more


@pytest.mark.parametrize(
    "is_private", [pytest.param(False, id="as it is"), pytest.param(True, id="private", marks=pytest.mark.full)]
)
@SYSTEM
def test_every_reply_holds_declared_fields_alone(conform, settings_of, system, is_private):
    settings = private_settings(settings_of, system) if is_private else {}
    if settings is None:
        pytest.skip(f"system {system} cannot be private")
    replies = {KINDS[kind]: names for kind, names in conform(system, **settings).replies.items()}
    private = is_private or parse_config(settings_of(system)).dp.enabled
    fields = declared(SYSTEMS[system].client)
    assert replies.keys() == set(KINDS.values())
    assert len(replies["registration"]) == CLIENTS
    assert len(replies["training"]) >= CLIENTS * ROUNDS
    for kind, each in replies.items():
        for names in each:
            assert undeclared(names, fields.allowed(kind, private)) == [], kind


def telling(method, more):
    """A client's method that tells one field more."""

    def told_more(*arguments):
        told = method(*arguments)
        return {**told, **more} if isinstance(told, dict) else (told[0], {**told[1], **more})

    return told_more


class Diary(InProcessGrid):
    """A name of its own, so that no finished run is taken for one of this."""


@TWO_SYSTEMS
def test_a_field_that_nobody_declared_does_not_leave_the_client(conform, monkeypatch, system):
    client = SYSTEMS[system].client
    monkeypatch.setattr(client, "answer_training", telling(client.answer_training, {"diary": 1}))
    with pytest.raises(TooFewReplies, match="ValueError: field 'diary' is in a reply, allowed in"):
        conform(system, grid=Diary, num_server_rounds=1)


@pytest.mark.parametrize(
    ("method", "told", "kind"),
    [
        ("answer_evaluation", "diary", "evaluation"),
        ("registration", "diary", "registration"),
        ("registration", "labels-train", "registration"),
        ("answer_training", "loss", "training"),
    ],
)
def test_a_private_client_sends_no_undeclared_and_no_open_field(conform, monkeypatch, method, told, kind):
    client = SYSTEMS["dpfed"].client
    monkeypatch.setattr(client, method, telling(getattr(client, method), {told: 1}))
    with pytest.raises((TooFewReplies, ValueError), match=f"field '{told}' is in a reply, allowed in {kind}: "):
        conform("dpfed", grid=Diary, num_server_rounds=1, startup_seconds=1.0)


@pytest.mark.parametrize("told", ["loss", "seconds"])
@TWO_SYSTEMS
def test_no_system_sends_the_raw_loss_or_its_time_from_a_private_client(
    conform, settings_of, monkeypatch, system, told
):
    """The field is refused before it leaves the node, so every client's reply is an error that names the field."""
    if (private := private_settings(settings_of, system)) is None:
        pytest.skip(f"system {system} cannot be private")
    client = SYSTEMS[system].client
    monkeypatch.setattr(client, "answer_training", telling(client.answer_training, {told: 1.0}))
    with pytest.raises(TooFewReplies, match=f"field '{told}' is in a reply, allowed in training: "):
        conform(system, grid=Diary, num_server_rounds=1, **private)


def test_what_a_class_declares_adds_to_what_its_base_classes_declare():
    class Base:
        declares = ReplyFields(training=frozenset({"loss", "density"}), withheld_when_private=frozenset({"loss"}))

    class Silent(Base):
        pass

    class Mixed:
        declares = ReplyFields(training=frozenset({"density/", "epsilon"}), only_when_private=frozenset({"epsilon"}))

    class Both(Silent, Mixed):
        declares = ReplyFields(evaluation=frozenset({"score"}))

    assert declared(Both).allowed("training", is_private=False) == {"loss", "density", "density/"}
    assert declared(Both).allowed("training", is_private=True) == {"density", "density/", "epsilon"}
    assert declared(Both).allowed("evaluation", is_private=False) == {"score"}
    assert declared(Both).allowed("registration", is_private=False) == frozenset()


def test_a_prefix_allows_what_begins_with_it_and_nothing_else():
    allowed = frozenset({"density", "perplexity/"})
    assert undeclared(["density", "perplexity/c4", "perplexity/a b/c"], allowed) == []
    assert undeclared(["density/conv1", "perplexity", "densities"], allowed) == [
        "density/conv1",
        "perplexity",
        "densities",
    ]
    assert undeclared(["anything"], frozenset()) == ["anything"]
