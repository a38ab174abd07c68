"""Steps on a device apart from the CPU run ahead of it: nothing in a step waits for the device, or brings data there.

PyTorch's device ``meta`` stands for a GPU. Whatever needs a number from it raises an error, and copies to it are seen.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedprune_app.core.masks import random_masks
from fedprune_app.core.rng import generator
from fedprune_app.data.augmentation import CropFlip
from fedprune_app.learning import grouped
from fedprune_app.learning.device import fast_layout
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.learning.training import proximal
from fedprune_app.models.vision import build_model, prunable_names, state_tensors

META = torch.device("meta")
EPOCHS = 3


class Copies(TorchDispatchMode):
    """How many tensors are brought to the device within the block."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        inputs = [each for each in args if isinstance(each, torch.Tensor)]
        if isinstance(found, torch.Tensor) and found.is_meta and any(each.is_cpu and each.dim() for each in inputs):
            self.count += 1
        return found


def copies_of(num_images, model="lenet5", augmented=False, **how):
    """How many copies a training of some epochs takes; its end, where the loss is read, is the first to wait."""
    network = build_model(model, (3, 32, 32), 10, rng=generator(0, "model"))
    tensors, masks = state_tensors(network), None
    if how.pop("masked", False):
        shapes = {name: tensors[name].shape for name in prunable_names(network)}
        drawn = random_masks(shapes, dict.fromkeys(shapes, 0.5), generator(0, "masks"))
        masks = {name: mask.to(META) for name, mask in drawn.items()}
    if how.pop("pulled", False):
        how["adjust_gradients"] = proximal({name: tensor.to(META) for name, tensor in tensors.items()}, 0.1)
    images, labels = torch.zeros(num_images, 3, 32, 32, device=META), torch.zeros(num_images, dtype=torch.int64)
    augment = CropFlip(images, torch.zeros(3)) if augmented else None
    ended = []
    with Copies() as copies, pytest.raises(RuntimeError, match="meta"):
        train(
            network,
            images,
            labels,
            SGD(0.1, momentum=0.5, weight_decay=1e-4, batch_size=10, epochs=EPOCHS, max_grad_norm=1.0),
            rng=generator(0, "train"),
            masks=masks,
            augment=augment,
            after_epoch=ended.append,
            device=META,
            **how,
        )
    assert ended == list(range(EPOCHS))
    return copies.count


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [{}, {"masked": True}, {"augmented": True}, {"pulled": True}, {"frozen": ("conv1.weight",)}, {"model": "cnn-gn"}],
    ids=str,
)
def test_more_steps_are_no_more_copies_to_the_device(how, monkeypatch):
    monkeypatch.setattr(grouped, "_compare", lambda *_: None)  # this device has no values to compare
    few, many = copies_of(20, **how), copies_of(200, **how)
    assert 0 < few == many


@pytest.mark.full
@pytest.mark.parametrize(("device", "last"), [("cpu", True), (META, False)])
def test_channels_are_last_on_a_cpu_alone(device, last):
    network = build_model("vgg11-gn", (3, 32, 32), 10, rng=generator(0, "model")).to(device)
    with fast_layout(network, (3, 32, 32)):
        weights = [tensor for tensor in network.parameters() if tensor.dim() == 4 and tensor.shape[1] > 3]
        assert {weight.is_contiguous(memory_format=torch.channels_last) for weight in weights} == {last}
