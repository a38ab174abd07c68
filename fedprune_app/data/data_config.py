"""What of a run's configuration decides which client has which examples."""

from dataclasses import dataclass, field

from fedprune_app.config import Config, class_names


@dataclass(frozen=True)
class DataConfig:
    """A data configuration says which data is dealt, and how.

    A field is the key of the run configuration with underscores: ``shard_size`` is ``shard-size``.

    * ``samples_per_client``: only this number times clients of samples are dealt out, drawn with the label law of the
      whole. All clients get as many unless the partition makes volumes unequal. 0 deals out everything.
    * ``dirichlet_groups``: ``num_groups`` of :func:`~fedprune_app.data.partitions.dirichlet_client`.
    * ``public_share``: this share of the training images is dealt to no client: :func:`public_part`.
    * ``test_samples``: with ``test_split="proportional"`` a client is tested on this many images, or a few more,
      because the number of each label is rounded up.
    * ``is_own``: the folder is one client's alone, and this client takes all of it. Nothing is dealt, and the client is
      number 0 of 1. Its test data is the folder's. Where the folder has none, it is ``test_fraction`` of the images.
    * ``classes``, ``image_size``, ``image_fit`` and the columns: see :class:`~fedprune_app.data.Form`.
    * ``private``: each image is inside a promise of privacy. So nothing that is done with one image follows from the
      others: an image folder is not normalised by its own statistics, and each image's part is drawn by itself.
    * ``split_secret``: each image's part is drawn by this secret in place of the ``seed``, where it is not empty. The
      server knows the seed: from how many images are in a part it could find out which images there are.
    """

    dataset: str = "digits"
    data_dir: str = ""
    download: bool = False
    partition: str = "shards"
    shard_size: int = 0
    shards_per_client: int = 2
    classes_per_client: int = 2
    class_assignment: str = "cyclic"
    dirichlet_alpha: float = 0.3
    dirichlet_groups: int = 0
    samples_per_client: int = 0
    validation_fraction: float = 0.1
    test_split: str = "labels"
    test_samples: int = 100
    test_fraction: float = 0.3
    public_share: float = 0.0
    image_size: int = 0
    image_fit: str = "crop"
    label_column: str = "label"
    image_column: str = "image"
    owner_column: str = ""
    ignore_columns: str = ""
    seed: int = 0
    classes: tuple[str, ...] = ()
    is_own: bool = False
    private: bool = False
    split_secret: str = field(default="", repr=False)


def data_config(config: Config, is_own: bool = False, split_secret: str = "") -> DataConfig:
    names = set(DataConfig.__dataclass_fields__) - {"is_own", "classes", "private", "split_secret"}
    fields = {name: getattr(config, name) for name in names}
    classes = class_names(config.classes)
    return DataConfig(is_own=is_own, classes=classes, private=config.dp.enabled, split_secret=split_secret, **fields)
