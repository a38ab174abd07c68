"""A server's public images come in the shape of the clients' images."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.core.rng import numpy_generator
from fedprune_app.data import partitions
from fedprune_app.data.dataset import Images, Labels
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.partitions import Indices

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what image libraries mean by grey


def public_dataset(
    name: str, data_dir: str, shape: tuple[int, int, int], samples: int, seed: int, download: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Return training images of a dataset as float32 (N, *shape), their labels (N,), and the number of classes.

    ``samples`` images are drawn with the label law of the dataset; 0 takes all images. The images are normalised by
    their own mean and standard deviation per channel. Raises ``ValueError`` as
    :func:`~fedprune_app.data.datasets.load_dataset`, and for more samples than there are.
    """
    dataset = load_dataset(name, data_dir, download)
    indices = some_of(dataset.train_labels, samples, seed)
    images = adapted(dataset.train_images[indices], shape)
    std, mean = torch.std_mean(images, dim=(0, 2, 3), keepdim=True, correction=0)
    images = images.sub_(mean).div_(std.clamp(min=1e-6))
    return images, torch.from_numpy(dataset.train_labels[indices]), dataset.num_classes


def some_of(labels: Labels, samples: int, seed: int) -> Indices:
    """Return sorted positions of ``samples`` labels with the label law of all, or of all labels for 0.

    ``ValueError`` for more samples than there are.
    """
    if samples > len(labels):
        raise ValueError(f"fedltp.public-samples is {samples}, allowed: at most {len(labels)}, which are public")
    rng = numpy_generator(seed, "public samples")
    return partitions.stratified_sample(labels, samples, rng) if samples else np.arange(len(labels))


def adapted(images: Images, shape: tuple[int, int, int]) -> Tensor:
    """Return uint8 images (N, C, H, W) as float32 (N, *shape) in [0, 1].

    * Grey comes from colours by luminance.
    * Colours come from grey by repeating it.
    * Sizes change by bilinear interpolation with antialiasing.
    """
    channels, *size = shape
    pixels = torch.from_numpy(np.ascontiguousarray(images)).float().div_(255)
    if pixels.shape[1] == 3 and channels == 1:
        pixels = torch.einsum("nchw,c->nhw", pixels, torch.tensor(_LUMA))[:, None]
    elif pixels.shape[1] == 1 and channels == 3:
        pixels = pixels.expand(-1, 3, -1, -1)
    if list(pixels.shape[2:]) != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
    return pixels.clamp(0, 1)
