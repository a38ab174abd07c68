"""Sub-FedAvg (Hy) again, slowly: written from the algorithm's text, as in ``reference.py``, and never smaller.

Every network here is the full one. A removed channel is zeros under masks: its convolution and norm, with their
gradients and statistics, and what the next layer makes of it. Shared with the product are a client's data, the initial
model and what is drawn at random: who takes part and in what order examples come. Decisions are on exact fractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.models.initial import initial_model

STATISTICS = ("running_mean", "running_var")
KERNEL = 5


def draw_pictures(folder, side=20, train=24, test=6):
    """An image folder of four kinds of grey pictures, each with its own bright quarter under noise."""
    draw = np.random.default_rng(0)
    half = side // 2
    for part, count in (("train", train), ("test", test)):
        for label in range(4):
            (folder / part / f"quarter{label}").mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 206, (side, side))
                top, left = half * (label // 2), half * (label % 2)
                pixels[top : top + half, left : left + half] += 50
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / f"quarter{label}" / f"{i:02}.png")
    return folder


def place_of(name):
    """``"conv2.weight"`` is ``("conv", 2, "weight")``."""
    layer, _, part = name.partition(".")
    return layer.rstrip("0123456789"), int(layer.lstrip("abcdefghijklmnopqrstuvwxyz")), part


def depth(tensors, kind):
    return max(place_of(name)[1] for name in tensors if place_of(name)[0] == kind)


def logits(tensors, images, training=False):
    """LeNet-5 and cnn5 with norms by hand; in training, running statistics are updated in place."""
    for i in range(1, depth(tensors, "conv") + 1):
        images = F.conv2d(images, tensors[f"conv{i}.weight"], tensors[f"conv{i}.bias"])
        mean, variance = (tensors[f"bn{i}.{part}"] for part in STATISTICS)
        images = F.batch_norm(images, mean, variance, tensors[f"bn{i}.weight"], tensors[f"bn{i}.bias"], training)
        images = F.max_pool2d(F.relu(images), 2)
    features = images.flatten(1)
    last = depth(tensors, "fc")
    for i in range(1, last + 1):
        features = features @ tensors[f"fc{i}.weight"].T + tensors[f"fc{i}.bias"]
        features = F.relu(features) if i < last else features
    return features


def share_correct(tensors, images, labels):
    """Accuracy in [0, 1], exactly; None without examples."""
    with torch.no_grad():
        correct = int((logits(tensors, images).argmax(1) == labels).sum())
    return Fraction(correct, len(labels)) if len(labels) else None


def coordinates(tensors, kept, fc=None):
    """What is left of every tensor when only these channels and these linear weights are."""
    masks, last = {}, max(kept)
    for name, tensor in tensors.items():
        kind, i, part = place_of(name)
        mask = torch.ones(tensor.shape, dtype=torch.bool)
        if kind in ("conv", "bn"):
            mask[~kept[i]] = False
        if (kind, part) == ("conv", "weight") and i > 1:
            mask[:, ~kept[i - 1]] = False
        if name == "fc1.weight":
            mask.unflatten(1, (len(kept[last]), -1))[:, ~kept[last]] = False
        masks[name] = mask & fc[name] if fc and name in fc else mask
    return masks


def masked(tensors, masks):
    return {name: torch.where(masks[name], tensor, 0.0) for name, tensor in tensors.items()}


@dataclass
class Client:
    """What a client keeps between rounds, and the last round it took part in."""

    tensors: dict
    kept: dict  # number of the convolution -> which of its channels
    fc: dict  # masks of the linear weights
    round: int = 0


@dataclass
class Outcome:
    server: dict
    clients: dict
    participants: list = field(default_factory=list)
    decisions: list = field(default_factory=list)  # (linear layers, channels), a word each, per client and round
    flops: list = field(default_factory=list)  # per round
    margins: list = field(default_factory=list)  # gaps between the smallest that stayed and the largest that went
    personal: dict = field(default_factory=dict)  # accuracies in the end
    received: dict = field(default_factory=dict)
    of_all: dict = field(default_factory=dict)


class Federation:
    """One run; ``run()`` gives its outcome."""

    def __init__(self, config, num_clients):
        self.config, self.num_clients, self.options = config, num_clients, config.subfedavg
        dataset = load_dataset(config.dataset, config.data_dir, False)
        self.side = dataset.image_shape[1]
        model = initial_model(
            config.model, config.dataset, dataset.image_shape, dataset.num_classes, init=config.init, seed=config.seed
        )
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.initial = {name: t.detach().clone() for name, t in state.items() if t.is_floating_point()}
        self.linear = [name for name in self.initial if place_of(name)[::2] == ("fc", "weight")]
        self.local = [n for n in self.initial if n.startswith("bn") and config.batch_norm == "local"]
        self.data = [client_data(data_config(config), k, num_clients) for k in range(num_clients)]
        kept = {
            i: torch.ones(len(self.initial[f"bn{i}.weight"]), dtype=torch.bool)
            for i in range(1, depth(self.initial, "bn") + 1)
        }
        fc = {name: torch.ones(self.initial[name].shape, dtype=torch.bool) for name in self.linear}
        self.clients = {k: Client(self.initial, kept, fc) for k in range(num_clients)}
        server = {name: tensor for name, tensor in self.initial.items() if name not in self.local}
        self.outcome = Outcome(server, self.clients)

    def run(self):
        config = self.config
        for t in range(1, config.num_server_rounds + 1):
            drawn = rng.numpy_generator(config.seed, "sample", round=t).permutation(self.num_clients)
            chosen = sorted(int(k) for k in drawn[: max(math.floor(config.fraction_train * self.num_clients), 1)])
            self.outcome.participants.append(chosen)
            self.outcome.flops.append(sum(self.client_flops(k) for k in chosen))
            for k in chosen:
                self.client_update(k, t)
            self.outcome.server = self.mean_over_keepers([self.clients[k] for k in chosen])
        for k, client in self.clients.items():
            examples = self.data[k].test_images, self.data[k].test_labels
            begin = self.begin(client)
            personal = client.tensors if client.round else begin
            self.outcome.personal[k] = share_correct(personal, *examples)
            self.outcome.received[k] = share_correct(begin, *examples)
            self.outcome.of_all[k] = share_correct({**begin, **self.outcome.server}, *examples)
        return self.outcome

    def masks(self, client):
        return coordinates(self.initial, client.kept, client.fc)

    def begin(self, client):
        return masked({**client.tensors, **self.outcome.server}, self.masks(client))

    # --- a round ----------------------------------------------------------------------------------------------------

    def client_update(self, k, t):
        config, client, data = self.config, self.clients[k], self.data[k]
        whole = coordinates(self.initial, client.kept)  # all but what channels took
        masks = self.masks(client)
        tensors = {name: tensor.clone() for name, tensor in self.begin(client).items()}
        trained = {n: tensor.requires_grad_() for n, tensor in tensors.items() if place_of(n)[2] not in STATISTICS}
        optimizer = torch.optim.SGD(
            trained.values(),
            lr=config.learning_rate * config.lr_decay ** (t - 1),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        order = rng.generator(config.seed, "train", k, t)
        after_first = None
        for _ in range(config.local_epochs):
            shuffled = torch.randperm(len(data.train_labels), generator=order).tolist()
            while shuffled:
                batch, shuffled = shuffled[: config.batch_size], shuffled[config.batch_size :]
                optimizer.zero_grad()
                outputs = logits(tensors, data.train_images[batch], training=True)
                F.cross_entropy(outputs, data.train_labels[batch]).backward()
                for name, tensor in trained.items():
                    tensor.grad *= whole[name]
                if config.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(trained.values(), config.max_grad_norm)
                for name, tensor in trained.items():
                    tensor.grad *= masks[name]
                optimizer.step()
            if after_first is None:
                after_first = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        result = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        client.tensors, client.round = masked(result, masks), t
        # Both proposals are of the trained model: what the first gate does is nothing to the second.
        proposed = [self.fewer_channels(model, client.kept) for model in (after_first, result)]
        words = self.perhaps_prune(client, after_first, result, data), self.perhaps_remove(client, *proposed, data)
        self.outcome.decisions.append(words)

    def perhaps_prune(self, client, after_first, last, data):
        """The linear layers: as in Sub-FedAvg (Un), among the weights whose channels are still there."""
        options = self.options
        existing = coordinates(self.initial, client.kept)
        alive = {name: self.masks(client)[name] for name in self.linear}
        step, target, pruned = Fraction(options.prune_step), Fraction(options.target_rate), self.percent_pruned(client)
        early = self.without_smallest(after_first, alive, step)
        late = self.without_smallest(last, alive, step)
        shares = [
            Fraction(int((early[n] != late[n]).sum()), int(existing[n].sum()))  # of the weights that exist
            for n in self.linear
        ]
        if not sum(shares) / len(shares) > Fraction(options.fc_mask_distance):
            return "masks too close"
        if not pruned < target:
            return "target reached"
        word = "full step"
        if target - pruned < step:
            share = (target - pruned) / (100 - pruned) * 100
            word = "last step" if share <= 16 else "shortened step"
            late = self.without_smallest(last, alive, share if share <= 16 else share - 5)
        candidate = masked(client.tensors, coordinates(self.initial, client.kept, late))
        if not self.accurate_enough(candidate, data):
            return "not accurate enough"
        self.note_margins(last, alive, late)
        client.tensors, client.fc = candidate, late
        return word

    def perhaps_remove(self, client, early, late, data):
        """The channels: whatever the first gate said, and whatever is pruned already."""
        differing = sum(int((early[i] != late[i]).sum()) for i in late)
        total = sum(len(mask) for mask in late.values())
        if not Fraction(differing, total) > Fraction(self.options.channel_distance):
            return "floor reached" if all(map(self.at_floor, client.kept.values())) else "choices too close"
        candidate = masked(client.tensors, coordinates(self.initial, late, client.fc))
        if not self.accurate_enough(candidate, data):
            return "not accurate enough"
        self.note_margins({i: client.tensors[f"bn{i}.weight"] for i in late}, client.kept, late)
        client.tensors, client.kept = candidate, late
        return "removed"

    def accurate_enough(self, tensors, data):
        split = "test" if self.options.gate_split == "test" else "validation"
        accuracy = share_correct(tensors, getattr(data, f"{split}_images"), getattr(data, f"{split}_labels"))
        return accuracy is not None and 100 * accuracy > Fraction(self.options.accuracy_threshold)

    def percent_pruned(self, client):
        parameters = [name for name in self.initial if place_of(name)[2] not in STATISTICS]
        gone = sum(int((~self.masks(client)[name]).sum()) for name in parameters)
        return Fraction(100 * gone, sum(self.initial[name].numel() for name in parameters))

    # --- what to remove ---------------------------------------------------------------------------------------------

    def without_smallest(self, tensors, alive, percent):
        """Per tensor, drop what is strictly below the interpolated percentile of |w| over the kept, non-zero."""
        result = {}
        for name, mask in alive.items():
            size = tensors[name].abs()
            ordered = sorted(size[mask & (size > 0)].tolist())  # float32 values, exact as Python floats
            # The threshold is above the value at the place rounded down, and at most that at the place rounded up.
            place = math.ceil(percent / 100 * (len(ordered) - 1))
            result[name] = mask & (size >= ordered[place])
        return result

    def floor(self, size):
        return max(1, math.floor(Fraction(str(self.options.channel_floor)) * size))

    def at_floor(self, mask):
        return int(mask.sum()) <= self.floor(len(mask))

    def fewer_channels(self, tensors, kept):
        """Per norm: above the scale at place ⌊n · fraction⌋ of the n that are left, unless too few would be."""
        result = {}
        for i, mask in kept.items():
            scale = tensors[f"bn{i}.weight"].abs().tolist()
            left = [c for c, alive in enumerate(mask.tolist()) if alive]
            ordered = sorted(scale[c] for c in left)
            place = math.floor(Fraction(str(self.options.channel_fraction)) * len(left))
            above = [c for c in left if scale[c] > ordered[place]]
            stay = left if self.at_floor(mask) or len(above) < self.floor(len(mask)) else above
            result[i] = torch.tensor([c in stay for c in range(len(mask))])
        return result

    def note_margins(self, tensors, before, after):
        """How far apart the smallest that stays and the largest that goes are, per tensor, of what was adopted."""
        for name, mask in before.items():
            size = tensors[name].abs()
            went, stayed = size[mask & ~after[name]], size[mask & after[name]]
            if len(went) and len(stayed):
                self.outcome.margins.append(float(stayed.min() - went.max()))

    # --- the server -------------------------------------------------------------------------------------------------

    def mean_over_keepers(self, clients):
        """Per coordinate over those who keep it; that is everybody for a linear layer's bias."""
        result = {}
        for name, old in self.outcome.server.items():
            masks = torch.stack([self.masks(client)[name] for client in clients])
            total = torch.stack([client.tensors[name].double() for client in clients]).mul(masks).sum(0)
            keepers = masks.sum(0)
            result[name] = torch.where(keepers > 0, total / keepers.clamp(min=1), old.double()).float()
        return result

    def client_flops(self, k):
        """Three times a forward pass per example: two per multiply-add, by the sizes of the small network."""
        client = self.clients[k]
        side, inputs, forward = self.side, 1, 0
        for _, mask in sorted(client.kept.items()):
            side = side - KERNEL + 1
            forward += 2 * KERNEL**2 * inputs * int(mask.sum()) * side**2
            side, inputs = side // 2, int(mask.sum())
        masks = self.masks(client)
        forward += sum(2 * int(masks[name].sum()) for name in self.linear)
        return 3 * forward * len(self.data[k].train_labels) * self.config.local_epochs


def federation(config, num_clients):
    """Sub-FedAvg (Hy), as ``config`` says."""
    return Federation(config, num_clients).run()
