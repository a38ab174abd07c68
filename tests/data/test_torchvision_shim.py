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
def test_after_import_fedprune_app_torchvision_imports():
    said = python(
        "import fedprune_app, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "from torchvision import datasets, models, transforms; import importlib.resources, torchvision\n"
        "print(len(torchvision.__path__), importlib.resources.files('torchvision').is_dir())"
    )
    assert said == "1 True\n"


def test_looking_whether_torchvision_is_there_does_not_import_torch():
    python(
        "import fedprune_app, sys; from importlib.util import find_spec\n"
        "assert find_spec('torchvision').loader.name == 'torchvision' and 'torch' not in sys.modules"
    )


@pytest.mark.programs
@pytest.mark.parametrize("first", ["fedprune_app, transformers", "transformers, fedprune_app"])
def test_transformers_finds_its_models_in_whatever_order_both_are_imported(first):
    python(f"import {first}; transformers.LlamaConfig(); transformers.LlamaForCausalLM")


def test_one_hook_is_enough():
    before = list(sys.meta_path)
    torchvision_shim.prepare_when_imported()
    assert sys.meta_path == before


@pytest.mark.parametrize("loaded", [True, False])
def test_operators_are_declared_only_where_they_are_missing(monkeypatch, loaded):
    declared = []
    operators = SimpleNamespace(nms=None, qnms=None) if loaded else SimpleNamespace()
    monkeypatch.setattr(torch.ops, "torchvision", operators, raising=False)
    monkeypatch.setattr(torch.library, "define", lambda name, schema: declared.append(name))
    torchvision_shim.declare_operators()
    assert declared == ([] if loaded else ["torchvision::nms", "torchvision::qnms"])
