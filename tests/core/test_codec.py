"""The wire codec: round trip, size, one spelling per message, nothing but ValueError for hostile bytes."""

import gc
import math

import constriction
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedprune_app.core import codec
from fedprune_app.core.codec import decode, encode
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator, numpy_generator
from tests.examples import examples

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def message(body: bytes) -> dict[str, np.ndarray]:
    return {codec.KEY: np.frombuffer(body, np.uint8)}


def varint(value: int) -> bytes:
    head = b""
    while value > 127:
        head, value = head + bytes([value & 127 | 128]), value >> 7
    return head + bytes([value])


def body_of(arrays: dict[str, np.ndarray]) -> bytes:
    return arrays[codec.KEY].tobytes()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Any bit pattern: NaNs with payloads, infinities, -0.0, subnormals."""
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw.view(f"i{dtype.itemsize}")).view(dtype).reshape(shape)


def exact_mask(shape: tuple[int, ...], kept: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.permutation(math.prod(shape)) < kept).reshape(shape)


def assert_same_bits(decoded: Payload, sent: Payload) -> None:
    """Equal names in equal order, dtypes, shapes, masks, bits of the kept values; zero bits elsewhere."""
    assert list(decoded.tensors) == list(sent.tensors)
    assert set(decoded.masks) == set(sent.masks)
    for name, tensor in sent.tensors.items():
        mask = sent.masks.get(name, torch.ones(tensor.shape, dtype=torch.bool))
        result = decoded.tensors[name]
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        assert name not in sent.masks or torch.equal(decoded.masks[name], mask)
        carrier = INTEGERS[tensor.dtype.itemsize]
        expected = torch.where(mask, tensor.contiguous().view(carrier), 0)
        assert torch.equal(result.view(carrier), expected)


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    rng = numpy_generator(draw(st.integers(0, 2**32)), "codec test")
    tensors, masks = {}, {}
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=5, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=5)))
        tensors[name] = random_bits(shape, draw(st.sampled_from(DTYPES)), rng)
        if draw(st.booleans()):
            kept = draw(st.integers(0, math.prod(shape)))
            masks[name] = exact_mask(shape, kept, rng)
            if tensors[name].dtype == torch.bool:  # the mask itself
                tensors[name] = masks[name]
    return Payload(tensors, masks)


@given(payloads())
@settings(deadline=None, max_examples=examples(200))
def test_every_payload_comes_back_bit_for_bit(payload):
    assert_same_bits(decode(encode(payload)), payload)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [None, 0.0, 0.001, 0.3, 0.5, 0.97, 1.0])
def test_every_dtype_survives_every_way_a_mask_travels(dtype, density):
    rng = numpy_generator(1, "codec test")
    shape = (3, 61, 1001)  # longer than one call of the entropy coder
    tensor = random_bits(shape, dtype, rng)
    masks = {} if density is None else {"w": exact_mask(shape, round(density * tensor.numel()), rng)}
    if dtype == torch.bool:
        tensor = masks.get("w", tensor)
    payload = Payload({"w": tensor, "end": torch.tensor(7)}, masks)
    assert_same_bits(decode(encode(payload)), payload)


def test_special_floats_and_a_kept_zero_survive():
    bits = torch.tensor([0x7FC00001, -1, -0x80000000, 0x7F800000, 1, 0, 0, 0], dtype=torch.int32)
    mask = torch.tensor([True] * 6 + [False] * 2)  # NaN payloads, -0.0, inf, subnormal, a kept 0
    decoded = decode(encode(Payload({"w": bits.view(torch.float32)}, {"w": mask})))
    assert torch.equal(decoded.tensors["w"].view(torch.int32), bits)
    assert torch.equal(decoded.masks["w"], mask)


def test_a_scalar_and_empty_tensors_survive_with_and_without_mask():
    tensors = {
        "batches": torch.tensor(12345678901, dtype=torch.int64),
        "pruned scalar": torch.tensor(0.0),
        "empty": torch.empty(0, 5),
        "masked empty": torch.empty(3, 0),
    }
    masks = {
        "pruned scalar": torch.tensor(False),
        "masked empty": torch.empty(3, 0, dtype=torch.bool),
    }
    assert_same_bits(decode(encode(Payload(tensors, masks))), Payload(tensors, masks))


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.5, 1.0])
def test_a_mask_alone_costs_its_entropy_and_no_value(density):
    mask = exact_mask((100, 200), round(density * 20_000), numpy_generator(4, "codec test"))
    sent = Payload({"w": mask, "v": mask}, {"w": mask, "v": mask})
    bits = 2 * entropy_bound(mask.numel(), int(mask.sum()), 0)
    assert len(body_of(encode(sent))) <= 1.02 * bits + 24
    assert_same_bits(decode(encode(sent)), sent)
    with pytest.raises(ValueError, match="boolean tensor 'w' differs from its mask"):
        encode(Payload({"w": ~mask}, {"w": mask}))


def test_a_payload_without_tensors_is_zero_bytes():
    arrays = encode(Payload({}))
    assert body_of(arrays) == b""
    assert dict(decode(arrays).tensors) == {}


def test_a_channels_last_or_sliced_tensor_comes_back_in_logical_order():
    rng = generator(1, "codec test")
    weights = torch.randn(4, 3, 5, 5, generator=rng).to(memory_format=torch.channels_last)
    mask = (torch.rand(4, 3, 5, 5, generator=rng) < 0.3).to(memory_format=torch.channels_last)
    tensors = {
        "w": weights * mask,
        "t": torch.arange(12.0).reshape(3, 4).T[1:],
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    decoded = decode(encode(Payload(tensors, {"w": mask})))
    assert all(torch.equal(decoded.tensors[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(decoded.masks["w"], mask)


@pytest.mark.parametrize("tensor", [torch.arange(6.0)[::2], torch.ones(4, 3)[:, :1], torch.ones(1).expand(5)])
def test_tensors_of_any_stride_are_sent_whole(tensor):
    for masks in ({}, {"w": torch.ones_like(tensor, dtype=torch.bool)}):
        found = decode(encode(Payload({"w": tensor}, masks)))
        assert torch.equal(found.tensors["w"], tensor)


def test_an_empty_tensor_from_a_message_has_a_digest():
    found = decode(encode(Payload({"w": torch.empty(0)})))
    assert found.digest() == Payload({"w": torch.empty(0)}).digest()


def test_values_off_the_mask_are_not_sent():
    mask = torch.tensor([True, False])
    decoded = decode(encode(Payload({"w": torch.tensor([1.0, 2.0])}, {"w": mask})))
    assert decoded.tensors["w"].tolist() == [1.0, 0.0]


def test_the_decoded_payload_owns_its_memory():
    known = {"w": exact_mask((400,), 100, numpy_generator(1, "codec test"))}
    payload = Payload({"w": known["w"] * 1.0, "b": torch.ones(3)}, known)
    arrays = encode(payload)
    before = body_of(arrays)
    decoded = decode(arrays)
    for tensor in decoded.tensors.values():
        tensor.fill_(5)
    decoded.masks["w"].fill_(True)
    assert body_of(arrays) == before
    assert int(known["w"].sum()) == 100


# Size


def entropy_bound(numel: int, kept: int, value_bits: int = 32) -> float:
    """Bytes: n H(k/n) bits for the mask, and those of each kept value."""
    rest = numel - kept
    bits = sum(count * math.log2(numel / count) for count in (kept, rest) if count)
    return (bits + value_bits * kept) / 8


@pytest.mark.parametrize(
    ("numel", "tolerance"),
    [
        (4_097, 0.03),
        (4_100, 0.03),
        (5_000, 0.03),
        (10_000, 0.03),
        (50_000, 0.03),
        (100_001, 0.01),
        (1_000_000, 0.01),
    ],
)
def test_a_message_is_within_its_tolerance_of_the_entropy_bound(numel, tolerance):
    rng = numpy_generator(1, "codec test")
    for density in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.43, 0.44, 0.5, 0.57, 0.7, 0.9, 0.95, 0.99):
        kept = round(numel * density)
        mask = exact_mask((numel,), kept, rng)
        payload = Payload({"w": random_bits((numel,), torch.float32, rng)}, {"w": mask})
        size = len(body_of(encode(payload)))
        assert size <= (1 + tolerance) * entropy_bound(numel, kept), density


def test_a_lenet_at_five_percent_is_within_three_percent_of_its_bound():
    shapes = {
        "conv1.weight": (6, 3, 5, 5),
        "conv2.weight": (16, 6, 5, 5),
        "fc1.weight": (120, 400),
        "fc2.weight": (84, 120),
        "fc3.weight": (10, 84),
    }
    rng = numpy_generator(1, "codec test")
    tensors = {name: random_bits(shape, torch.float32, rng) for name, shape in shapes.items()}
    masks = {name: exact_mask(s, round(0.05 * math.prod(s)), rng) for name, s in shapes.items()}
    bound = sum(entropy_bound(mask.numel(), int(mask.sum())) for mask in masks.values())
    assert len(body_of(encode(Payload(tensors, masks)))) <= 1.03 * bound


def test_masks_that_keep_all_or_nothing_cost_a_few_bytes_and_stay_explicit():
    ones, zeros = torch.ones(300, 300), torch.zeros(300, 300)
    dense = Payload({"w": ones})
    full = Payload({"w": ones}, {"w": ones.bool()})
    empty = Payload({"w": zeros}, {"w": zeros.bool()})
    assert len(body_of(encode(dense))) <= 4 * ones.numel() + 10
    assert len(body_of(encode(full))) <= 4 * ones.numel() + 10
    assert len(body_of(encode(empty))) <= 10
    assert "w" not in decode(encode(dense)).masks
    assert decode(encode(full)).masks["w"].all()
    assert not decode(encode(empty)).masks["w"].any()


def test_the_bytes_of_a_message_written_by_hand():
    payload = Payload({"w": torch.tensor([[1.0, 0.0]]), "n": torch.tensor(3)}, {"w": torch.tensor([[True, False]])})
    by_hand = (
        bytes([0b0001_0001]) + b"w" + bytes([1, 2, 1])  # short, 2 dimensions, name of 1 byte; (1, 2), 1 kept
        + bytes([0b1100_0100, 0, 1]) + b"n"  # last, long, dense, int64; 0 dimensions, name of 1 byte
        + bytes([0b01])  # the bitmap, first element in the lowest bit
        + bytes.fromhex("0000803f" "0300000000000000")  # 1.0, 3
    )  # fmt: skip
    assert body_of(encode(payload)) == by_hand


def slow_ans(masks: list[tuple[list[bool], int, int]], lent: bytes) -> list[int]:
    """Range ANS as Duda defines it, on Python integers: 64-bit state, 32-bit words, 24-bit probabilities.

    Of each mask: its symbols, then the count of ones and the length that set the probability.
    """
    state, words = 1 << 32 | int.from_bytes(lent, "little"), []
    for symbols, kept, numel in reversed(masks):
        ones = min(max((kept * 2**24 + numel // 2) // numel, 1), 2**24 - 1)
        for symbol in reversed(symbols):
            start, width = (2**24 - ones, ones) if symbol else (0, 2**24 - ones)
            if state >> 40 >= width:
                words.append(state & 0xFFFFFFFF)
                state >>= 32
            state = (state // width << 24) + start + state % width
    return [*words, state & 0xFFFFFFFF, state >> 32]


def as_bytes(words: list[int]) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in words).rstrip(b"\0")


@pytest.mark.parametrize("densities", [(0.003,), (0.3,), (0.01, 0.99, 0.2), (0.7, 0.1)])
def test_entropy_coded_masks_are_what_a_slow_reference_coder_writes(densities):
    rng = numpy_generator(2, "codec test")
    masks = {f"w{i}": exact_mask((997,), round(997 * d), rng) for i, d in enumerate(densities)}
    tensors = {name: random_bits((997,), torch.float32, rng) for name in masks}
    values = b"".join(tensors[name][mask].numpy().tobytes() for name, mask in masks.items())
    words = slow_ans([(mask.tolist(), int(mask.sum()), 997) for mask in masks.values()], values[:4])
    assert body_of(encode(Payload(tensors, masks))).endswith(as_bytes(words) + values[4:])


@given(st.integers(2, 2**40), st.data())
@settings(deadline=None, max_examples=examples(100))
def test_the_coder_uses_exactly_the_probability_that_the_integers_say(numel, data):
    kept = data.draw(st.integers(1, numel - 1))
    entry = codec._Entry("w", (numel,), torch.float32, codec._MASKED, kept)
    symbols = [bool(i % 3) for i in range(40)]
    coder = constriction.stream.stack.AnsCoder(np.array([9], np.uint32), seal=True)
    coder.encode_reverse(np.array(symbols, np.int32), codec._bernoulli(entry))
    assert coder.get_compressed().tolist() == slow_ans([(symbols, kept, numel)], b"\x09")


# What cannot be written


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (
            {"w": torch.zeros(2, dtype=torch.complex64)},
            "tensor 'w' has dtype torch.complex64, allowed: torch.float32",
        ),
        ({"w": torch.zeros([1] * 17)}, "tensor 'w' has 17 dimensions, allowed: 16"),
        ({"w" * 1025: torch.zeros(1)}, "has 1025 bytes, allowed: 1024"),
        ({"\ud800": torch.zeros(1)}, "cannot be written as UTF-8"),
        (
            {str(i): torch.zeros(0) for i in range(codec.MAX_TENSORS + 1)},
            "16385 tensors, allowed: at most 16384",
        ),
    ],
    ids=["dtype", "dimensions", "name length", "surrogate", "count"],
)
def test_what_the_format_has_no_room_for_is_refused_when_writing(tensors, expected):
    with pytest.raises(ValueError, match=expected):
        encode(Payload(tensors))


# Hostile messages

MASKED = bytes([0x81]) + b"w"  # last, short form, 1 dimension; then size, kept
LONG = 0xC0  # last, long form, dense, float32; then dimensions, name length, name, sizes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\x81", "ends too early"),
        (bytes([LONG, 1, 1]) + b"w\x02" + bytes(7), "of 12 bytes, its header declares 13"),
        (bytes([LONG, 1, 1]) + b"w\x02" + bytes(9), "of 14 bytes, its header declares 13"),
        (bytes([LONG, 1, 1]) + b"w" + varint(2**40), "more than the allowed 2147483648 bytes, at tensor 'w'"),
        (bytes([LONG, 3, 1]) + b"w" + 3 * varint(2**62), "more than the allowed"),
        (bytes([LONG, 2, 1]) + b"w\0" + varint(2**62), "more than the allowed"),
        (bytes([LONG, 1, 1]) + b"w" + b"\xff" * 10, "a number above"),
        (bytes([LONG, 1, 1]) + b"w" + b"\x80" * 9 + b"\1", "a number above"),
        (bytes([LONG, 1, 1]) + b"w\x82\0" + bytes(8), "not in its one shortest form"),
        (bytes([LONG | 1 << 3, 1, 1]) + b"w\x02\0", "not in its one shortest form"),
        (bytes([LONG | 3 << 3, 1, 1]) + b"w\x02\0", "tensor number 0 of a message has kind 3, allowed: at"),
        (bytes([LONG, 17, 1]) + b"w", "number of dimensions 17, allowed: at most 16"),
        (bytes([LONG, 0]) + varint(2**40), "name length 1099511627776, allowed: at most 1024"),
        (bytes([LONG, 0, 2]) + b"\xff\xfe" + bytes(4), "name that is not UTF-8"),
        (bytes([0x40, 0, 1]) + b"w" + bytes([LONG, 0, 1]) + b"w" + bytes(8), "tensor 'w' occurs twice"),
        (bytes([0x40, 0, 1]) + b"w", "ends too early"),
        (MASKED + bytes([4, 5]) + bytes(20), "tensor 'w' declares 5 kept of 4 elements"),
        (MASKED + bytes([4, 2, 0b10011]) + bytes(8), "a bitmap with bits beyond its 4 elements"),
        (MASKED + bytes([4, 2, 0b111]) + bytes(8), "declares 2 kept elements, its mask keeps 3"),
        (MASKED + bytes([4, 0, 0]), "of 5 bytes, its header declares 4"),
        (MASKED + bytes([4, 1]), "masks are missing"),
        (MASKED + bytes([4, 1, 5, 0]), "end in a zero byte"),
        (MASKED + bytes([4, 1]) + b"\1" * 5, "masks do not use up their bytes"),
        (MASKED + bytes([4, 1]) + as_bytes(slow_ans([([True, True, False, False], 1, 4)], bytes(4))),
         "tensor 'w' declares 1 kept elements, its mask keeps 2"),
        (MASKED + bytes([4, 1]) + as_bytes(slow_ans([([True] + [False] * 99, 1, 4)], bytes(4))),
         "masks do not use up their bytes"),
        (bytes([LONG | 1 << 3 | 6, 1, 1]) + b"w" + bytes([4, 1])
         + as_bytes(slow_ans([([True] + [False] * 3, 1, 4)], b"\1\1")), "masks do not use up their bytes"),
        (bytes([LONG | 7, 1, 1]) + b"w\x02\1\2", "a boolean that is neither 0 nor 1"),
    ],
)  # fmt: skip
def test_a_malformed_message_is_refused_with_its_reason_in_one_line(body, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        decode(message(body))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({}, r"has the arrays \[\], allowed: exactly 'fp1'"),
        ({"fp2": np.zeros(3, np.uint8)}, r"has the arrays \['fp2'\]"),
        ({codec.KEY: np.zeros(3, np.uint8), "x": np.zeros(3, np.uint8)}, "allowed: exactly"),
        ({codec.KEY: np.zeros(3, np.int8)}, "is int8 with 1 dimensions, allowed: uint8 with 1 dimension"),
        ({codec.KEY: np.zeros((3, 1), np.uint8)}, "is uint8 with 2 dimensions"),
        ({codec.KEY: np.zeros(3, object)}, "is object with 1 dimensions"),
        ({codec.KEY: b"abc"}, "is bytes, allowed"),
    ],
)
def test_other_arrays_than_one_of_bytes_are_refused(arrays, expected):
    with pytest.raises(ValueError, match=expected):
        decode(arrays)


def test_too_many_tensors_are_refused():
    body = b"".join(bytes([0x40, 0, 5]) + b"%05d" % i for i in range(codec.MAX_TENSORS + 1))
    with pytest.raises(ValueError, match="more than 16384 tensors"):
        decode(message(body))


def test_the_cap_counts_values_and_masks_of_all_tensors():
    mask = torch.arange(1000) < 3
    payload = Payload({"w": mask * 1.0, "b": torch.zeros(10)}, {"w": mask})
    arrays = encode(payload)
    assert_same_bits(decode(arrays, max_bytes=5040), payload)
    with pytest.raises(ValueError, match="more than the allowed 5039 bytes, at tensor 'b'"):
        decode(arrays, max_bytes=5039)


def test_a_message_that_is_part_of_a_larger_strided_array_is_read():
    payload = Payload({"w": torch.arange(5.0)})
    doubled = np.repeat(encode(payload)[codec.KEY], 2)
    assert_same_bits(decode({codec.KEY: doubled[::2]}), payload)


def read_or_refuse(body: bytes) -> None:
    """Refused in one line, or understood: then it is, byte for byte, what encode writes for its payload."""
    refusal = None
    try:
        payload = decode(message(body), max_bytes=1 << 20)
    except ValueError as error:
        refusal = error
    if refusal is None:
        assert body_of(encode(payload)) == body
    else:
        assert type(refusal) is ValueError
        assert len(str(refusal).splitlines()) == 1


@given(st.binary(max_size=80))
@settings(deadline=None, max_examples=examples(400))
def test_random_bytes_are_refused_or_understood(body):
    read_or_refuse(body)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    body = bytearray(body_of(encode(draw(payloads()))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        to = draw(st.integers(at, min(len(body), at + 20)))
        match draw(st.sampled_from(["flip", "cut", "truncate", "insert", "splice"])):
            case "flip" if at < len(body):
                body[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del body[at:to]
            case "truncate":
                del body[at:]
            case "insert":
                body[at:at] = draw(st.binary(max_size=9))
            case "splice":
                body[at:to] = body_of(encode(draw(payloads())))[at:to]
    return bytes(body)


@given(mutated())
@settings(deadline=None, max_examples=examples(500), suppress_health_check=[HealthCheck.too_slow])
def test_damaged_messages_are_refused_or_understood(body):
    read_or_refuse(body)


def test_every_single_bit_flip_of_a_coded_mask_is_refused_or_understood():
    rng = numpy_generator(4, "codec test")
    mask = exact_mask((300,), 20, rng)
    body = body_of(encode(Payload({"w": random_bits((300,), torch.float32, rng)}, {"w": mask})))
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        read_or_refuse(bytes(flipped))


def test_what_goes_to_disk_and_over_the_wire_is_encoded_once():
    payload = Payload.pruned({"w": torch.arange(100.0)}, {"w": torch.arange(100) % 3 == 0})
    first = codec.encode_once(payload)
    assert codec.encode(payload) is first
    same = Payload(dict(payload.tensors), dict(payload.masks))
    assert codec.encode(same) is not first
    assert codec.encode(same)[codec.KEY].tobytes() == first[codec.KEY].tobytes()
    known = len(codec._KNOWN)
    del payload
    gc.collect()
    assert len(codec._KNOWN) == known - 1
