"""Clients that misbehave, in whole federations: the run goes on without them, or stops with everything good on disk."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import Message

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import TooFewReplies
from tests.conftest import Finished, tampered_app, wrapped_app
from tests.examples import in_test
from tests.refusing import refuses


def with_payload(change):
    """Clients 1 and 4 send a changed payload, from round 2 on."""

    def tamper(request: Message, reply: Message, partition: int) -> Message:
        if partition not in (1, 4) or request.content["fields"]["round"] == 1:
            return reply
        payload = wire.payload_of(reply.content, 10**9)
        changed = change(dict(payload.tensors), dict(payload.masks))
        return Message(wire.pack(wire.to_arrays(changed), wire.fields_of(reply.content)), reply_to=request)

    return tampered_app(tamper)


def with_fields(**fields):
    def tamper(request: Message, reply: Message, partition: int) -> Message:
        if partition not in (1, 4) or request.content["fields"]["round"] == 1:
            return reply
        reply.content["fields"].update(fields)
        return reply

    return tampered_app(tamper)


def raising(request: Message, reply: Message, partition: int) -> Message:
    if partition == 1:
        raise OSError("no space left on device")
    return reply


W = "fc1.weight"
CASES = {
    "NaN": (with_payload(lambda t, m: Payload(t | {W: t[W] * math.nan}, m)), "NaN or infinite"),
    "Inf": (with_payload(lambda t, m: Payload(t | {W: t[W] + math.inf}, m)), "NaN or infinite"),
    "huge": (with_payload(lambda t, m: Payload(t | {"fc1.bias": t["fc1.bias"] + 1e30}, m)), "has magnitude"),
    "shape": (with_payload(lambda t, m: Payload(t | {"fc1.bias": torch.ones(3)}, m)), "has shape"),
    "dtype": (with_payload(lambda t, m: Payload(t | {"fc1.bias": t["fc1.bias"].double()}, m)), "has dtype"),
    "no mask": (with_payload(lambda t, m: Payload(t, {k: v for k, v in m.items() if k != W})), "wrong masks"),
    "mask too many": (
        with_payload(lambda t, m: Payload(t, m | {"fc1.bias": torch.ones(10, dtype=torch.bool)})),
        "wrong masks",
    ),
    "name too many": (with_payload(lambda t, m: Payload(t | {"backdoor": torch.ones(1)}, m)), "not asked for"),
    "nothing": (with_payload(lambda t, m: Payload({})), "missing"),
    "loss": (with_fields(loss=math.nan), "field 'loss' is nan"),
    "count": (with_fields(**{"num-examples": 10**6}), "it said"),
    "text": (with_fields(density="dense"), "field 'density' is 'dense'"),
}


@pytest.mark.parametrize("case", in_test(CASES, "NaN"))
def test_a_bad_reply_is_named_counted_and_left_out(case, federate):
    app, says = CASES[case]
    finished = federate(name=case, app=app, fraction_train=1.0, local_epochs=1, num_server_rounds=2, evaluate_every=2)
    first, second = finished.rounds
    assert (first["replies"], first["failures"]) == (6, 0)
    assert (second["replies"], second["failures"]) == (4, 2)
    assert [text.split(":")[0] for text in second["failure_reasons"]] == ["client 1", "client 4"]
    assert all(says in text for text in second["failure_reasons"])
    assert finished.info["status"] == "completed"


def test_what_a_refused_client_sent_does_not_move_the_model(federate):
    nan = with_payload(lambda t, m: Payload(t | {W: t[W] * math.nan}, m))
    nothing = with_payload(lambda t, m: Payload({}))
    settings = {"fraction_train": 1.0, "local_epochs": 1, "num_server_rounds": 2, "evaluate_every": 0}
    assert federate(name="a", app=nan, **settings).sha256 == federate(name="b", app=nothing, **settings).sha256


def test_a_client_that_raises_is_left_out(federate):
    finished = federate(app=tampered_app(raising), fraction_train=1.0, local_epochs=1)
    assert [row["failures"] for row in finished.rounds] == [1, 1, 1]
    assert "client 1: OSError: no space left on device" in finished.rounds[0]["failure_reasons"][0]


def test_too_few_replies_stop_the_run_and_leave_the_good_rounds(federate, tmp_path):
    nan = with_payload(lambda t, m: Payload(t | {W: t[W] * math.nan}, m))
    with pytest.raises(TooFewReplies, match=r"round 2 had 4 good replies, min-replies asks for 5; .*: client 1"):
        federate(app=nan, fraction_train=1.0, local_epochs=1, min_replies=5)
    finished = Finished(tmp_path / "run")
    assert finished.info["status"] == "failed"
    assert "round 2 had 4 good replies" in finished.info["error"]
    assert [row["round"] for row in finished.rounds] == [1]
    assert finished.info["rounds_completed"] == 1
    assert (finished.folder / "checkpoints" / "round-00001.safetensors").exists()


@pytest.mark.full
def test_a_failed_run_resumes_where_it_was_good(federate, tmp_path):
    whole = federate(name="whole", fraction_train=1.0, local_epochs=1)
    nan = with_payload(lambda t, m: Payload(t | {W: t[W] * math.nan}, m))
    with pytest.raises(TooFewReplies):
        federate(name="cut", app=nan, fraction_train=1.0, local_epochs=1, min_replies=5)
    cut = federate(name="cut", fraction_train=1.0, local_epochs=1, min_replies=5, resume_from=str(tmp_path / "cut"))
    assert cut.info["status"] == "completed"
    assert cut.sha256 == whole.sha256
    assert [row["round"] for row in cut.rounds] == [1, 2, 3]
    assert [row["accuracy_personal_mean"] for row in cut.rounds] == [
        row["accuracy_personal_mean"] for row in whole.rounds
    ]


@pytest.mark.full
def test_a_damaged_checkpoint_costs_one_round_not_the_run(federate, tmp_path):
    whole = federate(name="whole")
    federate(name="cut", num_server_rounds=2)
    newest = tmp_path / "cut" / "checkpoints" / "round-00002.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    cut = federate(name="cut", resume_from=str(tmp_path / "cut"))
    assert cut.sha256 == whole.sha256
    assert cut.info["resumed_after_rounds"] == [1]
    assert cut.info["config"] == whole.info["config"] | {"out-dir": str(tmp_path / "cut")}, "also of how many rounds"


@pytest.mark.full
def test_runs_that_share_a_state_dir_do_not_see_each_others_clients(federate, tmp_path):
    alone = federate(name="alone", num_server_rounds=2).sha256
    shared = str(tmp_path / "state")
    federate(name="first", num_server_rounds=2, seed=1, state_dir=shared)
    assert federate(name="second", num_server_rounds=1, state_dir=shared).sha256 != alone
    second = federate(name="second", num_server_rounds=2, state_dir=shared, resume_from=str(tmp_path / "second"))
    assert second.sha256 == alone
    assert not (tmp_path / "second" / "clients").exists()
    assert len(list((tmp_path / "state").iterdir())) == 2


def test_resuming_with_another_number_of_clients_is_refused(federate, tmp_path):
    federate(name="run", num_server_rounds=1)
    with pytest.raises(ValueError, match=r"6 clients, and now 7"):
        federate(name="run", clients=7, resume_from=str(tmp_path / "run"))
    with pytest.raises(TooFewReplies, match=r"5 of the 6 clients that the run waits for connected within"):
        federate(name="run", clients=5, resume_from=str(tmp_path / "run"), startup_seconds=0.5)


def test_resuming_without_a_readable_checkpoint_keeps_the_record(federate, tmp_path):
    first = federate(name="run", num_server_rounds=2)
    for path in (first.folder / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no readable checkpoint"):
        federate(name="run", resume_from=str(tmp_path / "run"))
    assert len(first.rounds) == 2
    assert first.info["status"] == "completed"


def test_a_lost_client_state_is_said_and_the_previous_one_used(federate, tmp_path):
    federate(name="run", fraction_train=1.0, num_server_rounds=2)
    (tmp_path / "run/clients/00003/round-00002.safetensors").write_bytes(b"damaged")
    for path in (tmp_path / "run/clients/00004").glob("*.safetensors"):
        path.unlink()
    before = contents(tmp_path / "run")
    more = {"fraction_train": 1.0, "num_server_rounds": 3, "resume_from": str(tmp_path / "run")}
    with refuses("the run", where="00003/round-00002.safetensors", allowed="accept-loss"):
        federate(name="run", **more)
    assert contents(tmp_path / "run") == before
    run = federate(name="run", accept_loss=True, **more)
    lost = ["client 3: the state of round 2 is lost, went on from round 1"]
    lost += ["client 4: the state of round 2 is lost, began anew"]
    assert run.rounds[-1]["notes"] == lost
    assert run.info["status"] == "completed"
    assert [line[:40] for line in run.info["losses"]] == [
        f"client 3: state file '{tmp_path}"[:40],
        f"client 4: state file '{tmp_path}"[:40],
        *(line[:40] for line in lost),
    ]
    assert run.info["config"]["accept-loss"] is False, "it is for one time"


def contents(folder):
    """Every file of a folder, but for the lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def late_in_round_2(request: Message, reply: Message, partition: int) -> Message:
    if partition == 1 and request.content["fields"]["round"] == 2:
        raise TimeoutError("the server did not wait")
    return reply


@pytest.mark.full
def test_a_client_whose_reply_did_not_count_goes_on_from_the_state_that_did(federate, tmp_path):
    """The reply of round 2 is lost after the client saved its state: as if round 2 had not happened to it."""
    settings = {"fraction_train": 1.0, "local_epochs": 1, "num_server_rounds": 3}
    late = federate(name="late", app=tampered_app(late_in_round_2), **settings)

    def skipping(request: Message, context, honest):
        if context.node_config["partition-id"] == 1 and request.content["fields"]["round"] == 2:
            raise TimeoutError("the server did not wait")
        return honest(request, context)

    skipped = federate(name="skipped", app=wrapped_app(skipping), **settings)
    assert [row["failures"] for row in late.rounds] == [row["failures"] for row in skipped.rounds] == [0, 1, 0]
    assert late.sha256 == skipped.sha256


def test_training_that_diverges_is_said_and_not_kept(federate, tmp_path):
    with pytest.raises(TooFewReplies, match="training diverged"):
        federate(learning_rate=1e30, momentum=0.0, num_server_rounds=1)
    assert not list((tmp_path / "run" / "clients").rglob("*.safetensors"))


def test_a_run_that_failed_before_its_first_round_can_be_started_again(federate):
    with pytest.raises(TooFewReplies):
        federate(dataset="mnist", data_dir="/nowhere")
    assert federate().info["status"] == "completed"


def test_resuming_a_finished_run_gives_its_hash_again(federate, tmp_path):
    first = federate(name="run").sha256
    assert federate(name="run", resume_from=str(tmp_path / "run")).sha256 == first


def test_resuming_with_another_setting_is_refused_by_name(federate, tmp_path):
    federate(name="run", num_server_rounds=1)
    with refuses("learning-rate", 0.5, condition="when resuming"):
        federate(name="run", learning_rate=0.5, resume_from=str(tmp_path / "run"))


def test_a_folder_that_holds_a_run_is_not_written_over(federate):
    federate(num_server_rounds=1)
    with pytest.raises(ValueError, match="already holds a run"):
        federate(num_server_rounds=1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dataset": "mnist", "data_dir": "/nowhere"}, "data-dir"),
        ({"shards_per_client": 1000}, "shards-per-client"),
        ({"partition": "classes", "classes_per_client": 11}, "classes-per-client"),
        ({"model": "lenet5"}, "too small"),
    ],
)
def test_what_no_client_can_do_is_said_once_by_the_run(federate, settings, says):
    with pytest.raises((TooFewReplies, ValueError), match=says) as caught:
        federate(**settings)
    assert "\n" not in str(caught.value)
