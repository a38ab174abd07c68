"""Small runs of the gallery's methods, and what the slow references beside them begin with.

With one batch for all of a client's examples the order of the examples has no part in a run. So a reference needs no
draws, and plain PyTorch from the paper's text gives the same models but for rounding.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from fedprune_app import plugins
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine.store import read_tensors
from fedprune_app.models.initial import initial_model
from fedprune_app.plugins import loading
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.testing import QUICK, run_with

GALLERY = Path(__file__).parents[2] / "gallery"
SHARED = {"fedrolex": "heterofl"}
"""Methods that stand in another method's file."""
CLIENTS = 3
WHOLE_BATCHES = {
    **QUICK,
    "local-epochs": 2,
    "batch-size": 1000,
    "momentum": 0.0,
    "num-server-rounds": 2,
    "model": "cnn-small",
}


def file_of(name):
    return GALLERY / f"{SHARED.get(name, name)}.py"


def settings_of(name, **settings):
    """The settings of a run of the method, with underscores for "-" and two of them for "."."""
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
    return {**WHOLE_BATCHES, "system": name, "plugins": str(file_of(name)), **given}


def config_of(name, **settings):
    return prepare(RunInputs(settings_of(name, **settings))).config


def loaded(name):
    """The module of a method, as a run has loaded it."""
    plugins.load({"plugins": str(file_of(name))})
    (module,) = (module for _, module in loading._files.values() if Path(str(module.__file__)) == file_of(name))
    return module


def run(folder, name, **settings):
    """A finished run of the method."""
    return run_with(settings_of(name, **settings), folder, clients=CLIENTS)


def global_model(finished):
    """The server's tensors after the last round."""
    return load_file(finished.folder / "models" / "global.safetensors")


def state_of(finished, client, group):
    """What a client keeps after the last round under the name of a group."""
    return read_tensors(max((finished.folder / "clients" / f"{client:05d}").glob("round-*.safetensors"))).group(group)


def meta_of(finished, client):
    """The numbers that a client keeps after the last round."""
    return read_tensors(max((finished.folder / "clients" / f"{client:05d}").glob("round-*.safetensors"))).meta


def network(config):
    """The initial network of a run, which a reference trains."""
    return initial_model(config.model, "digits", (1, 8, 8), 10, init=config.init, seed=config.seed)


def examples(config):
    """Each client's training images and labels."""
    data = [client_data(data_config(config), client, CLIENTS) for client in range(CLIENTS)]
    return [(part.train_images, part.train_labels) for part in data]


def gradients(model, tensors, images, labels):
    """The gradient of the mean cross entropy of a batch at these parameters, by name."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    logits = torch.func.functional_call(model, leaves, (images,))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def mean(models, weights):
    """The weighted mean of models, as a sum of all of them divided once."""
    total = sum(weights)
    return {n: sum(w * m[n] for m, w in zip(models, weights, strict=True)) / total for n in models[0]}


def close(a, b, tolerance=2e-6):
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=tolerance) for n in a)
