"""Models of the hub: fetched once whoever asks, converted without unpickling, and before a run's clients start."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from fedprune_app.models.checkpoints import Checkpoint, TensorFiles
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.sources import resolve_checkpoint
from tests.models.hub import local_hub
from tests.models.tiny_llm import FAMILIES, text_folder, tiny_byte_model

NAME = "someone/tiny"
ASK = f"""
import sys
from fedprune_app.models.sources import (resolve_checkpoint)
print("ready", flush=True)
sys.stdin.readline()
print(resolve_checkpoint({NAME!r}, download=True))
"""


class _Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def branches(folder, trap=None):
    """The hub's copy of a model; with a ``trap`` its main branch has a pickle alone, and a bot's branch safetensors."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if trap is None:
        return {"main": files}
    pickled = {"pytorch_model.bin": pickle.dumps(_Trap(trap))}
    bare = {name: content for name, content in files.items() if not name.endswith(".safetensors")}
    return {"main": {**bare, **pickled}, "refs/pr/1": {**files, **pickled}}


def asking(hub, cache, **more):
    """A process that asks for the model when it is told to."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", ASK], env={**hub.environment(cache), **more}, text=True, **pipes)


def answers(processes):
    """What they found, asking all at once."""
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=1000) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return [out.strip() for out, _ in told]


@pytest.mark.programs
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_the_hub_has_as_pickle_alone_is_converted_once_for_all_who_ask_at_once(family, tmp_path):
    own = tiny_byte_model(tmp_path / "own", family, dtype=torch.float16)
    with local_hub(NAME, branches(own, trap=tmp_path / "unpickled"), seconds=1.0) as hub:
        (tmp_path / "cache").mkdir()
        first, second = answers([asking(hub, tmp_path / "cache") for _ in range(2)])
        assert first == second
        assert sum("discussions" in path for path in hub.asked) == 1
        assert not any("pytorch_model.bin" in path for path in hub.asked)
        assert not (tmp_path / "unpickled").exists()
    found, expected = LanguageModel(resolve_checkpoint(first, download=False)), LanguageModel(own)
    assert found.shell_digest() == expected.shell_digest()
    assert [found.layer_digest(i) for i in range(2)] == [expected.layer_digest(i) for i in range(2)]
    assert found.encode("a text").tolist() == expected.encode("a text").tolist()


@pytest.mark.programs
def test_a_conversion_that_was_cut_off_is_made_anew(tmp_path):
    own = tiny_byte_model(tmp_path / "own", "opt")
    with local_hub(NAME, branches(own, trap=tmp_path / "unpickled")) as hub:
        snapshot = tmp_path / "cache" / "hub" / "models--someone--tiny" / "snapshots" / hub.sha("main")
        partial = snapshot / "fedprune-safetensors.partial"
        partial.mkdir(parents=True)
        (partial / "model-00009-of-00009.safetensors").write_bytes(b"half")
        (found,) = answers([asking(hub, tmp_path / "cache")])
    assert LanguageModel(resolve_checkpoint(found, download=False)).layer_digest(1) == LanguageModel(own).layer_digest(
        1
    )


@pytest.mark.programs
def test_a_model_that_nobody_converted_is_refused_in_one_line(tmp_path):
    own = tiny_byte_model(tmp_path / "own", "opt")
    main = {"main": branches(own, trap=tmp_path / "unpickled")["main"]}
    with local_hub(NAME, main) as hub:
        process = asking(hub, tmp_path / "cache", DISABLE_SAFETENSORS_CONVERSION="1")  # else one is asked for, far away
        _, errors = process.communicate("\n", timeout=1000)
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1].startswith("ValueError: model 'someone/tiny' has no safetensors: ")
    assert not (tmp_path / "unpickled").exists()


def fedprune(hub, tmp_path, *arguments):
    command = [sys.executable, "-m", "fedprune_app.cli", *map(str, arguments)]
    return subprocess.run(command, env=hub.environment(tmp_path / "cache"), capture_output=True, text=True)


MATRIX = "systems: [fedspallm]\ndatasets: [{dataset: text, model: some/other}]\ncommon: {download: true}"


@pytest.mark.programs
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_model_that_is_not_to_be_had_is_told_before_anything_starts(command, tmp_path):
    matrix, texts = tmp_path / "m.yaml", text_folder(tmp_path / "texts")
    matrix.write_text(MATRIX)
    what = {"run": ["system=fedspallm", "dataset=text", "model=some/other", "download=true"], "sweep": [matrix]}
    with local_hub(NAME, {"main": {}}) as hub:
        place = [f"data-dir={texts}", "--out", tmp_path / "out", "--clients", 2]
        refused = fedprune(hub, tmp_path, command, *what[command], *place)
    assert refused.returncode == 2, refused.stderr  # not 1, which is a run that failed
    where = f"matrix '{matrix}', run 'fedspallm-text-modelsome_other-seed0': " if command == "sweep" else ""
    assert f"error: {where}model is 'some/other', cannot be downloaded: " in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.programs
def test_the_clients_of_a_run_find_the_model_fetched(tmp_path):
    """And ask the hub for it once in a process, not for every message."""
    own, texts = tiny_byte_model(tmp_path / "own", "llama"), text_folder(tmp_path / "texts")
    settings = ["dataset=text", f"data-dir={texts}", f"model={NAME}", "download=true", "num-server-rounds=1"]
    settings += ["fedspallm.segments=2", "fedspallm.segment-length=16", "fedspallm.window=16", "fraction-train=1.0"]
    with local_hub(NAME, branches(own)) as hub:
        place = ["--out", tmp_path / "run", "--clients", 2, "--engine", "inprocess"]
        done = fedprune(hub, tmp_path, "run", "system=fedspallm", *settings, *place)
    assert done.returncode == 0, done.stderr
    assert sum(path.startswith("GET") and path.endswith("/model.safetensors") for path in hub.asked) == 1
    assert sum(path == f"GET /api/models/{NAME}/revision/main" for path in hub.asked) == 1


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
