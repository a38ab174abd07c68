"""torchvision can be imported whether or not its compiled operators fit the torch beside it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fedprune_app.core import torchvision_shim


def python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.programs
def test_once_it_was_made_ready_torchvision_imports():
    said = python(
        "from fedprune_app.core.torchvision_shim import prepare_torchvision; prepare_torchvision()\n"
        "from torchvision import datasets, models, transforms; import importlib.resources, torchvision\n"
        "print(len(torchvision.__path__), importlib.resources.files('torchvision').is_dir())"
    )
    assert said == "1 True\n"


def test_importing_fedprune_imports_neither_torch_nor_numpy():
    python("import fedprune_app, sys; assert not {'torch', 'numpy', 'torchvision'} & set(sys.modules)")


@pytest.mark.programs
@pytest.mark.parametrize("first", ["fedprune_app", "transformers"])
def test_transformers_finds_its_models_whoever_imported_it_first(first):
    python(
        f"import {first}\n"
        "from fedprune_app.models.transformers import import_transformers\n"
        "import_transformers().LlamaConfig(); import_transformers().LlamaForCausalLM"
    )


@pytest.mark.programs
def test_a_plug_in_may_import_torchvision(tmp_path):
    plugin = tmp_path / "seen.py"
    plugin.write_text("from torchvision.models import resnet18\n")
    python(f"from fedprune_app import plugins; plugins.load({{'plugins': {str(plugin)!r}}})")


@pytest.mark.parametrize("loaded", [True, False])
def test_operators_are_declared_only_where_they_are_missing(monkeypatch, loaded):
    declared = []
    operators = SimpleNamespace(nms=None, qnms=None) if loaded else SimpleNamespace()
    monkeypatch.setattr(torch.ops, "torchvision", operators, raising=False)
    monkeypatch.setattr(torch.library, "define", lambda name, schema: declared.append(name))
    torchvision_shim.declare_operators()
    assert declared == ([] if loaded else ["torchvision::nms", "torchvision::qnms"])
