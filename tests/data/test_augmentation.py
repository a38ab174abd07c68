"""Augmented batches: every image is a shifted, perhaps mirrored copy of its own, black where it came into view."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from fedprune_app.data.augmentation import CropFlip

BLACK = torch.tensor([-2.0, -3.0, -4.0])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def augmented(augment, positions, rng):
    return augment(augment.draws(positions, rng))


def pictures(count=3, channels=3, height=6, width=5):
    """Distinct positive values, so that a crop names its image and place, and black is no image's value."""
    return torch.arange(1.0, 1 + count * channels * height * width).view(count, channels, height, width)


def variants(image, black):
    """The slow reference: all 9 x 9 x 2 pictures that an image can become, by (down, right, mirrored)."""
    height, width = image.shape[1:]
    layers = [F.pad(layer, (4, 4, 4, 4), value=float(value)) for layer, value in zip(image, black, strict=True)]
    padded = torch.stack(layers)
    crops = {(y, x): padded[:, y : y + height, x : x + width] for y in range(9) for x in range(9)}
    return {
        (y, x, mirrored): crop.flip(2) if mirrored else crop
        for (y, x), crop in crops.items()
        for mirrored in (False, True)
    }


@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_of_a_batch_is_a_crop_of_its_own_padded_image(channels):
    images = pictures(channels=channels)
    augment, rng = CropFlip(images, BLACK[:channels]), generator()
    for positions in (torch.tensor([2, 0, 2, 1]), torch.tensor([1])):
        batch = augmented(augment, positions, rng)
        assert batch.shape == (len(positions), *images.shape[1:])
        for picture, position in zip(batch, positions, strict=True):
            allowed = variants(images[position], BLACK[:channels]).values()
            assert sum(torch.equal(picture, variant) for variant in allowed) == 1


def test_all_shifts_are_equally_likely_and_half_of_the_images_are_mirrored():
    images = pictures(count=1)
    batch = augmented(CropFlip(images, BLACK), torch.zeros(162 * 50, dtype=torch.int64), generator())
    where = {variant.numpy().tobytes(): place for place, variant in variants(images[0], BLACK).items()}
    drawn = Counter(where[picture.contiguous().numpy().tobytes()] for picture in batch)
    assert len(where) == len(drawn) == 162
    deviations = sum((count - 50) ** 2 / 50 for count in drawn.values())
    assert deviations < 161 + 5 * (2 * 161) ** 0.5  # chi-squared: mean 161, variance 322
    assert sum(drawn[place] for place in drawn if place[2]) == pytest.approx(162 * 25, rel=0.05)


def test_images_of_a_batch_are_changed_independently_of_each_other():
    images = pictures(count=1).expand(40, -1, -1, -1)
    batch = augmented(CropFlip(images, BLACK), torch.arange(40), generator())
    assert len({picture.contiguous().numpy().tobytes() for picture in batch}) > 25


def test_a_batch_is_a_function_of_its_generator_alone():
    images = pictures()
    augment, positions = CropFlip(images, BLACK), torch.arange(3)
    before = torch.get_rng_state()
    first, again, other = (augmented(augment, positions, generator(seed)) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_batch_is_new_memory_with_the_channels_last():
    images = pictures()
    augment = CropFlip(images, BLACK)
    batch = augmented(augment, torch.arange(3), generator())
    assert batch.is_contiguous(memory_format=torch.channels_last)
    batch.zero_()
    assert torch.equal(images, pictures())
    assert augmented(augment, torch.arange(3), generator()).count_nonzero() > 0


@pytest.mark.gpu
def test_a_seed_gives_the_same_batch_on_every_device():
    images, positions = pictures(), torch.tensor([2, 0, 1])
    expected = augmented(CropFlip(images, BLACK), positions, generator())
    augment = CropFlip(images.to("cuda"), BLACK)
    batch = augment(augment.draws(positions, generator()).to("cuda"))
    assert batch.is_cuda
    assert torch.equal(batch.cpu(), expected)
