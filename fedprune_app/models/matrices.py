"""The matrices of a decoder layer, wherever transformers keeps them: each (out, in), by a name of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


@dataclass(frozen=True)
class Place:
    """A matrix is in a parameter of the layer, whole, or as one expert's part; ``is_turned`` says that it is (in, out).

    ``expert`` is that part's number, -1 for a whole parameter.
    """

    parameter: str
    expert: int
    is_turned: bool


class Matrices:
    """The matrices of a layer are the weights of its linear modules and of the experts of a mixture.

    An ``nn.Linear`` has its matrix as it is, and GPT-2's ``Conv1D`` turned. A parameter of three dimensions holds those
    of all experts: expert 3's part of ``mlp.experts.down_proj`` is called ``mlp.experts.down_proj.3``.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.places: dict[str, Place] = {}
        self._names_of: dict[str, list[str]] = {}  # by parameter, its matrices
        for owner, module in layer.named_modules():
            if isinstance(module, _ConvNd | nn.Embedding):
                continue
            is_turned = type(module).__name__ == "Conv1D" or bool(getattr(module, "is_transposed", False))
            for attribute, parameter in module.named_parameters(recurse=False):
                name = f"{owner}.{attribute}".removeprefix(".")
                if parameter.dim() == 3:
                    places = {f"{name}.{i}": Place(name, i, is_turned) for i in range(len(parameter))}
                elif attribute == "weight" and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
                    places = {name: Place(name, -1, is_turned)}
                else:
                    continue
                self._names_of[name] = list(places)
                self.places |= places

    def apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's tensors, or masks, with its matrices in place of the parameters that hold them."""
        return {name: tensor.contiguous() for name, tensor in self.views(tensors).items()}

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what :meth:`apart` returns, in the memory of ``tensors``."""
        views: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            for matrix_name in self._names_of.get(name, [name]):
                place = self.places.get(matrix_name, Place(matrix_name, -1, is_turned=False))
                part = tensor if place.expert < 0 else tensor[place.expert]
                views[matrix_name] = part.mT if place.is_turned else part
        return views

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what :meth:`apart` was given; ``tensors`` has all matrices of a parameter, or none."""
        parameters: dict[str, Tensor] = {}
        for matrix_name, tensor in tensors.items():
            place = self.places.get(matrix_name, Place(matrix_name, -1, is_turned=False))
            if place.expert > 0:
                continue
            parts = [tensors[name] for name in self._names_of[place.parameter]] if place.expert == 0 else [tensor]
            oriented = [part.mT.contiguous() if place.is_turned else part for part in parts]
            parameters[place.parameter] = torch.stack(oriented) if place.expert == 0 else oriented[0]
        return parameters
