from __future__ import annotations

import random

import pytest
import torch

from fedprune_app.core.payload import Payload


def example() -> Payload:
    return Payload.pruned(
        {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)},
        {"w": torch.tensor([[True, False, True], [False, False, True]])},
    )


def test_pruned_tensors_are_zero_off_their_mask_and_the_source_is_untouched():
    source = torch.ones(3)
    payload = Payload.pruned({"w": source}, {"w": torch.tensor([True, False, True])})
    assert payload.tensors["w"].tolist() == [1, 0, 1]
    assert source.tolist() == [1, 1, 1]


def test_density_counts_unpruned_tensors_as_kept():
    assert example().num_kept() == 5
    assert example().density() == 5 / 8
    assert Payload({}).density() == 1.0


def test_ndarrays_are_values_then_masks_and_come_back():
    payload = example()
    arrays = payload.to_ndarrays()
    assert [a.shape for a in arrays] == [(2, 3), (2,), (2, 3)]
    back = Payload.from_ndarrays(arrays, ["w", "b"], ["w"])
    assert back.digest() == payload.digest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_every_dtype_comes_back_bit_for_bit(dtype):
    payload = Payload({"w": (torch.arange(6).reshape(2, 3) / 7).to(dtype), "s": torch.tensor(3).to(dtype)})
    back = Payload.from_ndarrays(payload.to_ndarrays(), ["w", "s"])
    assert {t.dtype for t in back.tensors.values()} == {dtype}
    assert back.digest() == payload.digest()


def test_a_wrong_number_of_arrays_is_refused():
    with pytest.raises(ValueError, match="do not make"):
        Payload.from_ndarrays(example().to_ndarrays()[:2], ["w", "b"], ["w"])


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"x": torch.ones(2, dtype=torch.bool)}, "no tensor"),
        ({"b": torch.ones(2)}, "dtype"),
        ({"b": torch.ones(3, dtype=torch.bool)}, "shape"),
    ],
)
def test_a_mask_must_belong_to_a_tensor_of_its_shape(masks, message):
    with pytest.raises(ValueError, match=message):
        Payload({"b": torch.ones(2)}, masks)


@pytest.mark.parametrize(
    "other",
    [
        Payload({"a": torch.zeros(2, 2)}),
        Payload({"w": torch.zeros(4)}),
        Payload({"w": torch.zeros(2, 2, dtype=torch.float64)}),
        Payload({"w": torch.zeros(2, 2)}, {"w": torch.ones(2, 2, dtype=torch.bool)}),
        Payload({"w": torch.tensor([[0.0, 0.0], [0.0, -0.0]])}),
    ],
)
def test_the_digest_sees_names_shapes_dtypes_masks_and_every_bit(other):
    assert other.digest() != Payload({"w": torch.zeros(2, 2)}).digest()


@pytest.mark.parametrize("seed", range(20))
def test_the_digest_does_not_depend_on_the_order_of_the_names(seed):
    draw = random.Random(seed)
    names = [f"layer{i}.{part}" for i in range(draw.randint(1, 6)) for part in ("weight", "bias")]
    dtypes = (torch.float32, torch.float16, torch.int64, torch.bool)
    tensors = {name: torch.arange(draw.randint(0, 9)).to(draw.choice(dtypes)) for name in names}
    masks = {name: tensors[name] > 2 for name in draw.sample(names, draw.randint(0, len(names)))}
    digest = Payload(tensors, masks).digest()
    for _ in range(5):
        some = {name: tensors[name] for name in draw.sample(names, len(names))}
        others = {name: masks[name] for name in draw.sample(sorted(masks), len(masks))}
        assert Payload(some, others).digest() == digest


def test_the_digest_of_one_value_or_none_does_not_depend_on_its_stride():
    one, none = torch.arange(6.0)[::6], torch.empty(6)[::6][:0]
    assert Payload({"w": one}).digest() == Payload({"w": torch.zeros(1)}).digest()
    assert Payload({"w": none}).digest() == Payload({"w": torch.empty(0)}).digest()
    scalar = torch.tensor(2.0)
    assert Payload({"w": scalar}).digest() == Payload({"w": scalar.clone()}).digest()
