"""Hostile clients: what they send is valid, and meant to destroy."""

from __future__ import annotations

import math

import pytest
import torch

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import read_tensors
from fedprune_app.federation import evaluation
from fedprune_app.results.metrics import ReplyKind
from fedprune_app.results.recorder import row_of
from strategies.fedcr import PRECISION, WEIGHTED
from tests.conftest import tampered_app
from tests.examples import full

HOSTILE = (0, 5)  # two of ten
SETTINGS = {
    "clients": 10,
    "partition": "iid",
    "samples_per_client": 60,
    "num_server_rounds": 4,
    "local_epochs": 3,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "fraction_train": 1.0,
    "evaluate_every": 4,
}


SHORT = {"num_server_rounds": 1, "local_epochs": 1, "fraction_train": 1.0, "shard_size": 20, "learning_rate": 0.05}


def accuracy(run) -> float:
    return run.rounds[-1]["accuracy_global"]


def model_of(run) -> str:
    return Payload(read_tensors(run.folder / "models" / "global.safetensors").tensors).digest()


def test_values_of_1e30_are_refused_and_move_nothing(federate):
    def huge(request, reply, partition):
        if partition in HOSTILE:
            honest = wire.payload_of(reply.content, 10**7)
            tensors = {name: torch.full_like(tensor, 1e30) for name, tensor in honest.tensors.items()}
            reply.content[wire.PAYLOAD] = wire.to_arrays(Payload(tensors, honest.masks))
        return reply

    run = federate(app=tampered_app(huge), system="fedavg", **SETTINGS)
    assert accuracy(run) > 0.8
    for row in run.rounds:
        assert (row["replies"], row["failures"]) == (8, 2)
        assert all("magnitude 1e+30" in reason for reason in row["failure_reasons"])


# --- replies that are refused -----------------------------------------------------------------------------------------

LIES = {"num-examples": 7, "loss": math.nan, "density": 2.0, "seconds": -1.0, "flops": -1, "epsilon": -1.0}
"""What no honest client says of its training, one of them each."""
PRIVATE = {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.delta": 1e-3}
AVERAGING = {
    "fedavg": {},
    "dpfed": PRIVATE,
    "fedavg-ft": {},
    "ditto": {},
    "fedprox": {},
    "lg-fedavg": {},
    "subfedavg": {"subfedavg.accuracy-threshold": 0.0},
    "subfedavg-hy": {"model": "cnn-small-bn"},
    "fjord": {},
    "fedspa": PRIVATE,
    "fedltp": {"fedltp.tickets": 1, "fedltp.ticket-iterations": 10, "fedltp.validators": "none"},
    "fedp3": {"fedp3.layer-set": "all"},
    "fedp3 by attention": {"fedp3.layer-set": "all", "fedp3.aggregation": "attention"},
    "fedcr": {"model": "cnn-small-cr", "learning_rate": 0.005, "max_grad_norm": 10.0},
    "ldp-fedp3": PRIVATE,
}


@pytest.mark.parametrize(
    "system", ["fedavg", *(pytest.param(each, marks=pytest.mark.full) for each in AVERAGING if each != "fedavg")]
)
def test_a_reply_that_is_refused_moves_nothing(federate, system):
    """Whether for values that are too large, or for what is said beside them: as if its client had sent none."""
    settings = {"system": system.partition(" ")[0], **SHORT, **AVERAGING[system]}
    private = "dp.enabled" in settings
    lies = [name for name in LIES if name not in (("loss", "seconds") if private else ("epsilon",))]
    clients = 2 * len(lies) + 1

    def lying(request, reply, partition):
        if partition > len(lies):
            return reply
        size = 5.0 if partition else 1e30
        honest = wire.payload_of(reply.content, 10**7)
        tensors = {name: torch.full_like(tensor, size) for name, tensor in honest.tensors.items()}
        reply.content[wire.PAYLOAD] = wire.to_arrays(Payload(tensors, honest.masks))
        if partition:
            name = lies[partition - 1]
            reply.content["fields"][name] = LIES[name]
        return reply

    def silent(request, reply, partition):
        if partition <= len(lies):
            raise ValueError("none")
        return reply

    run = federate(name="lying", app=tampered_app(lying), clients=clients, **settings)
    without = federate(name="silent", app=tampered_app(silent), clients=clients, **settings)
    (row,) = run.rounds
    assert (row["replies"], row["failures"]) == (len(lies), len(lies) + 1)
    reasons = dict(reason.split(": ", 1) for reason in row["failure_reasons"])
    assert "magnitude 1e+30" in reasons["client 0"]
    for partition, name in enumerate(lies, start=1):
        assert f"'{name}'" in reasons[f"client {partition}"]
    assert model_of(run) == model_of(without)


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ({PRECISION: 1e300, WEIGHTED: 0.0}, "'experts.precision' has magnitude 1e+300, allowed: at most 1e+30"),
        (
            {PRECISION: 1.0, WEIGHTED: -1e300},
            "'experts.weighted-mean' has magnitude 1e+300, allowed: at most",
        ),
        full({PRECISION: 0.0, WEIGHTED: 1.0}, "'experts.weighted-mean' has magnitude 1, allowed"),
    ],
)
def test_fedcrs_experts_are_bounded_by_their_means_and_precisions(federate, lie, says):
    def huge(request, reply, partition):
        if partition in HOSTILE:
            honest = wire.payload_of(reply.content, 10**7)
            lies = {name: torch.full_like(honest.tensors[name], value) for name, value in lie.items()}
            reply.content[wire.PAYLOAD] = wire.to_arrays(Payload({**honest.tensors, **lies}, honest.masks))
        return reply

    settings = {"system": "fedcr", **SHORT, **AVERAGING["fedcr"]}
    (row,) = federate(app=tampered_app(huge), **settings).rounds
    assert (row["replies"], row["failures"]) == (4, 2)
    assert all(says in reason for reason in row["failure_reasons"])


def test_fedfomos_candidates_are_whole_numbers(federate):
    def lying(request, reply, partition):
        fields = reply.content["fields"]
        if partition in HOSTILE and fields.get("candidates"):
            fields["candidates"] = [float(name) for name in fields["candidates"]]
        return reply

    settings = {"system": "fedfomo", "fedfomo.candidates": 2, **SHORT, "num_server_rounds": 2}
    run = federate(app=tampered_app(lying), **settings)
    assert [row["failures"] for row in run.rounds] == [0, 2]
    assert all("allowed: those it was sent, each once" in reason for reason in run.rounds[1]["failure_reasons"])


# --- what clients say ---------------------------------------------------------------------------------------------

LOUD = "\x1b[2J\x00line\n\u202e" * 10**5


def test_what_clients_say_is_kept_short_and_on_one_line(federate, caplog):
    def loud(request, reply, partition):
        if partition == 0:
            raise ValueError(LOUD)
        reply.content["fields"].update([{}, {"density": LOUD}, {"note": LOUD}][partition % 3])
        if partition == 3:
            honest = wire.payload_of(reply.content, 10**7)
            reply.content[wire.PAYLOAD] = wire.to_arrays(Payload({**honest.tensors, LOUD[:60_000]: torch.ones(1)}))
        return reply

    def loud_digest(request, reply, partition):
        reply.content["fields"].update({"digest": LOUD} if partition == 5 else {})
        return reply

    settings = {**SHORT, "num_server_rounds": 2, "system": "fedavg", "evaluate_every": 1}
    run = federate(app=tampered_app(loud, evaluate=loud_digest), **settings)
    for row in run.rounds:
        assert (row["replies"], row["failures"]) == (2, 4), "0 raises, 1 and 4 have no density, 3 a tensor too many"
        assert len(row["notes"]) == 2
        assert all(text.isprintable() and len(text) < 600 for text in (*row["failure_reasons"], *row["notes"]))
        assert row["evaluation_failures"] == 1
    assert (run.folder / "rounds.jsonl").stat().st_size < 10_000
    assert caplog.messages
    assert all(text.isprintable() and len(text) < 700 for text in caplog.messages)


WILD = {
    "accuracy-personal": [2.0, -0.1, math.nan, "x", True, 10**400],
    "density": [math.inf, []],
    "inference-flops": [-1, 1e301, 10**400],
    "digest": ["", "g" * 64, "a" * 65, 3],
    "density/conv1.weight": [1.5, b"x"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WILD.items() for value in values])
def test_an_evaluation_that_cannot_be_is_left_out_of_the_means(name, value):
    """As the server reads it, whatever a client's fields hold."""

    def read(fields):
        return {
            "digest": evaluation.digest_in(fields),
            **row_of(ReplyKind.EVALUATION, fields, layers={"conv1.weight"}),
        }

    honest = {"digest": "a" * 64, "density": 1.0, "inference-flops": 10, "accuracy-personal": 0.5}
    assert read(honest)["accuracy_personal"] == 0.5
    with pytest.raises(ValueError, match=f"field '{name}' is ") as error:
        read({**honest, name: value})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("versions", [[math.inf], full("all"), full([1, 1])])
def test_a_client_that_says_anything_of_its_states_has_lost_them(federate, tmp_path, versions):
    """It keeps nobody from resuming, where a loss is accepted."""

    def query(request, reply, partition):
        if "states" in wire.fields_of(request.content) and partition == 1:
            reply.content["fields"]["lost-rounds"] = versions
        return reply

    federate(system="standalone", clients=3, **SHORT)
    again = {**SHORT, "num_server_rounds": 2, "resume_from": str(tmp_path / "run"), "accept_loss": True}
    run = federate(system="standalone", clients=3, app=tampered_app(query=query), **again)
    assert any("its state cannot be checked" in line for line in run.info["losses"])
