"""The images that a client learns from, and what it says of them."""

import numpy as np
import torch
from torch import Tensor

from clients.context import NodeContext
from clients.node import ReplyFields
from clients.privacy import split_secret
from fedprune_app.config import Config
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.data.augmentation import CropFlip
from fedprune_app.data.splits import (
    client_data,
    data_config,
    dataset_of,
    group_numbers,
    label_counts,
    part_sizes,
    record_digests,
)

# how many of which class is nobody's business with privacy, and the others may follow from the images
_OF_THE_DATA = frozenset(
    {
        *("labels-train", "labels-validation", "labels-test"),
        *("normalisation-mean", "normalisation-std", "data-sha256"),
    }
)
_OF_THE_SHAPE = frozenset({"image-shape", "num-classes", "classes", "data-dir", "features", "features-digest"})
PARTS_DRAWN = 2  # the version of the way in which a node's secret draws the parts of its data
SAID_OF_IMAGES = ReplyFields(registration=_OF_THE_SHAPE | _OF_THE_DATA, withheld_when_private=_OF_THE_DATA)


class Images:
    """A client's part of a ``dataset`` of images or of rows of a table: ``data`` to train, decide and test on.

    ``sizes`` are how many examples count as being in each part, or groups where these are protected. ``groups`` then
    say by part to which group each example belongs.
    """

    def __init__(self, config: Config, context: NodeContext, device: torch.device) -> None:
        self.config, self.context = config, context
        self.data_config = data_config(config, context.has_own_data, split_secret(config, context))
        self.dataset = dataset_of(self.data_config, context.share[1])
        self.data = client_data(self.data_config, *context.share, device)
        self.sizes = part_sizes(self.data_config, *context.share)
        self.groups = group_numbers(self.data_config, *context.share)

    def record_digests(self) -> list[bytes]:
        return record_digests(self.data_config, *self.context.share)

    def registration(self) -> ValueDict:
        """Tell the shape of the client's images and its label counts, and the classes if they have names.

        The columns of a dealt table are told, too. Of a client's own table only a digest of their names is told. How
        images are normalised, and a digest of all data, is told of dealt data, of which all clients have the same. For
        a client's own images this stays with the client.
        """
        dataset, is_own, is_private = self.dataset, self.context.has_own_data, self.config.dp.enabled
        fields: ValueDict = {"image-shape": list(dataset.image_shape), "num-classes": dataset.num_classes}
        classes = list(dataset.classes)
        if is_own or classes != [str(number) for number in range(len(classes))]:
            fields["classes"] = classes
        if dataset.features and is_own:
            fields["features-digest"] = dataset.features_digest
        elif dataset.features:
            fields["features"] = list(dataset.features)
        if is_own:
            fields["data-dir"] = self.config.data_dir
        if not is_private:
            counts = label_counts(self.data_config, *self.context.share)
            fields |= {f"labels-{part}": [int(n) for n in values] for part, values in counts.items()}
        if not (is_private or is_own):
            fields |= {f"normalisation-{name}": values for name, values in self._normalisation().items()}
            fields["data-sha256"] = dataset_of(self.data_config).content_sha256
        return fields

    def properties_to_keep(self) -> ValueDict:
        """Return what an export of the client's model tells of the data, which may have changed by then.

        This is how images were normalised, and the columns of a table.
        """
        features = {"features": list(self.dataset.features)} if self.dataset.features else {}
        drawn = {"parts-drawn": PARTS_DRAWN} if self.data_config.split_secret else {}
        return {"normalisation": self._normalisation(), **features, **drawn}

    def check_kept(self, meta: Values) -> None:
        """Raise ``ValueError`` for a state from when a secret drew other parts of the data."""
        if self.data_config.split_secret and meta.get("parts-drawn") != PARTS_DRAWN:
            raise ValueError(
                "the run began with a version that drew other parts of a node's own data, allowed with dp.enabled: a "
                "new run"
            )

    def _normalisation(self) -> dict[str, list[float]]:
        depth, dataset = self.dataset.image_shape[0], self.dataset
        constants = {"mean": dataset.mean, "std": dataset.std}
        return {name: np.broadcast_to(np.asarray(values, float), depth).tolist() for name, values in constants.items()}

    def augmentation(self, images: Tensor) -> CropFlip | None:
        if self.config.augmentation == "none":
            return None
        black = torch.tensor([-mean / std for mean, std in zip(self.dataset.mean, self.dataset.std, strict=True)])
        return CropFlip(images, black)
