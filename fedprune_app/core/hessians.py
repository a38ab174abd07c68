"""Hessians of clients: their wire forms, exact sums in any order, clipping and removal of noise.

``H = 2/n Σ x xᵀ`` over a client's n sequences is all that SparseGPT needs of a text, and ``Σ_k n_k H_k / Σ_k n_k`` is
the Hessian of all clients' text together. This module is ours: FedSpaLLM's clients send weights.
"""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.core.named import TensorDict, Tensors

# The prefix of a Hessian's name in a payload, before the name of the first matrix with these inputs.
HESSIAN = "hessian/"
CORRELATIONS, SCALES = "correlations/", "scales/"  # likewise, where the Hessian is sent as its diagonal
_FRACTION = 2.0**40
Draw = Callable[[int, float], Tensor]
_LARGEST = 2.0**52  # float64 holds an integer of this size with its last bit


def packed_upper(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a matrix (n, n), row by row (n (n + 1) / 2,), on the CPU."""
    return matrix.cpu()[_upper_mask(len(matrix))]


def unpacked(upper: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix (size, size) of a :func:`packed_upper` triangle."""
    matrix = upper.new_zeros(size, size).masked_scatter_(_upper_mask(size), upper)
    return matrix + matrix.triu(1).T


def _upper_mask(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu()


FORMS = ("float32", "int8", "diagonal")  # in which a Hessian is sent
_BLOCK, _LEVELS = 64, 127  # of correlations in 8 bits: numbers that share a scale, and the largest level


def encoded(matrices: Tensors, form: str = "float32") -> TensorDict:
    """Return the tensors in which Hessians (n, n) are sent, in one of :data:`FORMS`.

    "float32" sends the upper triangle, the other forms the diagonal, both in float32. "int8" adds the correlations, row
    by row with 0 on the diagonal, in 8 bits; 64 of them share a float16 scale. "diagonal" adds nothing. A noised matrix
    has no correlations, since its diagonal may be below 0.
    """
    tensors: TensorDict = {}
    for name, matrix in matrices.items():
        upper = packed_upper(matrix.float())
        if form == "float32":
            tensors[HESSIAN + name] = upper
            continue
        tensors[HESSIAN + name] = upper[_diagonal(len(matrix))]
        if form == "diagonal":
            continue
        sizes = _products_of_sizes(tensors[HESSIAN + name])
        correlations = torch.where(sizes > 0, upper / sizes, 0)
        correlations[_diagonal(len(matrix))] = 0
        blocks = F.pad(correlations, (0, -len(correlations) % _BLOCK)).view(-1, _BLOCK)
        scales = (blocks.abs().amax(dim=1) / _LEVELS).half()
        inverse = torch.where(scales > 0, 1 / scales.float(), 0)
        levels = (blocks * inverse[:, None]).round().clamp(-_LEVELS, _LEVELS)
        tensors[CORRELATIONS + name] = (levels + _LEVELS).to(torch.uint8).flatten()[: len(correlations)]
        tensors[SCALES + name] = scales
    return tensors


def like(sizes: Mapping[str, int], form: str = "float32") -> TensorDict:
    """Return tensors without values, in the names, shapes and dtypes of :func:`encoded` for ``sizes`` inputs."""
    tensors: dict[str, Tensor] = {}
    for name, size in sizes.items():
        count = size * (size + 1) // 2
        tensors[HESSIAN + name] = torch.empty(count if form == "float32" else size, device="meta")
        if form == "int8":
            tensors[CORRELATIONS + name] = torch.empty(count, dtype=torch.uint8, device="meta")
            tensors[SCALES + name] = torch.empty(-(-count // _BLOCK), dtype=torch.float16, device="meta")
    return tensors


def decoded(name: str, tensors: Mapping[str, Tensor], size: int) -> Tensor:
    """Return the upper triangle, float32, of a matrix (size, size) that :func:`encoded` encoded.

    Each number is computed from two others by single roundings of float32, so every machine has the same bits.
    """
    sent = tensors[HESSIAN + name]
    if len(sent) > size:
        return sent
    upper = sent.new_zeros(size * (size + 1) // 2)
    if CORRELATIONS + name in tensors:
        levels = tensors[CORRELATIONS + name].float() - _LEVELS
        correlations = levels * tensors[SCALES + name].float().repeat_interleave(_BLOCK)[: len(levels)]
        upper = correlations * _products_of_sizes(sent)
    upper[_diagonal(size)] = sent
    return upper


def _products_of_sizes(diagonal: Tensor) -> Tensor:
    """Return ``√d_i √d_j`` for each entry of the upper triangle, row by row."""
    roots = diagonal.clamp(min=0).sqrt()
    return packed_upper(roots[:, None] * roots)


def shrunk(hessian: Tensor, share: float) -> Tensor:
    """Return a Hessian with its correlations reduced by ``share``: from few tokens, or in few bits, they are too large.

    Source: Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", 2004, with the
    diagonal as target.
    """
    result = hessian * (1 - share)
    result.diagonal().copy_(hessian.diagonal())
    return result


class ClippedMoments:
    """The sum of sequences' second moments, each clipped to a norm of ``clip_norm``.

    A sequence with T tokens adds ``1/T Σ_t x_t x_tᵀ / ‖x_t‖²``, scaled down where its Frobenius norm is above
    ``clip_norm``. Every token has equal weight, so the same norm suits every layer: no sequence's is above 1. A
    sequence with a number that is not finite adds nothing. The rule is ours; SparseGPT has no such normalisation. With
    ``by_diagonal`` the norm is that of the diagonal, for clients that release nothing else.
    """

    def __init__(
        self,
        num_inputs: int,
        device: torch.device | str = "cpu",
        clip_norm: float = 1.0,
        by_diagonal: bool = False,
    ) -> None:
        self.clip_norm, self.by_diagonal = clip_norm, by_diagonal
        self.matrix = torch.zeros(num_inputs, num_inputs, device=device)  # the sum (in, in)

    def add(self, inputs: Tensor) -> None:
        """Add the inputs (sequences, ..., in) of some sequences."""
        rows = self._rows(inputs).flatten(0, 1)
        self.matrix.addmm_(rows.T, rows)

    def _rows(self, inputs: Tensor) -> Tensor:
        """Return tokens (sequences, T, in), scaled so that a sequence's sum of ``x xᵀ`` is what it adds."""
        tokens = inputs.detach().flatten(1, -2).float()
        norms = tokens.norm(dim=2, keepdim=True)
        is_finite = norms.isfinite().all(dim=1, keepdim=True)
        tokens = torch.where(is_finite & (norms > 0), tokens / norms, 0) / math.sqrt(tokens.shape[1])
        # ‖XᵀX‖ = ‖XXᵀ‖: compute the smaller of the two, a few sequences at a time
        factors = tokens if tokens.shape[1] <= tokens.shape[2] else tokens.mT
        chunk_size = max(1, _PRODUCTS // factors.shape[1] ** 2)
        sizes = torch.cat([(chunk @ chunk.mT).flatten(1).norm(dim=1) for chunk in torch.split(factors, chunk_size)])
        if self.by_diagonal:
            sizes = tokens.square().sum(dim=1).norm(dim=1)
        # A sequence that adds nothing has the norm 0.
        shares = (self.clip_norm / sizes.clamp(min=self.clip_norm)).sqrt()
        return tokens * shares[:, None, None]


class IntegerMoments(ClippedMoments):
    """The same sum as integers in units of 2⁻⁴⁰, in the upper triangle (in, in), where clients share the noise.

    Each sequence is rounded by itself, and its part divided by ``group_size``, the number of sequences of its document.
    The norm of what a document adds is at most ``clip_norm``, with all roundings.
    """

    def __init__(self, num_inputs: int, device: torch.device | str, clip_norm: float, group_size: int) -> None:
        super().__init__(num_inputs, device, clip_norm)
        self.matrix = self.matrix.long()
        self.group_size = group_size

    def add(self, inputs: Tensor) -> None:
        rounding = self.group_size * len(self.matrix) / 2 / _FRACTION  # the norm of half a unit in each entry
        limit = self.clip_norm * (1 - 2**-30) - rounding  # float64 computes a norm far closer than to 2⁻³⁰
        for rows in self._rows(inputs):
            upper = (rows.T @ rows).double().triu()
            norm = float((2 * upper.square().sum() - upper.diagonal().square().sum()).sqrt())
            share = min(1.0, limit / norm) if norm else 0.0
            self.matrix += (upper * (share / self.group_size * _FRACTION)).round_().long()


def noised_integers(name: str, total: Tensor, std: float, draw: Draw, weight: int) -> TensorDict:
    """Return :class:`IntegerMoments` (n, n) of ``weight`` sequences with noise, as tensors of :class:`HessianSum`.

    ``draw(size, variance)`` draws the noise, integers with the standard deviation ``std`` on the diagonal and
    ``std / √2`` off it. All is in the fraction: a whole part beside it would tell more than the sum. Sums of 2²²
    sequences fit.
    """
    variance = (std * _FRACTION) ** 2
    upper = packed_upper(total)
    noise = draw(len(upper), variance / 2)
    noise[_diagonal(len(total))] = draw(len(total), variance)
    counts = torch.tensor([weight, 1])
    return {f"whole/{name}": torch.zeros_like(upper), f"fraction/{name}": upper + noise, f"counts/{name}": counts}


_PRODUCTS = 2**24  # numbers in the products whose norms are computed at a time


def isometric(matrix: Tensor) -> Tensor:
    """Return the upper triangle (n (n + 1) / 2,) of a symmetric matrix, scaled to the matrix' Frobenius norm.

    Entries off the diagonal occur twice in the matrix, so they are scaled by √2.
    """
    scaled = matrix * math.sqrt(2)
    scaled.diagonal().copy_(matrix.diagonal())
    return packed_upper(scaled)


def from_isometric(vector: Tensor, size: int) -> Tensor:
    """Return the upper triangle of the matrix (size, size) with this :func:`isometric` vector."""
    upper = vector / math.sqrt(2)
    diagonal = _diagonal(size)
    upper[diagonal] = vector[diagonal]
    return upper


def denoised(matrix: Tensor, std: float) -> Tensor:
    """Return a positive definite estimate, float32, of a matrix (n, n) with noise in its :func:`isometric` vector.

    The eigenvectors are kept. Each eigenvalue ``λ`` becomes ``λ - 2τ² h(λ)``, with ``h(λ) = 1/n Σ_j 1/(λ - λ_j)`` over
    the other eigenvalues and ``τ = std √(n/2)``: noise with the standard deviation ``std`` has eigenvalues between
    ``-2τ`` and ``2τ``, and pushes those of the matrix apart (Bun, Allez, Bouchaud and Potters, "Rotational Invariant
    Estimator for General Noisy Matrices", 2016, on additive noise). The sum is smoothed over a width of ``2τ/√n``, the
    order of the eigenvalues is kept, and none is left below a twentieth of their mean: SparseGPT relies on directions
    that it assumes to be empty. This is post-processing: it costs no privacy.
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    if std:
        size = len(values)
        tau = std * math.sqrt(size / 2)
        gaps = values[:, None] - values
        inverse_gaps = gaps / (gaps.square() + 4 * tau**2 / size)
        minimum = _LEAST * values.mean().clamp(min=tau / size)  # the mean has about as much noise
        values = (values - 2 * tau**2 * inverse_gaps.mean(dim=1)).cummax(dim=0).values.clamp(min=minimum)
    estimate: Tensor = (vectors * values) @ vectors.mT
    return estimate.float()


_LEAST = 0.05  # of the mean eigenvalue; 0.02 and 0.1 gave worse models at an ε of 2


class HessianSum:
    """The exact sum of clients' Hessians of one input, by integer additions: the order of arrival changes no bit.

    A number is added as a whole part and as a fraction in units of 2⁻⁴⁰, so that inputs of very different size keep
    their digits. With ``is_noised``, clients add noise, so a matrix need not be a sum of products.
    """

    terms: ClassVar[Mapping[str, int]] = {}  # its integers depend on nothing else

    def __init__(self, size: int, is_noised: bool = False) -> None:
        self.size = size
        self.is_noised = is_noised
        self.weight = 0
        self.num_added = 0
        self._whole = torch.zeros(size * (size + 1) // 2, dtype=torch.int64)
        self._fraction = torch.zeros_like(self._whole)

    def add(self, name: str, tensors: Tensors, weight: int) -> None:
        """Add tensors of :func:`encoded` with ``weight``, their number of sequences.

        What :meth:`tensors` made, of ``weight`` sequences in all, is added as it is. An error leaves the sum unchanged.
        """
        upper = self.check(name, tensors, weight)
        if f"counts/{name}" in tensors:
            self._whole += tensors[f"whole/{name}"]
            self._fraction += tensors[f"fraction/{name}"]
            self.weight += weight
            self.num_added += int(tensors[f"counts/{name}"][1])
            return
        integers = upper.round()
        self._whole += integers.long()
        self._fraction += ((upper - integers) * _FRACTION).round().long()
        self.weight += weight
        self.num_added += 1

    def check(self, name: str, tensors: Tensors, weight: int) -> Tensor:
        """Return the upper triangle, float64, that :meth:`add` would add, and add nothing.

        Raises ``ValueError`` for a diagonal below 0, and for numbers that are too large for an exact sum.
        """
        if f"counts/{name}" in tensors:
            if (said := int(tensors[f"counts/{name}"][0])) != weight:
                raise ValueError(f"the sum for '{HESSIAN}{name}' is of {said} sequences, allowed: {weight}")
            upper = tensors[f"whole/{name}"].double() + tensors[f"fraction/{name}"].double() / _FRACTION
        else:
            upper = decoded(name, tensors, self.size).double() * weight
        largest = float(upper.abs().max())
        if not self.is_noised:
            diagonal = upper[_diagonal(self.size)]
            if float(diagonal.min()) < 0 or largest > float(diagonal.max()) * (1 + 1e-3):
                raise ValueError(f"tensor '{HESSIAN}{name}' is no sum of products: an entry is beyond its diagonal")
            largest = float(diagonal.max())
        if largest * (self.weight + weight) > _LARGEST:
            raise ValueError(f"tensor '{HESSIAN}{name}' has magnitude {largest:g}, allowed: at most {_LARGEST:g}")
        return upper

    def include(self, other: Self, sign: int = 1) -> None:
        """Add another sum or, with a ``sign`` of -1, take it away again: to the last bit what would never have had it.

        Raises ``ValueError`` for a sum that would be too large to be exact.
        """
        self._whole += sign * other._whole
        self._fraction += sign * other._fraction
        self.weight += sign * other.weight
        self.num_added += sign * other.num_added
        if int(self._whole.abs().max()) > _LARGEST:
            raise ValueError(f"a sum of Hessians is above {_LARGEST:g}, allowed: at most that")

    @staticmethod
    def integer_shapes(shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Return the names and shapes of :func:`integers` of tensors with these names and shapes."""
        found: dict[str, torch.Size] = {}
        for full_name, shape in shapes.items():
            name = full_name.removeprefix(HESSIAN)
            found |= {f"whole/{name}": shape, f"fraction/{name}": shape, f"counts/{name}": torch.Size([2])}
        return found

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the sum as tensors for a checkpoint, which :meth:`of` reads."""
        counts = torch.tensor([self.weight, self.num_added])
        return {f"whole/{name}": self._whole, f"fraction/{name}": self._fraction, f"counts/{name}": counts}

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, Tensor], size: int, is_noised: bool = False) -> Self:
        total = cls(size, is_noised)
        total._whole, total._fraction = tensors[f"whole/{name}"], tensors[f"fraction/{name}"]
        total.weight, total.num_added = tensors[f"counts/{name}"].tolist()
        return total

    def matrix(self) -> Tensor:
        """Return the mean (size, size), float32, over all sequences added."""
        total = self._whole.double() + self._fraction.double() / _FRACTION
        return unpacked((total / max(1, self.weight)).float(), self.size)


def integers(tensors: Tensors, weight: int) -> TensorDict:
    """Return what :func:`encoded` made, in float32, as the integers that :class:`HessianSum` adds up."""
    found: TensorDict = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(HESSIAN)
        total = HessianSum((math.isqrt(8 * len(tensor) + 1) - 1) // 2, is_noised=True)
        total.add(name, tensors, weight)
        found |= total.tensors(name)
    return found


def _diagonal(size: int) -> Tensor:
    """Return the places of the diagonal in a matrix' upper triangle, row by row."""
    numbers = torch.arange(size)
    return numbers * size - numbers * (numbers - 1) // 2
