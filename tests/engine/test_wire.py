from __future__ import annotations

import math

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.wire import Schema


def payload() -> Payload:
    tensors = {"w": torch.arange(1.0, 13.0).reshape(3, 4), "b": torch.ones(3)}
    return Payload.pruned(tensors, {"w": torch.arange(12).reshape(3, 4) % 3 == 0})


def test_a_payload_survives_flower_s_serialisation():
    record = wire.pack(wire.to_arrays(payload()), {"round": 3})
    back = wire.payload_of(record, max_bytes=10_000)
    assert back.digest() == payload().digest()
    assert wire.fields_of(record) == {"round": 3}


def test_bytes_are_those_of_the_serialised_message():
    record = wire.pack(wire.to_arrays(payload()), {"round": 3, "loss": 0.5})
    assert wire.num_bytes(record) == len(recorddict_to_proto(record).SerializeToString())


def test_masked_values_cost_nothing_on_the_wire():
    tensors = {"w": torch.randn(100, 100)}
    dense = wire.num_bytes(wire.pack(wire.to_arrays(Payload(tensors)), {}))
    mask = torch.zeros(100, 100, dtype=torch.bool)
    mask[:, :10] = True
    sparse = wire.num_bytes(wire.pack(wire.to_arrays(Payload.pruned(tensors, {"w": mask})), {}))
    assert dense > 40_000
    assert 4_000 < sparse < 4_000 + 1_250 + 300


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (ArrayRecord({"fp1": Array("float32", (3,), "numpy.ndarray", b"abc")}), "is of type"),
        (ArrayRecord({"fp1": Array("uint8", (3,), "fedprune.codec", b"\xff\xff\xff")}), "ends too early"),
        (ArrayRecord({"other": Array("uint8", (3,), "fedprune.codec", b"abc")}), "other"),
    ],
)
def test_arrays_that_are_not_ours_are_one_value_error(arrays, says):
    with pytest.raises(ValueError, match=says) as caught:
        wire.payload_of(RecordDict({"payload": arrays}), max_bytes=1000)
    assert "\n" not in str(caught.value)


def test_a_payload_above_the_size_cap_is_refused():
    record = wire.pack(wire.to_arrays(Payload({"w": torch.zeros(1000)})), {})
    with pytest.raises(ValueError, match="allowed"):
        wire.payload_of(record, max_bytes=3999)
    assert wire.payload_of(record, max_bytes=5000).num_elements() == 1000


def test_missing_or_misplaced_records_are_refused():
    with pytest.raises(ValueError, match="no record 'fields'"):
        wire.fields_of(RecordDict())
    with pytest.raises(ValueError, match="holds no arrays"):
        wire.payload_of(RecordDict({"payload": ConfigRecord({"a": 1})}), max_bytes=10)


@pytest.mark.parametrize("value", ["1", None, True, math.nan, math.inf, -0.1, 1.1, [0.5]])
def test_a_field_that_is_no_number_in_range_is_refused(value):
    with pytest.raises(ValueError, match="field 'density' is"):
        wire.number({"density": value}, "density", 0, 1)


def bad(**changes) -> Payload:
    tensors, masks = dict(payload().tensors), dict(payload().masks)
    for name, value in changes.items():
        kind, _, name = name.partition("_")
        target = tensors if kind == "tensor" else masks
        if value is None:
            del target[name]
        else:
            target[name] = value
    return Payload(tensors, masks)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (bad(tensor_b=None), r"wrong tensors: \['b'\] missing"),
        (bad(tensor_c=torch.ones(1)), r"wrong tensors: \['c'\] missing or not asked for"),
        (bad(mask_w=None), r"wrong masks: \['w'\]"),
        (bad(mask_b=torch.ones(3, dtype=torch.bool)), r"wrong masks: \['b'\]"),
        (bad(tensor_b=torch.ones(4)), "tensor 'b' has shape"),
        (bad(tensor_b=torch.ones(3, dtype=torch.float64)), "tensor 'b' has dtype"),
        (bad(tensor_b=torch.tensor([1.0, math.nan, 1.0])), "NaN or infinite"),
        (bad(tensor_b=torch.tensor([1.0, math.inf, 1.0])), "NaN or infinite"),
    ],
)
def test_a_reply_that_does_not_fit_the_schema_is_refused_by_name(wrong, says):
    schema = Schema.like(payload().tensors, masked=frozenset({"w"}))
    schema.check(payload())
    with pytest.raises(ValueError, match=says):
        schema.check(wrong)


# --- payloads that several messages share, and other clients' payloads ------------------------------------------------


def test_a_shared_payload_weighs_in_every_message_what_the_message_serialises_to():
    shared, other = wire.to_arrays(payload()), wire.to_arrays(Payload({"w": torch.ones(500)}))
    messages = [
        wire.pack(shared, {"round": 3}),
        wire.pack(shared, {"round": 3}, {3: shared}),
        wire.pack(None, {"round": 300}, {3: shared, 12: shared, 10**40: shared}),
        wire.pack(other, {}, {3: other, 12: shared}),
    ]
    for record in [*messages, *messages]:  # measured, then remembered
        assert wire.num_bytes(record) == len(recorddict_to_proto(record).SerializeToString())


def test_the_size_of_arrays_is_that_of_the_serialised_ones_at_each_length_of_a_length():
    for length in (0, 1, 80, 90, 100, 110, 127, 128, 129, 2**14 - 30, 2**14 - 1, 2**14, 2**14 + 1, 2**21 - 40, 2**21):
        for name in ("payload", "peer/3", "x" * 130):
            arrays = ArrayRecord({key: Array("uint8", (length,), "numpy", bytes(length)) for key in ("α", "k" * 200)})
            record = RecordDict({name: arrays})
            assert wire.item_bytes(name, arrays) == len(recorddict_to_proto(record).SerializeToString())


def test_encoded_arrays_become_bytes_and_the_same_arrays_again():
    arrays = wire.to_arrays(payload())
    again = wire.from_bytes(wire.to_bytes(arrays))
    assert wire.to_bytes(again) == wire.to_bytes(arrays)
    assert wire.from_arrays(again, 10_000).digest() == payload().digest()
    with pytest.raises(ValueError, match="array 'fp1' is of type"):
        wire.to_bytes(ArrayRecord({"fp1": Array("uint8", (3,), "numpy.ndarray", b"abc")}))


SCHEMA = Schema.like(payload().tensors, masked=frozenset({"w"}))
TOO_LARGE = Payload({**payload().tensors, "b": torch.ones(10_000)}, payload().masks)


def scaled(factor: float) -> Payload:
    return Payload({name: factor * tensor for name, tensor in payload().tensors.items()}, payload().masks)


@pytest.mark.parametrize(
    ("name", "record", "says"),
    [
        ("peer/2", wire.from_bytes({"fp1": b"\xff\x00garbage"}), "tensor number 0"),
        ("peer/2", wire.from_bytes({"fp1": b""}), "missing"),
        ("peer/2", wire.from_bytes({}), "arrays"),
        ("peer/2", wire.from_bytes({"fp9": b"abc"}), "fp9"),
        ("peer/2", ArrayRecord({"fp1": Array("uint8", (3,), "numpy.ndarray", b"abc")}), "is of type"),
        ("peer/2", wire.to_arrays(bad(tensor_b=torch.ones(2))), "tensor 'b' has shape"),
        ("peer/2", wire.to_arrays(bad(tensor_b=torch.tensor([1.0, math.nan, 1.0]))), "NaN or infinite"),
        ("peer/2", wire.to_arrays(bad(mask_w=None)), "wrong masks"),
        ("peer/2", wire.to_arrays(TOO_LARGE), "allowed"),
        ("peer/2", ConfigRecord({"a": 1}), "holds no arrays"),
        ("peer/two", wire.to_arrays(payload()), "two"),
        ("peer/", wire.to_arrays(payload()), "peer/"),
        ("peer/1.5", wire.to_arrays(payload()), "1.5"),
    ],
)
def test_a_bad_update_is_left_out_with_its_reason_and_the_good_ones_stay(name, record, says):
    content = wire.pack(None, {"round": 3}, {11: wire.to_arrays(scaled(2))})
    content[name] = record
    content["peer/5"] = wire.to_arrays(scaled(3))
    letters, refused = wire.peer_updates_of(content, SCHEMA)
    assert list(letters) == [5, 11]
    assert (letters[5].digest(), letters[11].digest()) == (scaled(3).digest(), scaled(2).digest())
    (reason,) = refused
    assert reason.startswith(f"{name} is left out: ")
    assert says in reason
    assert "\n" not in reason


def test_letters_come_by_sender_whatever_their_order_and_other_records_are_none():
    letters = {12: wire.to_arrays(scaled(1)), 0: wire.to_arrays(scaled(2)), 3: wire.to_arrays(scaled(3))}
    found, refused = wire.peer_updates_of(wire.pack(wire.to_arrays(payload()), {"letter": 1}, letters), SCHEMA)
    assert list(found) == [0, 3, 12]
    assert [found[k].digest() for k in (0, 3, 12)] == [scaled(k).digest() for k in (2, 3, 1)]
    assert refused == []
    assert wire.peer_updates_of(wire.pack(wire.to_arrays(payload()), {}), SCHEMA) == ({}, [])


def test_a_payload_is_sent_as_flowers_own_record_and_comes_back_as_one():
    """Over gRPC Flower names the class of each object that it sends; the simulation's pickles hide a wrong name."""
    encoded = wire.to_arrays(Payload({"w": torch.arange(3.0)}))
    plain = ArrayRecord(dict(encoded))
    content = wire.pack(encoded, {"round": 1})
    assert encoded.object_id == plain.object_id
    objects = get_all_nested_objects(content)
    contents = {object_id: each.deflate() for object_id, each in objects.items()}
    arrived = inflate_object_from_contents(content.object_id, contents)
    assert torch.equal(wire.payload_of(arrived, 100).tensors["w"], torch.arange(3.0))
