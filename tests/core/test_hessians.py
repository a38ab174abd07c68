"""Hessians in fewer bits: what arrives is near what was sent, alike everywhere, and its sums are exact."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.core import hessians
from fedprune_app.core.gptq import gptq
from fedprune_app.core.grids import grid_of
from fedprune_app.core.scores import wanda_mask
from fedprune_app.core.sparsegpt import Hessian, InputNorms
from tests.core.one_matrix import sparsegpt
from tests.core.test_sparsegpt import hessian_of, problem

WHOLE = pytest.mark.parametrize("form", ["float32", "int8"])
FORMS = pytest.mark.parametrize("form", hessians.FORMS)


def sent(size: int = 96, tokens: int = 300, seed: int = 1):
    """A Hessian whose inputs differ a millionfold in size; one of them was never seen."""
    weight, inputs = problem(seed, rows=8, columns=size, tokens=tokens)
    inputs = inputs * torch.logspace(-3, 3, size)
    inputs[..., 5] = 0
    return weight, hessian_of(inputs)


@WHOLE
def test_what_arrives_has_the_diagonal_that_was_sent_and_correlations_of_as_many_digits_as_the_form(form):
    _, hessian = sent()
    tensors = hessians.encoded({"x": hessian}, form)
    like = hessians.like({"x": 96}, form)
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {n: (t.shape, t.dtype) for n, t in like.items()}
    arrived = hessians.unpacked(hessians.decoded("x", tensors, 96), 96)
    assert torch.equal(arrived.diagonal(), hessian.diagonal())
    sizes = hessian.diagonal().sqrt()
    scale = (sizes * sizes[:, None]).clamp(min=1e-30)
    largest = {"float32": 1e-6, "int8": 0.51 / 127}[form]
    assert float(((arrived - hessian) / scale).abs().max()) < largest
    assert not arrived[5].any()


def test_a_diagonal_alone_arrives_as_a_diagonal_matrix():
    _, hessian = sent()
    tensors = hessians.encoded({"x": hessian}, "diagonal")
    assert [tuple(tensor.shape) for tensor in hessians.like({"x": 96}, "diagonal").values()] == [(96,)]
    arrived = hessians.unpacked(hessians.decoded("x", tensors, 96), 96)
    assert torch.equal(arrived, torch.diag(hessian.diagonal()))


def test_masks_by_summed_diagonals_are_those_of_wanda_with_all_text_in_one_place():
    draw = torch.Generator().manual_seed(3)
    texts = torch.randn(4, 8, 16, 96, generator=draw) * torch.rand(96, generator=draw)
    total, one_place = hessians.HessianSum(96), InputNorms(96)
    for number, text in enumerate(texts):
        of_client = Hessian(96)
        of_client.add(text)
        total.add("x", hessians.encoded({"x": of_client.matrix}, "diagonal"), 8)
        one_place.add(texts[3 - number])
    weight = torch.randn(40, 96, generator=draw)
    for target in ({"density": 0.3}, {"n_of_m": (2, 4)}):
        found = wanda_mask(weight, total.matrix().diagonal().sqrt(), **target)
        assert torch.equal(found, wanda_mask(weight, one_place.input_norms(), **target))


def test_correlations_in_8_bits_take_a_quarter_of_the_bytes():
    sizes = {
        form: sum(t.numel() * t.element_size() for t in hessians.like({"x": 1536}, form).values())
        for form in hessians.FORMS
    }
    assert sizes["int8"] / sizes["float32"] < 0.26


@FORMS
def test_sums_of_what_arrives_have_the_same_bits_in_any_order_and_after_they_were_kept(form):
    messages = [hessians.encoded({"x": sent(seed=seed)[1]}, form) for seed in range(4)]
    sums = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        total = hessians.HessianSum(96)
        for client in order:
            total.add("x", messages[client], client + 1)
        sums.append(total)
    assert torch.equal(sums[0].matrix(), sums[1].matrix())
    kept = hessians.HessianSum.of("x", sums[0].tensors("x"), 96)
    assert (kept.weight, kept.num_added) == (10, 4)
    assert torch.equal(kept.matrix(), sums[0].matrix())


def test_8_bits_and_a_hundredth_less_correlation_prune_and_round_as_well_as_32_bits_do():
    weight, hessian = sent(tokens=120)  # few more tokens than inputs
    arrived = hessians.unpacked(hessians.decoded("x", hessians.encoded({"x": hessian}, "int8"), 96), 96)
    small = hessians.shrunk(arrived, 0.01)

    def error(other):
        change = (other - weight).double()
        return float(((change @ hessian.double()) * change).sum())

    plain, coarse = (error(sparsegpt(weight, each, 0.5)[0]) for each in (hessian, small))
    assert coarse < 1.1 * plain
    grid = grid_of(4, keeps_zeros=False)
    plain, coarse = (error(gptq([weight], each, grid)[0].weights()) for each in (hessian, small))
    assert coarse < 1.1 * plain


def test_shrinking_leaves_the_diagonal():
    matrix = torch.tensor([[4.0, 2.0], [2.0, 9.0]])
    assert hessians.shrunk(matrix, 0.25).tolist() == [[4.0, 1.5], [1.5, 9.0]]


def test_a_diagonal_below_0_in_8_bits_is_refused():
    tensors = hessians.encoded({"x": sent()[1]}, "int8")
    tensors[hessians.HESSIAN + "x"][3] = -1.0
    with pytest.raises(ValueError, match="no sum of products"):
        hessians.HessianSum(96).add("x", tensors, 1)
