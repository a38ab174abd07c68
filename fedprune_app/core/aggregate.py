"""An accumulator adds payloads one at a time, in any order, and ends with the same bits for every order.

An accumulator takes O(model) memory. Float sums depend on their order, in float64 too: a few of millions of
coordinates flip per round. Replies arrive in any order. So each addend is rounded once to a grid of 2^-40 and then
added as an integer. Integer addition is exact, and therefore commutative and associative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedprune_app.core.expansion import Votes, tie_break
from fedprune_app.core.masks import keep_count
from fedprune_app.core.payload import Payload
from fedprune_app.core.scores import NOfM, check_n_of_m, smallest

FRACTION_BITS = 40
_GRID = 2.0**FRACTION_BITS
_HEADROOM = 2.0 ** (63 - FRACTION_BITS)
_BLOCK = 2**16  # coordinates at a time, so that a block's float64 and int64 temporaries stay in the processor's cache


class MaskedMean:
    """A masked mean averages each coordinate over the clients that kept this coordinate.

    ``mean[i] = Σ_k a_k m_k[i] w_k[i] / Σ_k a_k m_k[i]`` over the payloads added, with integer weights ``a_k``
    (1, or sample counts). A payload that lacks a name does not take part in that tensor. A tensor without mask
    counts everywhere. With full masks the masked mean is FedAvg. Source: Sub-FedAvg, Algorithm 1 line 9.

    ``max_addends`` bounds the number of payloads and ``max_weight`` the weight of each payload. A value that is too
    large for an exact sum within these bounds (``|w| > 2^23 / max_addends``) is refused with ``ValueError``. No sum can
    wrap around.
    """

    def __init__(self, max_addends: int, max_weight: int = 1) -> None:
        if max_addends < 1 or max_weight < 1:
            raise ValueError(f"max_addends {max_addends} and max_weight {max_weight} must be at least 1")
        self.max_addends = max_addends
        self.max_weight = max_weight
        self.max_magnitude = _HEADROOM / (max_addends + 1)
        self.num_added = 0
        self._sums: dict[str, Tensor] = {}  # int64, in units of 2^-40 / max_weight
        self._dtypes: dict[str, torch.dtype] = {}  # the dtype of the first addend
        self._weights: dict[str, Tensor] = {}  # Σ a_k m_k; 0-dim while every addend was dense
        self._weight_dtype = torch.int32 if max_addends * max_weight < 2**31 else torch.int64

    def add(self, payload: Payload, weight: int = 1) -> None:
        """Add one client's payload; an error leaves the mean as if this payload had not come."""
        if self.num_added >= self.max_addends:
            raise ValueError(f"more than {self.max_addends} payloads added")
        if not 1 <= weight <= self.max_weight:
            raise ValueError(f"weight is {weight}, allowed: 1 to {self.max_weight}")
        for name, tensor in payload.tensors.items():
            if name in self._sums and self._sums[name].shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, allowed: {tuple(self._sums[name].shape)} as before"
                raise ValueError(f"tensor '{name}' has shape {shapes}")
            low, high = map(float, tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
            largest = max(-low, high)
            if not largest <= self.max_magnitude:  # also refuses NaN
                limit = f"finite and at most {self.max_magnitude:g} for {self.max_addends} payloads"
                raise ValueError(f"tensor '{name}' has magnitude {largest:g}, allowed: {limit}")
        scale = weight / self.max_weight * _GRID
        for name, tensor in payload.tensors.items():
            mask = payload.masks.get(name)
            if name not in self._sums:
                self._sums[name] = torch.zeros(tensor.shape, dtype=torch.int64, device=tensor.device)
                self._dtypes[name] = tensor.dtype
                shape = () if mask is None else tensor.shape
                self._weights[name] = torch.zeros(shape, dtype=self._weight_dtype, device=tensor.device)
            if mask is None:
                self._weights[name].add_(weight)
            elif self._weights[name].shape != mask.shape:
                self._weights[name] = self._weights[name].expand(mask.shape).clone()
            kept, weights = (None, ()) if mask is None else (_blocks(mask), _blocks(self._weights[name]))
            for i, (values, sums) in enumerate(zip(_blocks(tensor), _blocks(self._sums[name]), strict=True)):
                addend = values.double().mul(scale).round_().to(torch.int64)  # not mul_: double() may be no copy
                if kept is not None:
                    addend.mul_(kept[i])
                    weights[i].add_(kept[i], alpha=weight)
                sums.add_(addend)
        self.num_added += 1

    def mean(self, fallback: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean in the names, order and dtypes of ``fallback``.

        A coordinate that nobody kept has its value in ``fallback``.
        """
        result = {}
        for name, old in fallback.items():
            if name not in self._sums:
                result[name] = old.clone()
                continue
            result[name] = torch.empty(old.shape, dtype=old.dtype, device=old.device)
            weights = self._weights[name].expand(old.shape)
            parts = map(_blocks, (result[name], self._sums[name], weights, old))
            for out, sums, held, stays in zip(*parts, strict=True):
                mean = sums.double().div_(held.clamp(min=1)).mul_(self.max_weight / _GRID)
                out.copy_(torch.where(held > 0, mean, stays.double()))
        return result

    def mixed(self) -> dict[str, Tensor]:
        """Return the gossip average ``Σ_j w_j / Σ_j m_j`` of all tensors added: :meth:`mean`, with 0 where nobody kept.

        Each mask must be the one with which the weights were trained, and not the mask that the search afterwards
        finds. Algorithm 1 line 7, read literally, divides by masks that do not match the weights. The released code
        divides as this method does. The average is unweighted. Source: Dis-PFL, Algorithm 1 line 7, before its
        multiplication with the local mask.
        """
        return self.mean({name: torch.zeros_like(sums, dtype=self._dtypes[name]) for name, sums in self._sums.items()})

    def held(self) -> dict[str, Tensor]:
        """Return a bool tensor for every tensor added: True at the coordinates that at least one addend kept."""
        return {
            name: (weights > 0).expand(self._sums[name].shape).contiguous() for name, weights in self._weights.items()
        }


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor's coordinates as flat pieces, views if it is contiguous; undivided off the CPU: no cache to stay in."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= _BLOCK or flat.device.type != "cpu":
        return (flat,)
    return torch.split(flat, _BLOCK)


def masked_mean(
    payloads: Iterable[Payload], fallback: Mapping[str, Tensor], weights: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return the mean of all ``payloads`` at once, as :class:`MaskedMean` computes it one by one.

    A coordinate that no payload keeps is that of ``fallback``. ``weights`` are positive integers, one per payload.
    ``ValueError`` for another number of weights than payloads.

    >>> kept_by_one = Payload({"w": torch.tensor([1.0, 0.0, 0.0])}, {"w": torch.tensor([True, False, False])})
    >>> kept_by_two = Payload({"w": torch.tensor([3.0, 5.0, 0.0])}, {"w": torch.tensor([True, True, False])})
    >>> masked_mean([kept_by_one, kept_by_two], fallback={"w": torch.tensor([7.0, 8.0, 9.0])})["w"].tolist()
    [2.0, 5.0, 9.0]
    """
    payloads = list(payloads)
    weights = [1] * len(payloads) if weights is None else list(weights)
    if len(weights) != len(payloads):
        raise ValueError(f"{len(weights)} weights for {len(payloads)} payloads")
    accumulator = MaskedMean(max_addends=max(1, len(payloads)), max_weight=max([1, *weights]))
    for payload, weight in zip(payloads, weights, strict=True):
        accumulator.add(payload, weight)
    return accumulator.mean(fallback)


def attention_mean(tensors: Sequence[Sequence[Tensor]], temperature: float) -> list[Tensor]:
    """Return the mean of one layer over its clients, weighted ``softmax(-d_i / (temperature · mean d))``.

    ``d_i`` is the squared L2 distance of client i's layer (all its tensors together) from the plain mean. Where all
    distances are equal, all weights are equal. The rule is ours: FedP3's Algorithm 3 names "an attention mapping
    layer", and no signal from which this layer could learn. The arithmetic is in float64. The order of the clients
    matters to the last bit, so the caller sorts the clients.
    """
    wide = [[tensor.double() for tensor in layer] for layer in tensors]
    mean = [torch.stack(parts).mean(0) for parts in zip(*wide, strict=True)]
    distances = torch.stack(
        [torch.stack([(t - m).square().sum() for t, m in zip(layer, mean, strict=True)]).sum() for layer in wide]
    )
    weights = torch.softmax(-distances / (temperature * distances.mean().clamp(min=1e-300)), dim=0)
    return [
        torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(0).to(first.dtype)
        for parts, first in zip(zip(*wide, strict=True), tensors[0], strict=True)
    ]


def gossip_mix(payloads: Sequence[Payload]) -> dict[str, Tensor]:
    """Return the gossip average of all ``payloads`` at once, as :meth:`MaskedMean.mixed` computes it.

    The receiver's own payload is one of ``payloads``. The order of the payloads does not change a bit. ``ValueError``
    for no payload.
    """
    if not payloads:
        raise ValueError("0 payloads to mix, allowed: at least 1, the client's own")
    mean = MaskedMean(len(payloads))
    for payload in payloads:
        mean.add(payload)
    return mean.mixed()


SCOPES = ("matrix", "payload")


class L0Mean:
    """An l0 mean is FedSpaLLM's server: it holds each entry's mean over those who kept it, and how many pruned it.

    The payloads themselves are not held. Equation (5) divides by ``‖Σ M‖_0``, literally one scalar. The equation means
    each entry's own count, and so does this class. With layer sampling only the payloads that have a matrix count for
    that matrix. Equation (9) would add dense copies for clients that did not prune the matrix; such copies would dilute
    the mean and the counts. The bits do not depend on the order of arrival.
    """

    def __init__(self, max_addends: int, max_weight: int = 1) -> None:
        self._mean = MaskedMean(max_addends, max_weight)
        self._count_dtype = torch.int16 if max_addends < 2**15 else torch.int32
        self._addends: dict[str, int] = {}  # N, by tensor
        self._pruned: dict[str, Tensor] = {}  # C, by masked tensor

    def add(self, payload: Payload, weight: int = 1) -> None:
        """Add one client's payload; its integer ``weight`` (the paper's α) counts in the mean, not among the pruned."""
        self._mean.add(payload, weight)
        for name, tensor in payload.tensors.items():
            self._addends[name] = self._addends.get(name, 0) + 1
            if name in payload.masks:
                pruned = ~payload.masks[name]
                if name not in self._pruned:
                    self._pruned[name] = torch.zeros(tensor.shape, dtype=self._count_dtype, device=tensor.device)
                self._pruned[name].add_(pruned)

    def mean(self) -> Payload:
        """Return equation (5): each entry's mean over those who kept it.

        An entry that nobody kept is 0, and False in the mask.
        """
        held = self._mean.held()
        return Payload(self._mean.mixed(), {name: held[name] for name in self._pruned})

    def expanded(
        self, density: float, *, n_of_m: NOfM | None = None, ties: str = "magnitude", scope: str = "matrix"
    ) -> Payload:
        """Return equations (6) and (7): :meth:`mean`, pruned further to exactly ``keep_count(d, density)`` entries.

        The entries that most clients pruned (``C`` largest) go first. Among entries with equal ``C`` the order is that
        of ``core.expansion.tie_break``, and then the lowest flat index. ``ties`` says which order this is:

        * ``magnitude``: the smallest mean magnitude first;
        * ``wanda``: the smallest product of mean magnitude and norm of its input first;
        * ``index``: the lowest flat index alone.

        If all clients agree on more pruned entries than the density asks for, no entry comes back (``k`` would be
        negative). With ``scope="matrix"`` ``d`` counts the entries of one matrix. With ``scope="payload"`` ``d`` counts
        the entries of all masked tensors together, in the payload's order. With ``n_of_m`` every m neighbours of a row
        keep at most n entries, and ``density`` plays no part. No other entry compensates for an entry that is removed
        here.
        """
        if scope not in SCOPES:
            raise ValueError(f"scope is {scope!r}, allowed: {', '.join(SCOPES)}")
        mean = self.mean()
        masks = {}
        groups = [[name] for name in self._pruned] if scope == "matrix" else [list(self._pruned)]
        for names in filter(None, groups):
            num_clients = torch.cat([torch.full_like(self._pruned[n].view(-1), self._addends[n]) for n in names])
            counts = torch.cat([self._pruned[n].view(-1) for n in names])
            order = torch.cat([tie_break(mean, n, ties) for n in names])
            if n_of_m is not None:
                pruned = _most_pruned_of_m(counts, order, n_of_m, [self._pruned[n].shape[-1] for n in names])
            else:
                target = counts.numel() - keep_count(counts.numel(), density)
                pruned = _most_pruned(counts, num_clients, order, target)
            parts = torch.split(pruned, [self._pruned[n].numel() for n in names])
            for name, part in zip(names, parts, strict=True):
                masks[name] = mean.masks[name] & ~part.view(self._pruned[name].shape)
        return Payload.pruned(mean.tensors, {name: masks[name] for name in self._pruned})

    def votes(self) -> Votes:
        """Return this layer's part in an expansion over several layers together; see ``core.expansion.Cut``."""
        return Votes(self.mean(), {name: counts.clone() for name, counts in self._pruned.items()})


def _most_pruned(counts: Tensor, num_clients: Tensor, tie_break: Tensor, target: int) -> Tensor:
    """Return the pruned entries' mask: those that every client pruned, then the most often pruned, up to ``target``."""
    pruned = counts == num_clients
    missing = target - int(pruned.count_nonzero())
    for level in torch.unique(counts[~pruned]).flip(0).tolist():  # at most one level per client
        if missing <= 0:
            break
        candidates = (~pruned & (counts == level)).nonzero().squeeze(1)
        chosen = candidates[smallest(tie_break[candidates], min(missing, len(candidates)))]
        pruned[chosen] = True
        missing -= len(chosen)
    return pruned


def _most_pruned_of_m(counts: Tensor, tie_break: Tensor, n_of_m: NOfM, row_lengths: Sequence[int]) -> Tensor:
    """Return the mask of :func:`_most_pruned` with m - n pruned entries among every m neighbours.

    No group of m neighbours has more than m - n entries that every client pruned.
    """
    for length in row_lengths:
        check_n_of_m(n_of_m, length)
    n, m = n_of_m
    by_tie = tie_break.view(-1, m).sort(dim=1, stable=True).indices
    by_count = counts.view(-1, m).gather(1, by_tie).sort(dim=1, descending=True, stable=True).indices
    order = by_tie.gather(1, by_count)  # most often pruned first, then the smallest tie_break, then the lowest index
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, : m - n], True).view(-1)


def l0_mean(payloads: Iterable[Payload]) -> Payload:
    """Return the l0 mean of all ``payloads`` at once, as :meth:`L0Mean.mean` computes it.

    ``ValueError`` for no payload.
    """
    return _l0(payloads).mean()


def expand_masks(
    payloads: Iterable[Payload],
    mean: Payload,
    density: float,
    *,
    n_of_m: NOfM | None = None,
    ties: str = "magnitude",
    scope: str = "matrix",
) -> Payload:
    """Return ``mean`` pruned further to ``density``, as in :meth:`L0Mean.expanded`; ``mean`` is ``l0_mean(payloads)``.

    ``ValueError`` for no payload, or a ``mean`` of other tensors or masks than theirs.
    """
    accumulator = _l0(payloads)
    own = accumulator.mean()
    same = own.masks.keys() == mean.masks.keys() and all(torch.equal(own.masks[n], mean.masks[n]) for n in own.masks)
    if own.tensors.keys() != mean.tensors.keys() or not same:
        raise ValueError("mean is not the l0 mean of these payloads: it has other tensors or masks")
    masks = accumulator.expanded(density, n_of_m=n_of_m, ties=ties, scope=scope).masks
    return Payload.pruned(mean.tensors, masks)


def _l0(payloads: Iterable[Payload]) -> L0Mean:
    payloads = list(payloads)
    if not payloads:
        raise ValueError("0 payloads to average, allowed: at least 1")
    accumulator = L0Mean(max_addends=len(payloads))
    for payload in payloads:
        accumulator.add(payload)
    return accumulator
