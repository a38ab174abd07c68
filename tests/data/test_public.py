"""Public images in the private ones' shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedprune_app.core.rng import numpy_generator
from fedprune_app.data.datasets import adapted, public_dataset, some_of


def pictures(*shape):
    return numpy_generator(0, "pictures").integers(0, 256, shape).astype(np.uint8)


def test_colours_become_grey_by_their_luminance():
    images = pictures(5, 3, 8, 8)
    grey = adapted(images, (1, 8, 8))
    assert grey.shape == (5, 1, 8, 8)
    by_hand = (0.299 * images[:, 0] + 0.587 * images[:, 1] + 0.114 * images[:, 2]) / 255
    np.testing.assert_allclose(grey[:, 0].numpy(), by_hand, atol=1e-6)
    assert torch.equal(adapted(images[:, :1], (3, 8, 8))[:, 2], adapted(images[:, :1], (1, 8, 8))[:, 0])


@pytest.mark.parametrize(("given", "wanted"), [((3, 32, 32), (1, 28, 28)), ((1, 8, 8), (3, 32, 32))])
def test_images_get_the_size_that_is_asked_for_and_keep_their_brightness(given, wanted):
    images = pictures(4, *given)
    found = adapted(images, wanted)
    assert found.shape == (4, *wanted)
    assert found.dtype == torch.float32
    assert 0 <= float(found.min()) <= float(found.max()) <= 1
    flat = np.full((2, *given), 51, dtype=np.uint8)
    torch.testing.assert_close(adapted(flat, wanted), torch.full((2, *wanted), 0.2))
    assert float(found.mean()) == pytest.approx(float(adapted(images, (wanted[0], *given[1:])).mean()), abs=0.01)


def test_a_public_dataset_is_normalised_and_has_the_label_law_of_all():
    images, labels, num_classes = public_dataset("digits", "", (1, 28, 28), 500, seed=0)
    assert images.shape == (500, 1, 28, 28)
    assert num_classes == 10
    assert float(images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.std()) == pytest.approx(1, abs=1e-3)
    everything, all_labels, _ = public_dataset("digits", "", (1, 28, 28), 0, seed=0)
    assert len(everything) > 500
    shares = torch.bincount(all_labels) / len(all_labels)
    assert (torch.bincount(labels) - 500 * shares).abs().max() < 1


def test_a_sample_is_drawn_by_its_seed_and_has_no_image_twice():
    labels = np.repeat(np.arange(10), 30)
    chosen = some_of(labels, 100, seed=1)
    assert len(set(chosen.tolist())) == 100
    assert np.array_equal(chosen, some_of(labels, 100, seed=1))
    assert not np.array_equal(chosen, some_of(labels, 100, seed=2))
    assert np.array_equal(np.bincount(labels[chosen]), np.full(10, 10))
    assert np.array_equal(some_of(labels, 0, seed=1), np.arange(300))
    with pytest.raises(ValueError, match=r"fedltp\.public-samples is 301"):
        some_of(labels, 301, seed=1)
