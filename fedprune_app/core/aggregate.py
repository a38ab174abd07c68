"""Sums and means of payloads, added one at a time; the bits do not depend on the order of arrival.

An accumulator takes O(model) memory. Float sums depend on their order, in float64 too: a few of millions of coordinates
flip per round. Replies arrive in any order. So each addend is rounded once to a grid of 2^-40 and then added as an
integer. Integer addition is exact, and therefore commutative and associative.
"""

from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedprune_app.core import masked_tensors
from fedprune_app.core.masks import Masks, keep_count, unpacked
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.core.scores import NOfM, n_of_m_mask, smallest

_GRID = 2.0**40
_HEADROOM = 2.0 ** (63 - 40)
_LARGEST_IN_C = 2.0 ** (51 - 40)  # a product with 2^40 has to fit into the digits of a float64
_HALVES = (torch.float16, torch.bfloat16)
_WEIGHT = "sum/weight"  # beside the tensors of a sum, that of all its addends
_BLOCK = 2**16  # coordinates at a time and thread, so that their float64 and int64 temporaries stay in a core's cache


class MaskedMean:
    """Average each coordinate over the clients that kept it.

    ``mean[i] = Σ_k a_k m_k[i] w_k[i] / Σ_k a_k m_k[i]`` over the payloads added, with integer weights ``a_k`` (1, or
    sample counts). A payload without a name has no part in that tensor. A tensor without mask counts everywhere. With
    full masks the masked mean is FedAvg. Source: Sub-FedAvg, Algorithm 1 line 9.

    ``max_addends`` bounds the number of payloads and ``max_weight`` the weight of each payload. A value that is too
    large for an exact sum within these bounds (``|w| > 2^23 / max_addends``) raises ``ValueError``, so no sum can wrap
    around.

    >>> mean = MaskedMean(max_addends=2)
    >>> mean.add(Payload({"w": torch.tensor([1.0, 0.0, 0.0])}, {"w": torch.tensor([True, False, False])}))
    >>> mean.add(Payload({"w": torch.tensor([3.0, 5.0, 0.0])}, {"w": torch.tensor([True, True, False])}))
    >>> mean.mean(fallback={"w": torch.tensor([7.0, 8.0, 9.0])})["w"].tolist()
    [2.0, 5.0, 9.0]
    """

    def __init__(self, max_addends: int, max_weight: int = 1) -> None:
        self.max_addends = max_addends
        self.max_weight = max_weight
        self.max_magnitude = _HEADROOM / (max_addends + 1)
        self.num_added = 0
        self._sums: TensorDict = {}  # int64, in units of 2^-40 / max_weight
        self._dtypes: dict[str, torch.dtype] = {}  # the dtype of the first addend
        self._weights: TensorDict = {}  # Σ a_k m_k; 0-dim while every addend was dense
        self._weight_dtype = torch.int32 if max_addends * max_weight < 2**31 else torch.int64

    def add(self, payload: Payload, weight: int = 1) -> None:
        """Add one client's payload, or a sum of several as :meth:`integers`; an error leaves the mean unchanged."""
        if _WEIGHT in payload.tensors:
            self._add_sum(payload, weight)
            return
        if not 1 <= weight <= self.max_weight:
            raise ValueError(f"weight is {weight}, allowed: 1 to {self.max_weight}")
        self._add([payload], weight, self.check(payload))

    def add_all(self, payloads: Sequence[Payload]) -> None:
        """Add each payload with weight 1, to the same bits as :meth:`add` and in fewer passes over the sums.

        An error leaves the mean unchanged. :meth:`check` finds the payload at fault.
        """
        largest = max((self.check(payload, beside=len(payloads) - 1) for payload in payloads), default=0.0)
        shapes: dict[str, torch.Size] = {}
        for name, tensor in (item for payload in payloads for item in payload.tensors.items()):
            if shapes.setdefault(name, tensor.shape) != tensor.shape:
                raise ValueError(f"tensor '{name}' has shape {tuple(tensor.shape)}, allowed: {tuple(shapes[name])}")
        self._add(payloads, 1, largest)

    @property
    def terms(self) -> dict[str, int]:
        """By what :meth:`integers` of another mean are the same."""
        return {"max-addends": self.max_addends, "max-weight": self.max_weight}

    def integers(self, payload: Payload, weight: int) -> TensorDict:
        """Add the first payload, and return what it adds: int64 whose sums :meth:`add` takes if it is dense."""
        self.add(payload, weight)
        return {**self._sums, _WEIGHT: torch.tensor(weight)}

    @staticmethod
    def integer_shapes(shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Return the names and shapes of :meth:`integers` of tensors with these names and shapes."""
        return {**shapes, _WEIGHT: torch.Size([])}

    def add_held(self, payload: Payload, members: int, holders: Tensors, chosen: Masks) -> None:
        """Add this many members' sum of values at the ``chosen`` coordinates, which ``holders`` of them kept."""
        self._add_sum(payload, members)
        zeros = {name: torch.zeros_like(counts, dtype=torch.int64) for name, counts in holders.items()}
        self._sums = unpacked(self._sums, chosen, zeros)
        self._weights = {name: counts.to(self._weight_dtype) for name, counts in holders.items()}

    def leave_out(self, least: int) -> int:
        """Take coordinates that fewer than ``least`` clients kept for kept by none; return how many these are."""
        few = 0
        for name, weights in self._weights.items():
            are_few = (weights > 0) & (weights < least)
            few += int(are_few.expand(self._sums[name].shape).sum())
            weights.masked_fill_(are_few, 0)
        return few

    def _scale(self, weight: int) -> float:
        return weight / self.max_weight * _GRID

    def _add_sum(self, payload: Payload, weight: int) -> None:
        tensors = dict(payload.tensors)
        if (said := int(tensors.pop(_WEIGHT))) != weight:
            raise ValueError(f"the sum has weight {said}, allowed: {weight}")
        self.check(Payload(tensors), unit=self._scale(weight))
        for name, tensor in tensors.items():
            self._make_room(name, tensor, has_mask=False)
            self._sums[name] += tensor
            self._weights[name] += weight
        self.num_added += 1

    def _add(self, payloads: Sequence[Payload], weight: int, largest: float) -> None:
        scale = self._scale(weight)
        for name in dict.fromkeys(name for payload in payloads for name in payload.tensors):
            senders = [payload for payload in payloads if name in payload.tensors]
            tensors, masks = [p.tensors[name] for p in senders], [p.masks.get(name) for p in senders]
            for tensor, mask in zip(tensors, masks, strict=True):
                self._make_room(name, tensor, has_mask=mask is not None)
            sums, weights = self._sums[name], self._weights[name]
            if num_dense := sum(mask is None for mask in masks):
                weights.add_(weight * num_dense)
            fits = largest <= _LARGEST_IN_C
            if fits and masked_tensors.add(sums, weights, tensors, masks, scale=scale, weight=weight):
                continue
            for tensor, mask in zip(tensors, masks, strict=True):
                mask_blocks, counts = (None, ()) if mask is None else (_blocks(mask), _blocks(weights))
                for i, (values, totals) in enumerate(zip(_blocks(tensor), _blocks(sums), strict=True)):
                    addend = values.double().mul(scale).round_().long()  # not mul_: double() may be no copy
                    if mask_blocks is not None:
                        addend.mul_(mask_blocks[i])
                        counts[i].add_(mask_blocks[i], alpha=weight)
                    totals.add_(addend)
        self.num_added += len(payloads)

    def check(self, payload: Payload, beside: int = 0, unit: float = 1.0) -> float:
        """Return the payload's largest magnitude; ``ValueError`` if it cannot be added with ``beside`` others.

        Magnitudes are multiples of ``unit``.
        """
        if self.num_added + beside >= self.max_addends:
            raise ValueError(f"more than {self.max_addends} payloads added")
        magnitudes = {name: magnitude / unit for name, magnitude in _magnitudes(payload).items()}
        for name, tensor in payload.tensors.items():
            if name in self._sums and self._sums[name].shape != tensor.shape:
                shape = tuple(self._sums[name].shape)
                raise ValueError(f"tensor '{name}' has shape {tuple(tensor.shape)}, allowed: {shape} as before")
            if not magnitudes[name] <= self.max_magnitude:  # also rejects NaN
                limit = f"finite and at most {self.max_magnitude:g} for {self.max_addends} payloads"
                raise ValueError(f"tensor '{name}' has magnitude {magnitudes[name]:g}, allowed: {limit}")
        return max(magnitudes.values(), default=0.0)

    def _make_room(self, name: str, tensor: Tensor, has_mask: bool) -> None:
        """Allocate sums at a name's first tensor, and a weight per coordinate at its first mask."""
        if name not in self._sums:
            self._sums[name] = masked_tensors.zeros(tensor.shape, torch.int64, tensor.device)
            self._dtypes[name] = tensor.dtype
            self._weights[name] = torch.zeros((), dtype=self._weight_dtype, device=tensor.device)
        if has_mask and self._weights[name].shape != tensor.shape:
            count = int(self._weights[name])
            weights = masked_tensors.zeros(tensor.shape, self._weight_dtype, tensor.device)
            self._weights[name] = weights.add_(count) if count else weights

    def mean(self, fallback: Tensors) -> TensorDict:
        """Return the mean in the names, order and dtypes of ``fallback``.

        A coordinate that no client kept takes its value from ``fallback``.
        """
        return {
            name: self._mean(name, default.dtype, default) if name in self._sums else default.clone()
            for name, default in fallback.items()
        }

    def mixed(self) -> TensorDict:
        """Return the gossip average ``Σ_j w_j / Σ_j m_j`` of all tensors added: :meth:`mean`, with 0 as fallback.

        Each mask must be the one with which the weights were trained, not the one that the search finds afterwards.
        Algorithm 1 line 7, read literally, divides by masks that do not match the weights. The released code divides as
        this method does. The average is unweighted. Source: Dis-PFL, Algorithm 1 line 7, before its multiplication with
        the local mask.
        """
        return {name: self._mean(name, dtype) for name, dtype in self._dtypes.items()}

    def _mean(self, name: str, dtype: torch.dtype, default: Tensor | None = None) -> Tensor:
        """Return one tensor's mean, with ``default`` or 0 where no client kept a coordinate."""
        sums, weights, factor = self._sums[name], self._weights[name], self.max_weight / _GRID
        # C writes float32; PyTorch also rounds float64 to 16 bits by way of float32
        result = masked_tensors.empty(sums.shape, torch.float32 if dtype in _HALVES else dtype, sums.device)
        if masked_tensors.mean(result, sums, weights, factor, default=default):
            return result.to(dtype)
        parts = map(_blocks, (result, sums, weights.expand(sums.shape), result if default is None else default))
        for output, totals, counts, defaults in zip(*parts, strict=True):
            means = totals.double().div_(counts.clamp(min=1)).mul_(factor)
            output.copy_(means if default is None else torch.where(counts > 0, means, defaults.double()))
        return result.to(dtype)

    def held(self, names: Iterable[str] | None = None) -> TensorDict:
        """Return for each tensor added, or each of ``names``, a bool tensor: True where at least one addend kept."""
        names = self._sums if names is None else names
        return {name: (self._weights[name] > 0).expand(self._sums[name].shape).contiguous() for name in names}

    def held_weight(self, name: str) -> Tensor:
        """Return ``Σ_k a_k m_k`` of a masked tensor, in its shape; read-only."""
        return self._weights[name]


_KNOWN: WeakKeyDictionary[Payload, tuple[list[int], dict[str, float]]] = WeakKeyDictionary()


def _magnitudes(payload: Payload) -> dict[str, float]:
    """Return the largest magnitude of each tensor; a gossip server asks anew for each average with a payload."""
    # PyTorch counts the changes of a tensor's values, but for tensors of torch.inference_mode
    versions = [0 if tensor.is_inference() else tensor._version for tensor in payload.tensors.values()]
    if payload not in _KNOWN or _KNOWN[payload][0] != versions:
        magnitudes = {}
        for name, tensor in payload.tensors.items():
            low, high = map(float, tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
            magnitudes[name] = max(-low, high)
        _KNOWN[payload] = versions, magnitudes
    return _KNOWN[payload][1]


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor's coordinates as flat pieces (views if contiguous); undivided off the CPU."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= _BLOCK or flat.device.type != "cpu":
        return (flat,)
    return torch.split(flat, _BLOCK * torch.get_num_threads())


class L0Mean:
    """FedSpaLLM's server: each entry's mean over the clients that kept it, and how many pruned it.

    It does not store the payloads. Equation (5) divides by ``‖Σ M‖_0``, literally one scalar; it means each entry's own
    count, as computed here. With layer sampling only the payloads that contain a matrix count for it. Equation (9)
    would add dense copies for clients that did not prune the matrix; such copies would dilute the mean and the counts.
    The bits do not depend on the order of arrival.
    """

    def __init__(self, max_addends: int) -> None:
        self._mean = MaskedMean(max_addends)
        self._masked: dict[str, None] = {}  # the names of masked tensors, in order

    def add(self, payload: Payload) -> None:
        """Add one client's payload; all clients count alike (the paper's α is 1)."""
        self._mean.add(payload)
        self._masked |= dict.fromkeys(payload.masks)

    def mean(self) -> Payload:
        """Return equation (5): each entry's mean over the clients that kept it.

        An entry that no client kept is 0, and False in the mask.
        """
        return Payload(self._mean.mixed(), self._mean.held(self._masked))

    def expanded(self, density: float, *, n_of_m: NOfM | None = None, mean: Payload | None = None) -> Payload:
        """Return equations (6) and (7): :meth:`mean`, each matrix pruned further to ``keep_count(d, density)`` entries.

        Entries that most clients pruned (largest ``C``) are pruned first; of equal ``C`` those of smallest mean
        magnitude, then those at the lowest flat index.

        If all clients pruned more entries than the density requires, none is restored (``k`` would be negative). With
        ``n_of_m`` every m neighbours of a row keep at most n entries, and ``density`` is ignored. The other entries are
        not updated for those pruned here. Pass ``mean`` if :meth:`mean` was already computed.
        """
        mean = self.mean() if mean is None else mean
        masks: TensorDict = {}
        for name in self._masked:
            holders, values = self._mean.held_weight(name), mean.tensors[name]
            target = holders.numel() - keep_count(holders.numel(), density)
            kept = None if n_of_m else masked_tensors.most_held(holders, values, target)
            if kept is None:
                # The bits of non-negative floats have the floats' order, so one integer ranks by holders, then
                # magnitude.
                ranks = holders.long() << 32 | values.float().abs().view(torch.int32)
                kept = (n_of_m_mask(ranks, n_of_m) if n_of_m else ~smallest(ranks, target)) & (holders > 0)
            masks[name] = kept
        return Payload.pruned(mean.tensors, masks)
