"""A checkpoint's files are those of its folder, and its config promises no more than they have."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fedprune_app.models.checkpoints import Checkpoint, TensorFiles
from tests.models.tiny_llm import FAMILIES, tiny_byte_model


@pytest.mark.parametrize("way", ["../", "absolute", "link"])
def test_an_index_of_shards_leads_nowhere_but_into_its_folder(tmp_path, way):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"secret": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    (folder / "shard.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    outside = str(tmp_path / "elsewhere.safetensors")
    name = {"../": "../elsewhere.safetensors", "absolute": outside, "link": "shard.safetensors"}[way]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"secret": name}}))
    with pytest.raises(ValueError, match=r"is outside the folder, allowed: the folder's own files$") as error:
        TensorFiles(folder)
    assert repr(name) in str(error.value)


def test_the_hubs_snapshots_are_links_to_blobs_of_the_same_model(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"weight": torch.ones(2)}, blobs / "abc")
    (snapshot / "shard.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "shard.safetensors"}}))
    assert TensorFiles(snapshot).read(["weight"])["weight"].tolist() == [1, 1]


@pytest.mark.timeout(20)
def test_more_layers_than_the_files_have_tensors_are_refused_before_they_are_made(tmp_path):
    folder = tiny_byte_model(tmp_path / "model", next(iter(FAMILIES)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 200_000}))
    with pytest.raises(
        ValueError, match=r"num_hidden_layers is 200000, allowed: at most \d+, the tensors in its files"
    ):
        Checkpoint(folder)
