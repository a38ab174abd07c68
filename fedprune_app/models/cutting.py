"""Removal of whole feed-forward units and heads, which leaves an ordinary checkpoint of smaller width.

In a LLaMA-like layer a unit is a row of ``gate_proj`` and ``up_proj`` and a column of ``down_proj``. A key-value group
is a key head, a value head, and all query heads that read these: rows of ``k_proj``, ``v_proj`` and ``q_proj``, and
columns of ``o_proj``. Until the model is written, masks mark what is kept, in the coordinates of the whole model.
"""

import copy
from typing import Any

import torch

from fedprune_app.core.cutting import cut_inputs
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.models.checkpoints import skeleton
from fedprune_app.models.llm import LanguageModel, decoder_layers

# The matrices whose inputs are cut, by the Hessians of these inputs.
CUT_BY = ("o_proj", "down_proj")
_ATTENTION, _UNITS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_MULTIPLE = 8  # of the number of kept feed-forward units, for fast matrix products


class Cut:
    """How many key-value groups and feed-forward units every layer keeps, and their choice by Hessians.

    The number of groups is the one nearest to a share of ``density`` that transformers admit. The number of units then
    leaves ``density`` of all weights of the matrices. Raises ``ValueError`` for a model that is not LLaMA-like.
    """

    def __init__(self, model: LanguageModel, density: float) -> None:
        self.names = {name.split(".")[-2]: name for name in model.prunable(0)}
        if self.names.keys() != {*_ATTENTION, *_UNITS}:
            raise _kind_error(model)
        text = model.config.get_text_config()
        heads = text.num_attention_heads
        self.num_groups = getattr(text, "num_key_value_heads", None) or heads
        shapes = {part: model.layer_like(0)[name].shape for part, name in self.names.items()}
        hidden, self.num_units = shapes["down_proj"]
        self.head_dim, self.queries = shapes["q_proj"][0] // heads, heads // self.num_groups
        counts = range(1, self.num_groups + 1)
        divisors = [count for count in counts if hidden % (count * self.queries) == 0]
        self.groups = min(divisors, key=lambda count: abs(count - density * self.num_groups))
        attention = self.groups / self.num_groups * sum(shapes[part].numel() for part in _ATTENTION)
        units = int((density * sum(map(torch.Size.numel, shapes.values())) - attention) / (3 * hidden))
        self.units = min(max(units // _MULTIPLE * _MULTIPLE, 1), self.num_units)
        layer = decoder_layers(skeleton(self.config(model.config), model.dtype))[1][0]
        width = self.groups * self.queries * self.head_dim
        if layer.get_submodule(self.names["o_proj"].removesuffix(".weight")).weight.shape != (hidden, width):
            raise _kind_error(model)

    def layer(self, dense: Tensors, hessians: Tensors) -> Payload:
        """Return a layer's matrices and masks; ``hessians`` are those of the inputs of ``o_proj`` and ``down_proj``."""
        weights = {part: dense[name] for part, name in self.names.items()}
        columns = {}
        for part, size, num_kept in (
            ("o_proj", self.queries * self.head_dim, self.groups),
            ("down_proj", 1, self.units),
        ):
            hessian = hessians[self.names[part]]
            weight = weights[part].to(hessian.device)
            weights[part], columns[part] = (t.cpu() for t in cut_inputs(weight, hessian, size, num_kept))
        groups = columns["o_proj"].view(self.num_groups, -1)[:, 0]
        rows = {"q_proj": columns["o_proj"], "gate_proj": columns["down_proj"], "up_proj": columns["down_proj"]}
        rows |= {part: groups.repeat_interleave(len(weights[part]) // len(groups)) for part in ("k_proj", "v_proj")}
        masks = {part: mask.expand(weights[part].shape) for part, mask in columns.items()}
        masks |= {part: mask[:, None].expand(weights[part].shape) for part, mask in rows.items()}
        names = self.names.items()
        tensors = {name: torch.where(masks[part], weights[part], 0) for part, name in names}
        return Payload(tensors, {name: masks[part].contiguous() for part, name in names})

    def config(self, config: Any) -> Any:
        """Return the configuration of the cut model."""
        cut_config = copy.deepcopy(config)
        text = cut_config.get_text_config()
        text.num_attention_heads, text.num_key_value_heads = self.groups * self.queries, self.groups
        text.head_dim, text.intermediate_size = self.head_dim, self.units
        return cut_config


def _kind_error(model: LanguageModel) -> ValueError:
    parts = ", ".join((*_ATTENTION, *_UNITS))
    return model.checkpoint.refused(
        f"allowed with fedspallm.pattern 'cut': one whose layers have {parts} alone, and whose config has head_dim"
    )


def narrowed(tensors: Tensors, masks: Tensors) -> TensorDict:
    """Return a layer's tensors without the rows, columns and biases of which a mask keeps nothing."""
    result = dict(tensors)
    for name, mask in masks.items():
        rows, columns = mask.any(dim=1), mask.any(dim=0)
        result[name] = tensors[name][rows][:, columns].contiguous()
        bias = f"{name.removesuffix('weight')}bias"
        if bias in tensors:
            result[bias] = tensors[bias][rows]
    return result
