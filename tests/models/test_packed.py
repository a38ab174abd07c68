"""Packed language models: kept values and coded masks on disk, and the same logits."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.core.payload import Payload
from fedprune_app.exports.formats import pack_model
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import load_packed, write_packed
from tests.models.tiny_llm import tiny_checkpoint, tokens


def half_of(model):
    def layer(number):
        tensors = model.layer_tensors(number)
        names = model.prunable(number)
        draw = torch.Generator().manual_seed(number)
        masks = {name: torch.rand(tensors[name].shape, generator=draw) < 0.5 for name in names}
        return Payload.pruned({name: tensors[name] for name in names}, masks)

    return layer


def test_a_checkpoint_whose_weights_are_zeros_is_packed(tmp_path):
    model = LanguageModel(tiny_checkpoint(tmp_path / "dense", "llama"))
    write_packed(model, half_of(model), tmp_path / "first")
    load_packed(tmp_path / "first").save_pretrained(tmp_path / "zeros")
    found = pack_model(tmp_path / "zeros", tmp_path / "packed")
    assert found.density == pytest.approx(0.5, abs=0.05)
    assert found.packed_bytes < found.dense_bytes
    assert torch.equal(
        load_packed(tmp_path / "packed")(tokens(1, 5)).logits, load_packed(tmp_path / "first")(tokens(1, 5)).logits
    )


def test_a_packed_model_ends_its_turns_where_the_checkpoint_does(tmp_path):
    dense = tiny_checkpoint(tmp_path / "dense", "llama")
    (tmp_path / "dense" / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    model = LanguageModel(dense)
    write_packed(model, half_of(model), tmp_path / "packed")
    assert load_packed(tmp_path / "packed").generation_config.eos_token_id == [3, 7]


def test_a_damaged_packed_model_is_refused(tmp_path):
    model = LanguageModel(tiny_checkpoint(tmp_path / "dense", "llama"))
    write_packed(model, half_of(model), tmp_path / "packed")
    part = tmp_path / "packed" / "part-00001.fp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part-00001\.fp is damaged"):
        load_packed(tmp_path / "packed")
