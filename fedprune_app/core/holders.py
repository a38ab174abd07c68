"""How many clients hold each coordinate, as a sum of their masks that shows no mask."""

import math
from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload

HOLDERS = "holders"
HELD = "the values that enough clients send"  # the request that follows


class Holders:
    """Counts over the masks of at most ``most`` clients, of tensors with these shapes.

    A tensor without mask is held everywhere. A word holds as many counts as fit, each with bits for more than ``most``:
    a sum in which masks are left has counts that cannot be.

    >>> holders = Holders({"w": torch.zeros(2)}, most=4)
    >>> masks = [torch.tensor([True, k > 1]) for k in range(4)]
    >>> sums = [holders.integers(Payload({"w": torch.zeros(2)}, {"w": mask}), bits=3) for mask in masks]
    >>> holders.add(Payload({"holders": sum(each["holders"] for each in sums)}), members=4)
    >>> holders.counts["w"].tolist()
    [4, 2]
    """

    def __init__(self, like: Tensors, most: int) -> None:
        self._shapes = {name: tensor.shape for name, tensor in sorted(like.items())}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self._places = _places((most + 1).bit_length())
        self.terms: Mapping[str, int] = {HOLDERS: self._places.step}  # the bits of a count
        self.counts: TensorDict = {}  # int32

    def integer_shapes(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Return the name and shape of :meth:`integers`."""
        return {HOLDERS: torch.Size([math.ceil(sum(self._sizes) / len(self._places))])}

    @staticmethod
    def integers(payload: Payload, bits: int) -> TensorDict:
        """Return a payload's masks as int64, whose sum :meth:`add` takes."""
        tensors, places = sorted(payload.tensors.items()), _places(bits)
        masks = [payload.masks.get(name, torch.ones_like(tensor, dtype=torch.bool)) for name, tensor in tensors]
        flat = torch.cat([mask.flatten() for mask in masks])
        rows = pad(flat, (0, -len(flat) % len(places))).view(len(places), -1)
        words = torch.zeros_like(rows[0], dtype=torch.int64)
        for row, place in zip(rows, places, strict=True):
            words += row.long() << place
        return {HOLDERS: words}

    def add(self, payload: Payload, members: int) -> None:
        """Take the sum of this many members' masks. Raises ``ValueError`` for one that cannot be."""
        words = payload.tensors[HOLDERS]
        flat = torch.cat([(words >> place & 2**self._places.step - 1).int() for place in self._places])
        if (most := int(flat.max())) > members:
            raise ValueError(f"the sum has {most} holders of a coordinate, allowed: at most {members}")
        parts = torch.split(flat[: sum(self._sizes)], self._sizes)
        self.counts = {name: part.view(self._shapes[name]) for name, part in zip(self._shapes, parts, strict=True)}


def _places(bits: int) -> range:
    """Return where in a word counts are, of which none carries into the next."""
    return range(0, 65 - bits, bits)
