"""The training, validation and test data of each client, all of one label distribution.

Data that are dealt without ``private`` are split by label: each part has the client's shares of the labels. A client's
own data, and data dealt with ``private``, are split record by record: see :func:`_draw_mask`. If examples have groups,
a group is in one part only, drawn by the group's name.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprune_app.config import Config, class_names
from fedprune_app.config.common import PUBLISHED
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import listed
from fedprune_app.core.named import TensorDict
from fedprune_app.core.rng import numpy_generator
from fedprune_app.data import datasets, partitions, plugin_datasets
from fedprune_app.data.dataset import Dataset, Labels, Scale, measured_scale, text_of
from fedprune_app.data.datasets import load_dataset
from fedprune_app.data.names import DEALERS, LOADERS, OWNERS
from fedprune_app.data.partitions import Indices


@dataclass(frozen=True)
class DataConfig:
    """Which data are dealt to clients, and how.

    A field is the key of the run configuration with underscores: ``shard_size`` is ``shard-size``.

    * ``samples_per_client``: deal only this number times clients of samples, drawn with the overall label distribution.
      All clients have equally many unless the partition makes volumes unequal. 0 deals all.
    * ``dirichlet_groups``: ``num_groups`` of :func:`~fedprune_app.data.partitions.dirichlet_client`.
    * ``public_share``: this share of the training images is dealt to no client: :func:`public_part`.
    * ``test_samples``: with ``test_split="proportional"`` a client is tested on this many images, or a few more,
      because the number of each label is rounded up.
    * ``is_own``: the folder holds one client's data, and this client, number 0 of 1, uses all of it. Nothing is dealt.
      Its test data are the folder's, or ``test_fraction`` of the images if the folder has none.
    * ``classes``, ``image_size``, ``image_fit`` and the columns: see :class:`~fedprune_app.data.dataset.Form`.
    * ``by_group``: privacy protects all examples of a group together, so groups are counted.
    * ``private``: privacy protects each image. So no operation on one image may depend on the others: an image folder
      is not normalised by its own statistics, and each image's part is drawn separately.
    * ``split_secret``: if not empty, each record's part is drawn by this secret instead of the ``seed``, from the
      record as it is stored, independent of the run's settings. The server knows the seed and chooses the run: from the
      number of records in a part it could infer which records exist. See also :func:`part_sizes`.
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
    group_column: str = ""
    ignore_columns: str = ""
    seed: int = 0
    classes: tuple[str, ...] = ()
    is_own: bool = False
    private: bool = False
    by_group: bool = False
    split_secret: str = field(default="", repr=False)


def data_config(config: Config, is_own: bool = False, split_secret: str = "") -> DataConfig:
    names = set(DataConfig.__dataclass_fields__) - {"is_own", "classes", "private", "by_group", "split_secret"}
    fields = {name: getattr(config, name) for name in names}
    classes, is_private = class_names(config.classes), config.dp.enabled
    by_group = is_private and config.dp.unit == "group"
    return DataConfig(
        is_own=is_own, classes=classes, private=is_private, by_group=by_group, split_secret=split_secret, **fields
    )


# --- examples of each client ------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def _is_missing(name: object) -> bool:
    return not isinstance(name, str) and str(name) in ("None", "nan", "NaT", "<NA>")


class Pool:
    """A dataset's training set followed by its test set, under one index, without copies of the images."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.labels: Labels = np.concatenate([dataset.train_labels, dataset.test_labels])
        self.num_train = len(dataset.train_labels)
        self.groups: list[str] = []  # by index; empty if the dataset has no groups
        if dataset.groups is not None:
            test_groups = [""] * len(dataset.test_labels) if dataset.test_groups is None else dataset.test_groups
            names = (*dataset.groups, *test_groups)
            self.groups = ["" if _is_missing(name) else text_of(name) for name in names]
        self._numbered: list[bytes] | None = None

    def images(self, indices: Indices, device: torch.device = CPU, scale: Scale | None = None) -> Tensor:
        """Return images at sorted indices: float32 (N, C, H, W), scaled to [0, 1], then normalised.

        Numbers of a table are normalised in float64: float32 cannot resolve a time in seconds. ``scale`` is the mean
        and the deviation per channel, by default the dataset's.
        """
        train, test = np.split(indices, [np.searchsorted(indices, self.num_train)])
        parts = (self.dataset.train_images, train), (self.dataset.test_images, test - self.num_train)
        pixels = torch.from_numpy(np.concatenate([images[positions] for images, positions in parts])).to(device)
        constants = scale or (self.dataset.mean, self.dataset.std)
        # float32 and float64 numbers are not copied again: `pixels` is a copy
        values = pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels
        mean, std = (torch.tensor(constant, dtype=values.dtype, device=device).view(-1, 1, 1) for constant in constants)
        return values.sub_(mean).div_(std).float()

    def digests(self, indices: Indices, *, for_ledgers: bool = False) -> list[bytes]:
        """Return the SHA-256 digests of the images at these indices, each of that image alone.

        They take 0.25 s for 2,000 images of 224 x 224 pixels in colour, on one core. A grey image has the same digest
        with one channel as with three. ``for_ledgers`` digests a table's numbers as float32, as ledgers of earlier
        versions do.
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

    def record_digests(self, indices: Indices) -> list[bytes]:
        """Return distinct digests of the records at these indices as they are stored.

        Each is of the record and of the number of equal ones before it, in its group. Examples of a plug-in are
        digested as loaded.
        """
        if self._numbered is None:
            stored = self.dataset.stored
            records = stored() if stored else self.digests(np.arange(len(self.labels)))
            counts: Counter[bytes] = Counter()
            self._numbered = []
            groups = self._names(np.arange(len(self.labels)))
            for record, label, group in zip(records, self.labels.tolist(), groups, strict=True):
                content = record if stored else record + f" {label}".encode()
                if group:
                    content += f" of {group}".encode()
                self._numbered.append(hashlib.sha256(content + f" {counts[content]}".encode()).digest())
                counts[content] += 1
        return [self._numbered[i] for i in indices.tolist()]

    def drawn_by(self, indices: Indices, digests: Sequence[bytes]) -> list[bytes]:
        """Return the bytes that draw each example's part: of its group's name, or else its own digest."""
        drawn = list(digests)
        for place, name in enumerate(self._names(indices)):
            if name:
                drawn[place] = hashlib.sha256(f"group {name}".encode()).digest()
        return drawn

    def group_numbers(self, indices: Indices) -> NDArray[np.int64]:
        """Return the group of each example as a number, from 0 on in the order of the groups' first examples."""
        numbers: dict[str | int, int] = {}
        found = np.empty(len(indices), dtype=np.int64)
        for place, name in enumerate(self._names(indices)):
            key = name or int(indices[place])
            found[place] = numbers.setdefault(key, len(numbers))
        return found

    def without_groups_of(self, indices: Indices, others: Indices) -> Indices:
        """Return those ``indices`` whose group has no example among ``others``."""
        if not self.groups:
            return indices
        names = {*self._names(others)} - {""}
        is_other = [name not in names for name in self._names(indices)]
        kept: Indices = indices[np.array(is_other, dtype=bool)]
        return kept

    def _names(self, indices: Indices) -> list[str]:
        """Return the name of each example's group, empty for an example without group."""
        return [self.groups[i] for i in indices.tolist()] if self.groups else [""] * len(indices)


@dataclass(frozen=True, eq=False)
class ClientData:
    """A client's images, float32 (N, C, H, W), normalised by the dataset's mean and std, and labels, int64 (N,).

    Validation (and so decisions) never overlaps training. Validation is empty if its share is 0 or the client has a
    single sample.
    """

    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def num_examples(self) -> int:
        return len(self.train_labels)


def dataset_of(config: DataConfig, num_clients: int = 0) -> Dataset:
    """Return the dataset that is dealt, or that a client owns.

    With ``num_clients`` the mean and the deviation are those with which these clients normalise their images.
    """
    dataset = _pool(config).dataset
    if not num_clients:
        return dataset
    mean, std = _scale(config, num_clients)
    return replace(dataset, mean=mean, std=std)


def owner_names(config: Config) -> dict[str, str]:
    """Return the names of the clients by their numbers as texts; none where the data are not dealt by owner."""
    names = _pool(data_config(config)).dataset.owner_names if config.partition == OWNERS else ()
    return {str(number): name for number, name in enumerate(names)}


def unread(config: DataConfig) -> list[str]:
    """Return notes for the user on data that are not read, have no owner or no group, or are in a part to test on."""
    data = _pool(config).dataset
    owners = np.zeros(0) if data.owners is None else data.owners
    deals_tests = config.test_split == "holdout" and not config.is_own and config.dataset not in PUBLISHED
    test_owners = np.zeros(0) if data.test_owners is None else data.test_owners
    num_dealt = len(data.test_labels) - np.count_nonzero(test_owners < 0) if deals_tests else 0
    counts = {
        "training examples are nobody's; partition 'owners' leaves them out": int((owners < 0).sum()),
        "examples have no group: each is a group of its own": _pool(config).groups.count(""),
        "examples of the test part are dealt to clients too, since test-split is 'holdout'": num_dealt,
    }
    return [*data.notes, *(f"{count:,} {line}" for line, count in counts.items() if count)]


def check_repeatable(config: DataConfig, num_clients: int) -> None:
    """Raise ``ValueError`` if a plug-in loads or deals different data each time: each process does both by itself."""
    if config.dataset in LOADERS:
        content = _pool(config).dataset.content_sha256
        datasets.clear_cache()
        _pool.cache_clear()
        if _pool(config).dataset.content_sha256 != content:
            raise ValueError(
                f"dataset '{config.dataset}' is another one each time that it is loaded, allowed: one that draws by "
                "the global generators of torch, numpy and random alone, which have a seed here"
            )
    if config.partition not in DEALERS or config.is_own:
        return
    first, second = partition_indices(config, num_clients), partition_indices.__wrapped__(config, num_clients)
    if not all(map(np.array_equal, first, second)):
        raise ValueError(
            f"partition '{config.partition}' deals other data each time, allowed: a function that draws by the "
            "generator that it is given"
        )


@lru_cache(maxsize=2)
def client_data(config: DataConfig, partition_id: int, num_clients: int, device: torch.device = CPU) -> ClientData:
    """Return the data of client ``partition_id`` in [0, num_clients), a function of the arguments alone.

    Images are on the ``device``, labels on the CPU. Tensors are created when first read, and a process keeps those of
    its last two clients only.
    """
    pool, indices = _pool(config), _split_indices(config, partition_id, num_clients)
    scale = _scale(config, num_clients)

    def read(name: str) -> Tensor:
        part, _, kind = name.partition("_")
        if kind == "labels":
            return torch.from_numpy(pool.labels[indices[part]])
        return pool.images(indices[part], device, scale)

    return _StoredClientData(read)


def public_part(config: DataConfig) -> tuple[Tensor, Tensor]:
    """Return the training images that no client has, and their labels.

    They are normalised, float32, as the clients' images are.
    """
    pool, indices = _pool(config), _public_indices(config)
    return pool.images(indices), torch.from_numpy(pool.labels[indices])


def record_digests(config: DataConfig, partition_id: int, num_clients: int) -> list[bytes]:
    """Return the sorted SHA-256 digests of all images that the client has, in any part.

    They do not depend on names or order of files, nor on labels. Test images in a client's own folder are included;
    test images that dealt data share with other clients are not.
    """
    pool, indices = _pool(config), partition_indices(config, num_clients)[partition_id]
    if config.is_own:
        indices = np.arange(len(pool.labels))
    return sorted(pool.digests(indices, for_ledgers=True))


def digests(config: DataConfig) -> tuple[list[bytes], list[bytes]]:
    pool = _pool(config)
    hashes = pool.digests(np.arange(len(pool.labels)))
    return hashes[: pool.num_train], hashes[pool.num_train :]


def label_counts(config: DataConfig, partition_id: int, num_clients: int) -> dict[str, list[int]]:
    """Return how many samples of each label are in the client's "train", "validation" and "test" data."""
    pool = _pool(config)
    return {
        part: np.bincount(pool.labels[indices], minlength=pool.dataset.num_classes).tolist()
        for part, indices in _split_indices(config, partition_id, num_clients).items()
    }


def part_sizes(config: DataConfig, partition_id: int, num_clients: int) -> dict[str, int]:
    """Return how many examples count as being in each part, for every reported number and every divisor.

    With ``by_group`` groups are counted. If a secret draws the parts, this is a plan from the number of all examples or
    groups, and blanks fill up a smaller part. Otherwise it is the actual number.
    """
    pool = _pool(config)

    def count(indices: Indices) -> int:
        return int(pool.group_numbers(indices).max(initial=-1)) + 1 if config.by_group else len(indices)

    if not config.split_secret:
        return {part: count(indices) for part, indices in _split_indices(config, partition_id, num_clients).items()}
    num_train, holds_out = count(np.arange(pool.num_train)), _holds_out_tests(config)
    test = round(config.test_fraction * num_train) if holds_out else count(_own_tests(pool))
    rest = num_train - (test if holds_out else 0)
    validation = round(config.validation_fraction * rest)
    return {"train": max(rest - validation, 1), "validation": validation, "test": test}


def group_numbers(config: DataConfig, partition_id: int, num_clients: int) -> TensorDict:
    """Return, by part, the group of each of the client's examples as a number from 0 on; empty unless by group."""
    if not config.by_group:
        return {}
    pool, parts = _pool(config), _split_indices(config, partition_id, num_clients)
    return {part: torch.from_numpy(pool.group_numbers(indices)) for part, indices in parts.items()}


def clear_cache() -> None:
    """Drop all cached data, because a plug-in loads or deals other data under their names."""
    datasets.clear_cache()
    for cached_function in (client_data, _pool, partition_indices, _split_indices, _scale):
        cached_function.cache_clear()


class _StoredClientData(ClientData):
    """Client data whose tensors are created when first read: training never builds the test images."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        vars(self)["_read"] = read  # the class is frozen

    def __getattr__(self, name: str) -> Tensor:
        if name not in ClientData.__dataclass_fields__:
            raise AttributeError(name)
        tensor: Tensor = vars(self)["_read"](name)
        vars(self)[name] = tensor
        return tensor


@lru_cache(maxsize=2)
def _pool(config: DataConfig) -> Pool:
    needs_test = not config.is_own and config.test_split != "holdout"
    pool = Pool(
        load_dataset(
            config.dataset,
            config.data_dir,
            config.download,
            public_scale=config.private,
            classes=config.classes,
            needs_test=needs_test,
            image_size=config.image_size,
            image_fit=config.image_fit,
            by_owner=config.partition == OWNERS and not config.is_own,
            label_column=config.label_column,
            image_column=config.image_column,
            owner_column=config.owner_column,
            group_column=config.group_column,
            ignore_columns=listed(config.ignore_columns),
        )
    )
    if config.by_group and not pool.groups:
        raise ConfigError(
            "dp.unit", "group", "'example'", condition="with these data", hint="they have no groups of examples"
        )
    has_own_tests = len(pool.dataset.test_labels) and (config.is_own or config.test_split != "holdout")
    if config.private and pool.groups and not config.by_group and has_own_tests:
        raise ConfigError(
            "dp.unit",
            "example",
            "'group'",
            condition="with these data",
            hint="test examples of a group that is trained on are left out, so one example would move others",
        )
    return pool


@lru_cache(maxsize=4)
def partition_indices(config: DataConfig, num_clients: int) -> tuple[Indices, ...]:
    """Return, per client, the sorted indices of its samples in the training set, validation share included.

    With ``test_split="holdout"`` indices run over the training set followed by the test set, and the client's
    test share is included.
    """
    pool = _pool(config)
    if config.is_own:
        return (np.arange(len(pool.dataset.train_labels)),)
    labels = pool.labels if config.test_split == "holdout" else pool.dataset.train_labels
    indices = _indices_to_deal(labels, config, num_clients)
    labels = labels[indices]
    if not 1 <= num_clients <= len(labels):
        raise ValueError(f"clients is {num_clients}, allowed: 1 to {len(labels)} for {len(labels)} training samples")
    rng = numpy_generator(config.seed, "partition")
    match config.partition:
        case "iid":
            parts = partitions.iid(labels, num_clients, rng)
        case "shards":
            parts = partitions.shards(labels, num_clients, config.shards_per_client, config.shard_size, rng)
        case "classes":
            parts = partitions.classes(labels, num_clients, config.classes_per_client, rng, config.class_assignment)
        case "owners":
            parts = _owner_parts(config, pool.dataset, indices, num_clients)
        case "dirichlet-class":
            parts = partitions.dirichlet_class(labels, num_clients, config.dirichlet_alpha, rng)
        case name if name in DEALERS:
            parts = plugin_datasets.dealt(name, DEALERS[name], labels, num_clients, rng)
        case _:
            alpha, num_groups = config.dirichlet_alpha, config.dirichlet_groups
            parts = partitions.dirichlet_client(labels, num_clients, alpha, rng, num_groups)
    return tuple(indices[part] for part in parts)


def _owner_parts(config: DataConfig, dataset: Dataset, indices: Indices, num_clients: int) -> list[Indices]:
    """Return each client's positions in ``indices``: client k has the examples of the k-th owner."""
    owners = dataset.owners
    if owners is None:
        raise ValueError(
            f"partition is '{OWNERS}', allowed with dataset '{config.dataset}': another rule; it does not say whose "
            "each example is"
        )
    count = int(owners.max(initial=-1)) + 1
    if count != num_clients:
        raise ConfigError("--clients", num_clients, str(count), condition=f"with partition '{OWNERS}' and these data")
    owner_numbers = np.full(len(dataset.train_labels) + len(dataset.test_labels), -1)
    owner_numbers[: len(owners)] = owners
    if dataset.test_owners is not None:  # else the test examples have no owner
        owner_numbers[len(owners) :] = dataset.test_owners
    return [np.flatnonzero(owner_numbers[indices] == owner) for owner in range(count)]


def _indices_to_deal(labels: Labels, config: DataConfig, num_clients: int) -> Indices:
    """Return the sorted indices of the samples to deal: all, or ``samples_per_client`` times clients.

    Public samples, and others of their groups, are excluded.
    """
    public = _public_indices(config)
    private = np.setdiff1d(np.arange(len(labels)), public, assume_unique=True)
    private = _pool(config).without_groups_of(private, public)
    if not config.samples_per_client:
        return private
    size = config.samples_per_client * num_clients
    if size > len(private):
        raise ValueError(
            f"samples-per-client is {config.samples_per_client}, allowed: at most {len(private) // num_clients} for "
            f"{num_clients} clients and {len(private)} samples"
        )
    return private[partitions.stratified_sample(labels[private], size, numpy_generator(config.seed, "samples dealt"))]


def _public_indices(config: DataConfig) -> Indices:
    labels = _pool(config).dataset.train_labels
    rng = numpy_generator(config.seed, "public split")
    return partitions.stratified_holdout(labels, config.public_share, rng)[1]


@lru_cache(maxsize=256)
def _split_indices(config: DataConfig, partition_id: int, num_clients: int) -> dict[str, Indices]:
    """Return part → sorted indices into the pool; the key test-split defines the test part.

    Raises ``ValueError`` if no example is left for training.
    """
    shares = partition_indices(config, num_clients)
    if not 0 <= partition_id < num_clients:
        raise ValueError(f"partition is {partition_id}, allowed: 0 to {num_clients - 1}")
    pool, indices = _pool(config), shares[partition_id]
    if config.is_own and len(pool.dataset.test_labels):
        test = _own_tests(pool)
    elif _holds_out_tests(config):
        indices, test = _hold_out(indices, config.test_fraction, "test split", config, partition_id)
    else:
        counts = np.bincount(pool.labels[indices], minlength=pool.dataset.num_classes)
        available = np.bincount(pool.dataset.test_labels, minlength=len(counts))
        if config.test_split == "labels":
            test_counts = np.where(counts > 0, available, 0)
        else:  # whole-number ceiling: 100 · 3/10 in floats can be 30.000000000000004
            test_counts = np.minimum(-(-counts * config.test_samples // len(indices)), available)
        test_rng = numpy_generator(config.seed, "test split", partition_id)
        test_parts = partitions.take_per_label(pool.dataset.test_labels, test_counts, test_rng)
        test = np.sort(np.concatenate(test_parts)) + pool.num_train
        test = pool.without_groups_of(test, np.arange(pool.num_train))  # nor may another client train on them
    train, validation = _hold_out(indices, config.validation_fraction, "validation split", config, partition_id)
    if not len(train) and not config.split_secret:
        raise ValueError(
            f"client {partition_id} has {len(shares[partition_id])} examples, and none of them is for training, "
            "allowed: at least one (more data for each client, or a smaller validation-fraction or test-fraction)"
        )
    return {"train": train, "validation": validation, "test": test}


def _own_tests(pool: Pool) -> Indices:
    return pool.without_groups_of(np.arange(pool.num_train, len(pool.labels)), np.arange(pool.num_train))


def _holds_out_tests(config: DataConfig) -> bool:
    if config.is_own:
        return not len(_pool(config).dataset.test_labels)
    return config.test_split == "holdout"


@lru_cache(maxsize=4)
def _scale(config: DataConfig, num_clients: int) -> Scale:
    """Return the mean and the deviation per channel with which all clients normalise.

    They are published constants, or measured. Examples held out for a client's test are excluded from the measurement.
    """
    pool = _pool(config)
    data = pool.dataset
    if not (data.is_measured and _holds_out_tests(config)):
        return data.mean, data.std
    shares = enumerate(partition_indices(config, num_clients))
    train_parts = [
        _hold_out(indices, config.test_fraction, "test split", config, client)[0] for client, indices in shares
    ]
    train, test = np.split(indices := np.sort(np.concatenate(train_parts)), [np.searchsorted(indices, pool.num_train)])
    if not len(indices):  # no example is left for training, which raises for each client
        return data.mean, data.std
    return measured_scale((data.train_images, train), (data.test_images, test - pool.num_train))


def _hold_out(
    indices: Indices, share: float, use: str, config: DataConfig, partition_id: int
) -> tuple[Indices, Indices]:
    """Split the sorted ``indices`` into those kept and about ``share`` of them that are held out."""
    pool = _pool(config)
    if config.is_own or config.private or pool.groups:
        digests = pool.record_digests if config.split_secret else pool.digests
        held_out = _draw_mask(
            pool.drawn_by(indices, digests(indices)), share, f"{config.split_secret or config.seed}/{use}"
        )
        return indices[~held_out], indices[held_out]
    kept_positions, held_positions = partitions.stratified_holdout(
        pool.labels[indices], share, numpy_generator(config.seed, use, partition_id)
    )
    return indices[kept_positions], indices[held_positions]


def _draw_mask(digests: Sequence[bytes], share: float, key: str) -> NDArray[np.bool_]:
    """Return which records are drawn, each with probability ``share``, by a hash of the record alone under ``key``.

    Adding a record changes the draw of no other record, and equal digests are drawn together. The cost is balance: of n
    records share · n are drawn on average, with a standard deviation of √(n · share · (1 - share)), and so for each
    label. Of 100 images of a label 30 ± 4.5 are test images with a share of 0.3, where a split by label has exactly 30;
    over 10 labels of 100 images the rarest label has 23 on average, and the most frequent one 37.
    """
    secret = hashlib.sha256(key.encode()).digest()
    numbers = [int.from_bytes(hashlib.blake2b(digest, key=secret, digest_size=8).digest()) for digest in digests]
    return np.array(numbers, dtype=np.float64) / 2**64 < share
