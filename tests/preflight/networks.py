"""Networks as strangers write them, for images of 8x8: some have no smaller form, some fail at one step alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def normed(inputs, outs, size=3, **how):
    return nn.Sequential(nn.Conv2d(inputs, outs, size, padding=size // 2, **how), nn.BatchNorm2d(outs))


def ended(*layers, width, classes):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def nested(shape, classes):
    blocks = [nn.Sequential(nn.Sequential(*normed(inputs, 8)), nn.ReLU()) for inputs in (shape[0], 8)]
    return ended(*blocks, width=8, classes=classes)


def depthwise(shape, classes):
    layers = [*normed(shape[0], 8), nn.ReLU6(), *normed(8, 8, groups=8), nn.ReLU6(), *normed(8, 16, 1)]
    return ended(*layers, width=16, classes=classes)


def grouped(shape, classes):
    return ended(normed(shape[0], 8), nn.ReLU(), normed(8, 8, groups=4), nn.ReLU(), width=8, classes=classes)


def prelu(shape, classes):
    return ended(*normed(shape[0], 8), nn.PReLU(8), *normed(8, 8), nn.ReLU(), width=8, classes=classes)


def scripted(shape, classes):
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))


def without_scale(shape, classes):
    norm = nn.BatchNorm2d(8, affine=False)
    return ended(nn.Conv2d(shape[0], 8, 3), norm, nn.ReLU(), width=8, classes=classes)


class Blocks(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.second = normed(shape[0], 8), normed(8, 8)
        self.third, self.last = normed(16, 8), nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.features(F.relu(self.first(x))).mean((2, 3)))


class Dense(Blocks):
    def features(self, x):
        return F.relu(self.third(torch.cat([x, F.relu(self.second(x))], 1)))


class UNet(Blocks):
    def features(self, x):
        inner = F.interpolate(F.relu(self.second(F.max_pool2d(x, 2))), scale_factor=2.0)
        return F.relu(self.third(torch.cat([x, inner], 1)))


class Gated(Blocks):
    def features(self, x):
        return F.glu(self.third(torch.cat([x, self.second(x)], 1)), 1).repeat(1, 2, 1, 1)


class Flipped(Blocks):
    def features(self, x):
        return F.relu(self.second(x.flip(1)))


class Residual(Blocks):
    def features(self, x):
        return F.relu(x + self.second(x))


class Vectors(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(self.hidden(x))


class Skipping(Vectors):
    def hidden(self, x):
        return x + F.relu(self.second(x))


class Reentrant(Vectors):
    def hidden(self, x):
        return checkpoint(lambda x: F.relu(self.second(x)), x, use_reentrant=True)


class TupleInTraining(Vectors):
    def forward(self, x):
        logits = super().forward(x)
        return (logits, 0) if self.training else logits

    def hidden(self, x):
        return F.relu(self.second(x))


class PairsAtMost(Vectors):
    """In evaluation it takes no more than two images at once."""

    def hidden(self, x):
        if len(x) > 2 and not self.training:
            raise RuntimeError("more than\na pair")
        return F.relu(self.second(x))
