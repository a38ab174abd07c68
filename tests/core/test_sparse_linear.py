"""A packed matrix is the matrix, and multiplies like the matrix, with any instructions and any number of threads."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedprune_app.core import compiled as compiled_library
from fedprune_app.core import sparse_linear
from fedprune_app.core.sparse_linear import DTYPES, LEVELS, instructions, linear, pack

LEVEL = LEVELS.index(instructions()) if instructions() else -1
compiled = pytest.mark.skipif(LEVEL < 0, reason="needs the library in C")


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sparse_matrix(seed, rows, columns, density, dtype=torch.float32):
    kept = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed + 1)) < density
    return (drawn(seed, rows, columns) * kept).to(dtype)


def test_the_library_is_there_where_a_compiler_is():
    assert instructions() in LEVELS or not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"))


matrices = st.builds(
    sparse_matrix,
    st.integers(0, 1000),
    st.integers(1, 40),
    st.integers(1, 200),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from(DTYPES),
)


def dense(packed):
    bits = np.unpackbits(packed.words.numpy().view(np.uint8), axis=1, count=packed.columns, bitorder="little")
    matrix = torch.zeros(packed.rows, packed.columns, dtype=packed.values.dtype)
    matrix[torch.from_numpy(bits).bool()] = packed.values[: int(packed.starts[-1])]
    return matrix


@given(matrices)
def test_a_packed_matrix_is_the_matrix(matrix):
    packed = pack(matrix)
    assert torch.equal(dense(packed), matrix)
    assert packed.density == pytest.approx(float((matrix != 0).float().mean()))


@compiled
@given(matrices, st.integers(1, 40), st.booleans(), st.integers(0, 100))
def test_the_product_is_torchs_with_any_instructions(matrix, inputs, has_bias, seed):
    x, bias = drawn(seed, inputs, matrix.shape[1]), drawn(seed + 1, len(matrix)) if has_bias else None
    expected = F.linear(x.double(), matrix.double(), None if bias is None else bias.double())
    scale = F.linear(x.abs().double(), matrix.abs().double()).clamp(min=1)
    # many inputs are multiplied by torch, in the dtype of the weights
    error = 1e-6 if matrix.dtype == torch.float32 or inputs <= sparse_linear._FEW else 2e-2
    for level in range(LEVEL + 1):
        found = linear(x, pack(matrix), bias, level=level)
        assert found.dtype == torch.float32
        assert float(((found - expected).abs() / scale).max()) <= error


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_have_any_dimensions_and_keep_their_dtype(dtype):
    matrix = sparse_matrix(0, 5, 70, 0.3, dtype)
    x = drawn(1, 2, 3, 70).to(dtype)
    found = linear(x, pack(matrix))
    assert (found.shape, found.dtype) == ((2, 3, 5), dtype)
    torch.testing.assert_close(found.float(), F.linear(x.float(), matrix.float()), atol=0.05, rtol=0.05)
    assert linear(x[:0], pack(matrix)).shape == (0, 3, 5)


@compiled
def test_special_values_are_multiplied_as_they_are():
    special = [torch.inf, -torch.inf, torch.nan, 6e-8, -3e-6, 65504.0, 1.0, -2.5]
    for dtype in DTYPES:
        values = torch.tensor(special, dtype=dtype)
        matrix = torch.zeros(len(special), 64, dtype=dtype)
        matrix[:, 3] = values
        x = torch.zeros(1, 64)
        x[0, 3] = 1.0
        for level in range(LEVEL + 1):
            found = linear(x, pack(matrix), level=level)[0]
            assert torch.equal(found.nan_to_num(1.5), values.float().nan_to_num(1.5)), (dtype, LEVELS[level])


@compiled
def test_the_result_does_not_depend_on_the_number_of_threads():
    packed, before = pack(sparse_matrix(0, 301, 500, 0.4)), torch.get_num_threads()
    try:
        for inputs in (1, 2, 7, 13):
            x, found = drawn(2, inputs, 500), set()
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.add(linear(x, packed).numpy().tobytes())
            assert len(found) == 1
    finally:
        torch.set_num_threads(before)


@compiled
def test_inputs_that_need_gradients_are_refused():
    x = torch.zeros(1, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="need no gradients"):
        linear(x, pack(torch.eye(3)))
    with torch.no_grad():
        linear(x, pack(torch.eye(3)))


def test_without_the_library_products_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(compiled_library, "library", lambda name: None)
    sparse_linear._library.cache_clear()
    try:
        assert instructions() == ""
        with pytest.raises(RuntimeError, match="install a C compiler"):
            linear(torch.zeros(1, 3), pack(torch.eye(3)))
    finally:
        sparse_linear._library.cache_clear()
