"""HeteroFL and FedRolex once more, with index lists: what a client has is cut out of the model and put back."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from tests.gallery import federations as small

WIDTHS = (0.25, 0.5, 1.0)


def logits(tensors, images, rate):
    """cnn-small by hand, with the Scaler behind its hidden layers."""
    for layer in ("conv1", "conv2"):
        images = F.conv2d(images, tensors[f"{layer}.weight"], tensors[f"{layer}.bias"], padding=1) / rate
        images = F.relu(F.max_pool2d(images, 2))
    return images.flatten(1) @ tensors["fc1.weight"].T + tensors["fc1.bias"]


def cut(first, rate):
    """The indices of a client's tensors, one list for each dimension; behind conv2 a channel has four pixels."""
    one, two = ([(first + i) % size for i in range(math.ceil(rate * size))] for size in (16, 32))
    pixels = [4 * unit + pixel for unit in two for pixel in range(4)]
    return {
        "conv1.weight": (one, [0]),
        "conv1.bias": (one,),
        "conv2.weight": (two, one),
        "conv2.bias": (two,),
        "fc1.weight": (list(range(10)), pixels),
        "fc1.bias": (list(range(10)),),
    }


def grid(indices):
    return tuple(torch.meshgrid(*map(torch.tensor, indices), indexing="ij"))


def reference(config, rolls):
    """The server's model after the last round."""
    model, examples = small.network(config), small.examples(config)
    server = small.parameters(model)
    for number in range(config.num_server_rounds):
        total = {name: torch.zeros_like(t) for name, t in server.items()}
        count = {name: torch.zeros_like(t) for name, t in server.items()}
        for (images, labels), rate in zip(examples, WIDTHS, strict=True):
            places = {name: grid(indices) for name, indices in cut(number if rolls else 0, rate).items()}
            tensors = {name: server[name][place].clone().requires_grad_() for name, place in places.items()}
            present = torch.zeros(10).index_fill(0, labels.unique(), 1)
            for _ in range(config.local_epochs):
                loss = F.cross_entropy(logits(tensors, images, rate) * present, labels)
                slopes = torch.autograd.grad(loss, list(tensors.values()))
                stepped = zip(tensors.items(), slopes, strict=True)
                tensors = {n: (t - config.learning_rate * g).detach().requires_grad_() for (n, t), g in stepped}
            for name, place in places.items():
                total[name][place] += tensors[name].detach()
                count[name][place] += 1
        server = {n: torch.where(count[n] > 0, total[n] / count[n].clamp(min=1), t) for n, t in server.items()}
    return server
