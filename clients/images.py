"""A client's images, and the properties that it reports of them."""

import logging

import numpy as np
import torch
from torch import Tensor

from clients.context import NodeContext
from clients.node import ReplyFields
from clients.privacy import split_secret
from fedprune_app.config import Config
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.data.augmentation import CropFlip
from fedprune_app.data.names import OWNERS
from fedprune_app.data.splits import (
    client_data,
    data_config,
    dataset_of,
    group_numbers,
    label_counts,
    part_sizes,
    record_digests,
    unread,
)
from fedprune_app.engine.simulated_grid import is_simulated

log = logging.getLogger("flwr.fedprune")

# with privacy, label counts are secret, and the others may follow from the images
_OF_THE_DATA = frozenset(
    {
        *("labels-train", "labels-validation", "labels-test"),
        *("normalisation-mean", "normalisation-std", "data-sha256"),
    }
)
_OF_THE_SHAPE = frozenset({"image-shape", "num-classes", "classes", "data-dir", "features", "features-digest", "owner"})
PARTS_DRAWN = 2  # version of the procedure by which a node's secret draws the parts of its data
SAID_OF_IMAGES = ReplyFields(registration=_OF_THE_SHAPE | _OF_THE_DATA, withheld_when_private=_OF_THE_DATA)


class Images:
    """A client's part of a ``dataset`` of images or table rows: ``data`` for training, validation and test.

    ``sizes`` are the public numbers of examples by part, or of groups if groups are protected. ``groups`` then has by
    part each example's group.
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
        """Report the shape of the client's images, its label counts, and the names of classes.

        For a dealt table the columns' names are reported, for a client's own only their digest. The normalisation and a
        digest of all data are reported for dealt data only, where all clients have the same.
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
            for line in unread(self.data_config):
                log.warning("%s", line)
        elif self.config.partition == OWNERS and dataset.owner_names and is_simulated():
            fields["owner"] = dataset.owner_names[self.context.client_id]  # names of people do not leave a node
        if not is_private:
            counts = label_counts(self.data_config, *self.context.share)
            fields |= {f"labels-{part}": [int(n) for n in values] for part, values in counts.items()}
        if not (is_private or is_own):
            fields |= {f"normalisation-{name}": values for name, values in self._normalisation().items()}
            fields["data-sha256"] = dataset_of(self.data_config).content_sha256
        return fields

    def properties_to_keep(self) -> ValueDict:
        """Return the normalisation of images and the columns of a table, which an export needs, and what must stay."""
        features = {"features": list(self.dataset.features)} if self.dataset.features else {}
        drawn = {"parts-drawn": PARTS_DRAWN} if self.data_config.split_secret else {}
        own = {"data-sha256": self.dataset.content_sha256} if self.context.has_own_data else {}
        return {"normalisation": self._normalisation(), **features, **drawn, **own}

    def check_parts(self, meta: Values) -> None:
        """Raise ``ValueError`` for a state of other parts that the node's secret drew."""
        if meta and self.data_config.split_secret and meta.get("parts-drawn") != PARTS_DRAWN:
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
