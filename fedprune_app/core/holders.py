"""How many clients hold each coordinate, as a sum of their masks that shows no mask."""

import math
from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload

HOLDERS = "holders"
HELD = "the values that enough clients send"  # the request that follows
_LANES = 4  # counts of 16 bits in a word, of which none carries into the next before 2^15 clients hold a coordinate


class Holders:
    """Counts over clients' masks of tensors with these shapes. A tensor without mask is held everywhere.

    >>> holders = Holders({"w": torch.zeros(2)})
    >>> sums = [Holders.integers(Payload({"w": torch.zeros(2)}, {"w": torch.tensor([True, k > 1])})) for k in range(4)]
    >>> holders.add(Payload({"holders": sum(each["holders"] for each in sums)}), members=4)
    >>> holders.counts["w"].tolist()
    [4, 2]
    """

    terms: Mapping[str, int] = {HOLDERS: 1}

    def __init__(self, like: Tensors) -> None:
        self._shapes = {name: tensor.shape for name, tensor in sorted(like.items())}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.counts: TensorDict = {}  # int32

    def integer_shapes(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Return the name and shape of :meth:`integers`."""
        return {HOLDERS: torch.Size([math.ceil(sum(self._sizes) / _LANES)])}

    @staticmethod
    def integers(payload: Payload) -> TensorDict:
        """Return a payload's masks as int64, whose sum :meth:`add` takes."""
        masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in payload.tensors.items()}
        flat = torch.cat([mask.flatten().short() for _, mask in sorted((masks | dict(payload.masks)).items())])
        return {HOLDERS: pad(flat, (0, -len(flat) % _LANES)).view(torch.int64)}

    def add(self, payload: Payload, members: int) -> None:
        """Take the sum of this many members' masks. Raises ``ValueError`` for one that cannot be."""
        flat = payload.tensors[HOLDERS].view(torch.int16)
        low, high = map(int, flat.aminmax())
        if low < 0 or high > members:
            raise ValueError(f"the sum has {low} to {high} holders of a coordinate, allowed: 0 to {members}")
        parts = torch.split(flat[: sum(self._sizes)].int(), self._sizes)
        self.counts = {name: part.view(self._shapes[name]) for name, part in zip(self._shapes, parts, strict=True)}
