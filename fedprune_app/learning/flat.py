"""Flat tensors of the trained parameters of one network, or of several alike, with masks in the same layout."""

import math
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from fedprune_app.core.named import TensorDict, Tensors

_ALIGNMENT = 64  # bytes; torch aligns tensors so, and kernels then give the same bits as on a tensor's own memory


def trained_names(model: nn.Module, frozen: Collection[str] = ()) -> list[str]:
    """Return the names of the parameters that need a gradient and are not in ``frozen``, in order."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in frozen]


class FlatLayout:
    """Where the parameters ``names`` of ``clients`` networks of one architecture lie in one flat tensor.

    Parameters of one name are adjacent, client after client, so that all of them together are one tensor as well, see
    :meth:`stacked`. Strides are those of the parameters of ``model``.

    Raises ``ValueError`` if the parameters differ in dtype or device, or there is none.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], clients: int = 1) -> None:
        parameters = dict(model.named_parameters())
        trained_parameters = {name: parameters[name] for name in names}
        kinds = {(p.dtype, p.device) for p in trained_parameters.values()}
        if len(kinds) != 1:
            kinds_text = ", ".join(f"{dtype} on {device}" for dtype, device in kinds) or "none"
            raise ValueError(f"parameters to train are {kinds_text}, allowed: one dtype on one device")
        self.dtype, self.device = kinds.pop()
        self.clients = clients
        self._shapes: dict[str, torch.Size] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._offsets: dict[str, int] = {}
        self._steps: dict[str, int] = {}  # from one client's parameter to the next one's
        slot = _ALIGNMENT // self.dtype.itemsize
        self.size = 0
        for name, parameter in trained_parameters.items():
            self._shapes[name] = parameter.shape
            self._strides[name] = torch.empty_like(parameter, device="meta").stride()  # dense, same order
            self._offsets[name] = self.size
            padded_size = math.ceil(parameter.numel() / slot) * slot
            # a matrix is aligned for each client; other parameters have no gap, so that all clients' form one tensor
            self._steps[name] = padded_size if parameter.dim() == 2 else parameter.numel()
            self.size += math.ceil(clients * self._steps[name] / slot) * slot

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor, client: int = 0) -> TensorDict:
        """Return one client's parts of a flat tensor, by parameter name and in its shape."""
        return {
            name: flat.as_strided(shape, self._strides[name], self._offsets[name] + client * self._steps[name])
            for name, shape in self._shapes.items()
        }

    def rows(self, flat: Tensor, name: str, clients: int) -> Tensor:
        """Return the parameters ``name`` of the first ``clients`` as (clients, elements)."""
        elements = math.prod(self._shapes[name])
        return flat.as_strided((clients, elements), (self._steps[name], 1), self._offsets[name])

    def stacked(self, flat: Tensor, name: str, clients: int) -> Tensor:
        """Return the parameters ``name`` of the first ``clients`` as one tensor, in the form of grouped layers.

        Matrices are stacked in a new first dimension. For all other parameters the first dimensions are joined.
        """
        shape, strides, offset = self._shapes[name], self._strides[name], self._offsets[name]
        if len(shape) == 2:
            return flat.as_strided((clients, *shape), (self._steps[name], *strides), offset)
        first, *rest = shape or (1,)  # a scalar is a vector of one
        return flat.as_strided((clients * first, *rest), strides or (1,), offset)


class Flat:
    """The flat tensors of a training: values, gradients, and optionally velocity and masks.

    Masks are 1 or 0, initially 1 everywhere.
    """

    def __init__(self, layout: FlatLayout, momentum: bool = False, masked: bool = False) -> None:
        self.layout = layout
        self.values = layout.zeros()
        self.gradients = layout.zeros()
        self.velocity = layout.zeros() if momentum else None
        self.kept = torch.ones_like(self.values) if masked else None


class FlatParameters:
    """Make one client's parameters and gradients views of flat tensors within the context.

    A training step's own arithmetic (zero, clip, mask, momentum, update) is then one operation each on ``values`` and
    ``gradients`` instead of one per parameter. The model works as usual; on exit every parameter is back in its own
    memory, with the new values and without a gradient.

    Parameters outside the ``layout`` need no gradient within the context. A parameter that the loss does not reach has
    gradient zero rather than none. Strides are kept.
    """

    def __init__(self, model: nn.Module, flat: Flat, client: int = 0) -> None:
        parameters = dict(model.named_parameters())
        self.named_values = flat.layout.views(flat.values, client)
        self.named_gradients = flat.layout.views(flat.gradients, client)
        self._trained = {name: parameters[name] for name in flat.layout.names}
        self._frozen = [p for name, p in parameters.items() if name not in self._trained and p.requires_grad]

    def __enter__(self) -> Self:
        self._own_memory = {name: parameter.data for name, parameter in self._trained.items()}
        for name, parameter in self._trained.items():
            self.named_values[name].copy_(parameter.data)
            parameter.data = self.named_values[name]
            parameter.grad = self.named_gradients[name]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, parameter in self._trained.items():
            parameter.data = self._own_memory[name].copy_(self.named_values[name])
            parameter.grad = None
        for parameter in self._frozen:
            parameter.requires_grad_(True)


def check_masks(model: nn.Module, masks: Tensors) -> None:
    check_names("masks", masks, model)
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if mask.dtype != torch.bool or mask.shape != parameters[name].shape:
            raise ValueError(
                f"mask '{name}' is {mask.dtype} of shape {tuple(mask.shape)}, "
                f"allowed: torch.bool of shape {tuple(parameters[name].shape)}"
            )


def check_names(kind: str, names: Collection[str], model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    if unknown_names := [name for name in names if name not in parameters]:
        raise ValueError(f"{kind} names '{unknown_names[0]}', allowed: {', '.join(parameters)}")
