"""torchvision can be imported whether or not its compiled operators fit the torch beside it."""

import subprocess
import sys

import pytest
import torch

from fedprune_app.core import torchvision_shim


def test_after_preparing_twice_torchvision_imports():
    code = (
        "from fedprune_app.core.torchvision_shim import prepare_torchvision as prepare; prepare(); prepare();"
        "from torchvision import datasets, models, transforms; prepare()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("compiled", [True, False])
def test_operators_are_declared_only_where_they_would_be_missing(monkeypatch, compiled):
    declared = []
    monkeypatch.setattr(torchvision_shim, "_compiled_operators_load", lambda: compiled)
    monkeypatch.setattr(torch.ops, "torchvision", object(), raising=False)  # has no nms
    monkeypatch.setattr(torch.library, "define", lambda name, schema: declared.append(name))
    torchvision_shim.prepare_torchvision()
    assert declared == ([] if compiled else ["torchvision::nms", "torchvision::qnms"])
