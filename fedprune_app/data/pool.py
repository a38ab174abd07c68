"""A pool is a dataset under one index, from which the examples of clients are taken."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from fedprune_app.data.dataset import Dataset, Labels, Scale
from fedprune_app.data.partitions import Indices

CPU = torch.device("cpu")


class Pool:
    """A pool is a dataset's training set followed by its test set, under one index; nothing is copied but labels."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.labels: Labels = np.concatenate([dataset.train_labels, dataset.test_labels])
        self.num_train = len(dataset.train_labels)
        self._on_device: dict[torch.device, tuple[Tensor, ...] | None] = {}

    def images(self, indices: Indices, device: torch.device = CPU, scale: Scale | None = None) -> Tensor:
        """Return images at sorted indices: float32 (N, C, H, W), scaled to [0, 1], then normalised.

        Numbers of a table are normalised in float64: a time in seconds has no meaning in float32.
        ``scale`` has the mean and the deviation by channel; without it they are the dataset's.
        """
        train, test = np.split(indices, [np.searchsorted(indices, self.num_train)])
        parts = (self.dataset.train_images, train), (self.dataset.test_images, test - self.num_train)
        if (resident := self._resident(device)) is None:
            pixels = torch.from_numpy(np.concatenate([images[positions] for images, positions in parts])).to(device)
        else:
            indices_by_part = [torch.from_numpy(positions).to(device) for _, positions in parts]
            pixels = torch.cat(
                [images.index_select(0, positions) for images, positions in zip(resident, indices_by_part, strict=True)]
            )
        constants = scale or (self.dataset.mean, self.dataset.std)
        # float32 and float64 numbers are not copied again: `pixels` is a copy
        values = pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels
        mean, std = (torch.tensor(constant, dtype=values.dtype, device=device).view(-1, 1, 1) for constant in constants)
        return values.sub_(mean).div_(std).float()

    def _resident(self, device: torch.device) -> tuple[Tensor, ...] | None:
        """Return the pixels of all training and test images on a device that is not the CPU; None if there is no room.

        They are taken there once.
        """
        if device not in self._on_device:
            arrays = self.dataset.train_images, self.dataset.test_images
            fits = device != CPU and sum(array.nbytes for array in arrays) <= _room(device)
            self._on_device[device] = tuple(torch.tensor(array, device=device) for array in arrays) if fits else None
        return self._on_device[device]

    def digests(self, indices: Indices, *, for_ledgers: bool = False) -> list[bytes]:
        """Return the SHA-256 digests of the images at these indices, each of that image alone.

        They take 0.25 s for 2,000 images of 224 x 224 pixels in colour, on one core. A grey image has the same digest
        among grey images, which have one channel here, as among coloured ones, which have three. A ledger has the
        digests of a table's numbers as float32, as the ledgers of earlier versions have.
        """
        digests = []
        for i in indices.tolist():
            data, position = self.dataset, i - self.num_train
            image = data.train_images[i] if position < 0 else data.test_images[position]
            image = image[:1] if (image[1:] == image[:1]).all() else image
            if for_ledgers and image.dtype == np.float64:
                image = image.astype(np.float32)
            content = f"{image.shape} ".encode() + image.tobytes()
            digests.append(hashlib.sha256(content).digest())
        return digests


def _room(device: torch.device) -> float:
    """Return how many bytes of pixels a device may hold: a quarter of what is free on a GPU."""
    return torch.cuda.mem_get_info(device)[0] / 4 if device.type == "cuda" else math.inf
