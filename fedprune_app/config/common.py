"""The options without a table, which all systems share, and the base class of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, NoneOf, PathKind, execution_option, option

# The need of options that have an effect only in systems for images.
IMAGES: Needs = {"system": NoneOf(("fedspallm",))}

# Datasets with the same examples everywhere; the examples of all others depend on their data-dir.
PUBLISHED = frozenset(
    {"digits", "mnist", "fashion-mnist", "emnist-digits", "emnist-letters", "emnist-letters-10"}
    | {"cifar10", "cifar100", "tiny-imagenet", "stdlib"}
)

# The needs of options for data with named classes, columns, or pictures; a plug-in's data may have them.
_NAMED: Needs = {**IMAGES, "dataset": NoneOf(tuple(sorted(PUBLISHED)))}
_COLUMNS: Needs = {**IMAGES, "dataset": NoneOf((*_NAMED["dataset"], "image-folder"))}
_PICTURES: Needs = {**IMAGES, "dataset": NoneOf((*_NAMED["dataset"], "table"))}

# Keys that determine each client's data, besides the data-dir of a dataset that is not published.
DEALT_BY = (
    *("dataset", "classes", "label-column", "image-column", "owner-column", "group-column", "ignore-columns"),
    *("image-size", "image-fit"),
    *("partition", "shard-size", "shards-per-client", "classes-per-client", "class-assignment"),
    *("dirichlet-alpha", "dirichlet-groups", "samples-per-client", "public-fraction"),
    *("validation-fraction", "test-split", "test-samples", "test-fraction", "seed"),
)


@dataclass(frozen=True)
class CommonOptions:
    """Options of all systems, at the top of a configuration; field ``learning_rate`` is the key ``learning-rate``."""

    system: str = option("subfedavg", "The system that is run; `fedprune list` names all systems.")
    dataset: str = option(
        "digits",
        "The dataset; `fedprune list` names all datasets. A function of your own that loads one is 'module:function' "
        "or 'file.py:function'.",
        kind=PathKind.CODE,
    )
    data_dir: str = execution_option(
        "",
        "The folder that holds the data. Dataset 'digits' needs none.",
        kind=PathKind.FOLDER,
        needs={"dataset": NoneOf(("digits", "stdlib"))},
    )
    classes: str = option(
        "",
        "The classes of data of your own, in the order in which they are numbered: 'cat, dog'. Empty means every class "
        "that has a folder or a name, or every label.",
        needs=_NAMED,
    )
    label_column: str = option(
        "label",
        "The name of the column of labels. Where Hugging Face's data have no column 'label', their only column of "
        "class labels is taken.",
        needs=_COLUMNS,
    )
    image_column: str = option(
        "image",
        "The name of the column of images. Where Hugging Face's data have no column 'image', their only column of "
        "images is taken.",
        needs={**IMAGES, "dataset": NoneOf((*_COLUMNS["dataset"], "table"))},
    )
    owner_column: str = option(
        "",
        "The name of a table's column that says whose each row is, for partition 'owners'. Empty means that there is "
        "no such column.",
        needs={"dataset": ("table",)},
    )
    group_column: str = option(
        "",
        "The name of a table's column that says which rows belong together, such as those of one patient: no group is "
        "divided among training, validation and test data. A row with an empty cell is a group of its own.",
        needs={"dataset": ("table",)},
    )
    ignore_columns: str = option(
        "",
        "The names of a table's columns that are no features, such as a patient's number: 'id, name'.",
        needs={"dataset": ("table",)},
    )
    download: bool = execution_option(
        False,
        "If true, missing files are fetched: a torchvision dataset into data-dir, a model from the Hugging Face hub.",
        needs={"dataset": NoneOf(("digits", "image-folder", "table", "huggingface"))},
    )
    partition: str = option(
        "shards",
        "The rule that deals the training data to the clients; `fedprune list` names all rules. A function of your own "
        "is named as for dataset.",
        kind=PathKind.CODE,
        needs=IMAGES,
    )
    shard_size: int = option(
        0,
        "The number of samples in a shard. 0 means equal shards that hold all the data.",
        least=0,
        needs={**IMAGES, "partition": ("shards",)},
    )
    shards_per_client: int = option(
        2,
        "The number of shards of each client.",
        least=1,
        needs={**IMAGES, "partition": ("shards",)},
    )
    classes_per_client: int = option(
        2,
        "The number of classes of each client, with partition 'classes'.",
        least=1,
        needs={**IMAGES, "partition": ("classes",)},
    )
    class_assignment: str = option(
        "cyclic",
        "The rule that gives classes to the clients, with partition 'classes'.",
        choices={
            "cyclic": "client k gets consecutive classes, the first is class k",
            "random": "classes are drawn, each for equally many clients",
        },
        needs={**IMAGES, "partition": ("classes",)},
    )
    dirichlet_alpha: float = option(
        0.3,
        "The concentration α of the Dirichlet partitions. A smaller value makes the clients' labels more unequal.",
        above=0,
        needs={**IMAGES, "partition": ("dirichlet-class", "dirichlet-client")},
    )
    dirichlet_groups: int = option(
        0,
        "The number of groups of clients that share their label preferences, with partition 'dirichlet-client'. 0 "
        "means that each client has its own preferences.",
        least=0,
        needs={**IMAGES, "partition": ("dirichlet-client",)},
    )
    samples_per_client: int = option(
        0,
        "The mean number of samples that a client gets. 0 means that all samples are dealt out.",
        least=0,
        needs=IMAGES,
    )
    image_size: int = option(
        0,
        "The side in pixels of the squares that your own pictures become. 0 leaves pictures as they are, and they must "
        "have one size.",
        least=0,
        most=4096,
        needs=_PICTURES,
    )
    image_fit: str = option(
        "crop",
        "The way in which an image becomes a square, with image-size.",
        choices={"crop": "the image is cut around its middle", "stretch": "the image is squeezed, nothing is cut"},
        needs={**_PICTURES, "image-size": NoneOf((0,))},
    )
    augmentation: str = option(
        "none",
        "The random change of training images in each step.",
        choices={"none": "images stay as they are", "crop-flip": "random crops with padding 4, and random flips"},
        needs=IMAGES,
    )
    public_fraction: float = option(
        0.0,
        "The share of the training images that no client gets, for a server that uses public data. With system "
        "'fedltp' and no public dataset, 0 means 0.2.",
        least=0,
        below=1,
        needs=IMAGES,
    )
    validation_fraction: float = option(
        0.1,
        "The share of a client's training data that is held out for validation.",
        least=0,
        below=1,
        needs=IMAGES,
    )
    test_split: str = option(
        "auto",
        "The test data of a client. A client with data of its own has its test folder, or else holds out a share.",
        choices={
            "auto": "'holdout' with dp.enabled or partition 'owners', 'proportional' with a Dirichlet partition, "
            "otherwise 'labels'; a run's record says which",
            "labels": "all test images with a label that the client trains on",
            "proportional": "test-samples images in the client's shares of the labels, where there are enough of each",
            "holdout": "a share test-fraction of the client's own data",
        },
        needs=IMAGES,
    )
    test_samples: int = option(
        100,
        "The number of images that a client is tested on with test-split 'proportional'. The number is rounded up "
        "for each label.",
        least=1,
        needs={**IMAGES, "test-split": ("proportional",)},
    )
    test_fraction: float = option(
        0.3, "The share of a client's data that is test data, with test-split 'holdout'.", above=0, below=1
    )
    model: str = option(
        "auto",
        "The network; `fedprune list` names all networks. 'auto' takes the dataset's, and 'auto-bn' the same with "
        "BatchNorm, as 'auto' does with system 'subfedavg-hy'. A function of your own that "
        "makes one is 'module:function' or 'file.py:function'. A language model is a folder, a .gguf file or a "
        "name on the hub.",
        kind=PathKind.MODEL,
    )
    init: str = option(
        "default",
        "The distribution of the initial weights.",
        choices={
            "default": "the network's own: PyTorch's, for VGG-11 Kaiming's",
            "subfedavg": "as in Sub-FedAvg's released code",
            "kaiming": "Kaiming's",
        },
        needs=IMAGES,
    )
    batch_norm: str = option(
        "averaged",
        "The treatment of BatchNorm's scales, shifts and statistics.",
        choices={
            "averaged": "the server averages them as weights",
            "local": "each client keeps its own and never sends them",
        },
        needs=IMAGES,
    )
    num_server_rounds: int = option(20, "The number of communication rounds.", least=1, resumable=True)
    fraction_train: float = option(0.5, "The share of the clients that is sampled in each round.", above=0, most=1)
    drop_probability: float = option(
        0.0, "The probability that a sampled client drops out of the round.", least=0, below=1
    )
    local_epochs: int = option(
        5,
        "The number of epochs that a client trains in a round.",
        least=1,
        needs={"system": NoneOf(("fedspallm", "ditto"))},
    )
    steps_per_epoch: int = option(
        0,
        "The number of steps in a local epoch. 0 means as many as go through all examples once.",
        least=0,
        needs=IMAGES,
    )
    batch_size: int = option(10, "The number of samples in a local step.", least=1)
    learning_rate: float = option(
        0.01,
        "The local learning rate in round 1.",
        above=0,
        needs=IMAGES,
    )
    lr_decay: float = option(
        1.0,
        "The factor on the learning rate after each round.",
        above=0,
        most=1,
        needs=IMAGES,
    )
    momentum: float = option(
        0.5,
        "The momentum of local SGD.",
        least=0,
        below=1,
        needs=IMAGES,
    )
    weight_decay: float = option(
        0.0,
        "The weight decay of local SGD.",
        least=0,
        needs=IMAGES,
    )
    max_grad_norm: float = option(
        0.0,
        "The largest norm of a step's gradient; a longer gradient is clipped. 0 means that no gradient is clipped.",
        least=0,
        needs=IMAGES,
    )
    density: float = option(
        0.5,
        "The share of the parameters that is kept, in systems that prune to a density.",
        above=0,
        most=1,
        needs={"system": ("dispfl", "fedp3", "fedcr", "fedltp", "fedspallm")},
    )
    seed: int = option(
        0,
        "The number that the randomness of a run derives from, but for private noise on real nodes.",
        least=0,
        most=2**53,
    )
    evaluate_every: int = option(
        5,
        "The number of rounds from one evaluation of all clients to the next. 0 means that only the last round is "
        "evaluated.",
        least=0,
        resumable=True,
    )
    holdout_clients: int = option(
        0,
        "The number of clients, drawn once, that take no part in the run. After the last round each of them joins like "
        "a new client: the client receives a participant's message, trains for one local phase, and is tested.",
        least=0,
        needs=IMAGES,
    )
    last_phase: bool = option(
        False,
        "If true, every client is sent a participant's message after the last round, trains for one more local phase, "
        "and is tested with the model that comes of this. The run's models stay as they are. Methods that fine-tune do "
        "so already.",
        needs={**IMAGES, "dp.enabled": (False,)},
    )
    evaluate_clients: int = option(
        0,
        "The number of clients that an evaluation asks, drawn anew each time. 0 means all clients. The last evaluation "
        "of a run asks all clients.",
        least=0,
        resumable=True,
    )
    deadline_seconds: float = option(
        600.0, "The time that a round waits for replies, in seconds.", above=0, resumable=True
    )
    startup_seconds: float = execution_option(
        300.0,
        "The time that a run waits for its clients to come up, in seconds.",
        above=0,
    )
    min_clients: int = option(
        1, "The number of clients that a run waits for, startup-seconds long, and needs to begin.", least=1,
        resumable=True,
    )  # fmt: skip
    only_clients: str = option("", "The numbers of the clients that take part, such as '0 2 3'. Empty means all.")
    min_replies: int = option(
        1, "The number of good replies that a round needs. A round with fewer stops the run.", least=1, resumable=True
    )
    secure_sums: bool = option(
        False,
        "If true, the server learns the sum of the clients' updates and none of them: docs/privacy.md says how. The "
        "result is the same.",
        changes_results=False,
    )
    secure_sums_threshold: int = option(
        0,
        "The number of clients whose updates a secure sum needs, more than half of those that a round asks. 0 means "
        "the larger of 3 and the majority.",
        least=0,
        changes_results=False,
        needs={"secure-sums": (True,)},
    )
    min_holders: int = option(
        1,
        "The number of clients that must send a weight, else the server does not change the weight. With secure-sums "
        "at least secure-sums-threshold, or 3.",
        least=1,
        needs={"system": ("subfedavg", "subfedavg-hy", "fedp3", "fedcr"), "fedp3.aggregation": ("simple",)},
    )
    out_dir: str = execution_option(
        "",
        "The run folder, as an absolute path. Empty means ~/fedprune-runs/<run id>.",
        kind=PathKind.RUN_FOLDER,
    )
    state_dir: str = execution_option(
        "",
        "The folder for the clients' state of any run, as an absolute path. Empty means <run folder>/clients.",
        kind=PathKind.STATE_FOLDER,
    )
    resume_from: str = execution_option(
        "",
        "The run folder of the run to continue.",
        kind=PathKind.RUN_FOLDER,
    )
    accept_loss: bool = execution_option(
        False,
        "If true, a run is resumed even where a damaged file changes the result; run.json then names the loss.",
    )
    device: str = option(
        "auto",
        "The device that clients train on.",
        choices={"auto": "CUDA where there is one, else the CPU", "cpu": "the CPU", "cuda": "a CUDA device"},
        changes_results=False,
    )
    precision: str = option(
        "float32",
        "The number format in which networks are trained and tested. Weights, masks and messages are float32.",
        choices={
            "float32": "float32 throughout",
            "tf32": "TF32 in the matrix products and convolutions of a CUDA device; float32 elsewhere",
            "bf16": "bfloat16 where torch.autocast chooses it, for large networks on devices that have it",
        },
    )
    training_form: str = option(
        "grouped",
        "The form in which small networks are trained. Both forms give the same result but for the last bits.",
        choices={
            "grouped": "clients of a process train as one network, and a client by itself computes as in company",
            "plain": "every client computes by itself: faster on a node of a deployment, slower in a simulation",
        },
        needs=IMAGES,
    )
    deterministic: bool = option(
        False,
        "If true, a CUDA device computes by deterministic algorithms alone: the same run then ends with the same "
        "final_sha256 on that device. On the CPU every run does.",
    )
    cuda_graphs: bool = execution_option(
        True,
        "If true, a CUDA device repeats training steps, and blocks of SparseGPT, as CUDA graphs.",
    )
    num_threads: int = option(
        1, "The number of torch threads of a client. Another number changes floating-point sums.", least=1, most=1024
    )
    cohort: int = execution_option(
        0,
        "The largest number of clients that a simulation trains in one step; 0 means eight on a CPU, where no result "
        "depends on the number, and 32 on a GPU.",
        least=0,
    )
    tracking: str = execution_option(
        "none",
        "The tracker that gets the run's settings and numbers beside the run's own records.",
        choices={
            "none": "no tracker",
            "tensorboard": "TensorBoard's event files in the run folder",
            "mlflow": "MLflow, at MLFLOW_TRACKING_URI or in the run folder",
        },
    )

    plugins: str = execution_option(
        "",
        "The plug-ins that the run needs: modules, and files that end in .py, separated by commas. The system, "
        "network, dataset or partition of an installed plug-in needs no mention here.",
        kind=PathKind.CODE,
    )
    plugin_options: str = option(
        "",
        "The options of a plug-in's system as JSON. The command line takes them as KEY=VALUE; `flwr run` takes no keys "
        "but declared ones.",
        changes_results=False,
    )

    @property
    def learning_rates(self) -> _LearningRates:
        """``config.learning_rates[t]`` is the local learning rate of round ``t`` (1-based)."""
        return _LearningRates(self.learning_rate, self.lr_decay)

    def check(self) -> None:
        class_names(self.classes)
        self.chosen_clients()
        if 0 < self.evaluate_clients < self.min_replies:
            allowed = f"0 or at least min-replies, {self.min_replies}"
            raise ConfigError("evaluate-clients", self.evaluate_clients, allowed)
        if self.secure_sums_threshold == 1:  # a sum of one is what one client sent
            raise ConfigError("secure-sums-threshold", 1, "0 or at least 2")
        if self.resume_from and self.out_dir and self.out_dir != self.resume_from:
            raise ConfigError("out-dir", self.out_dir, "that same folder, or nothing", condition="with resume-from")

    def chosen_clients(self) -> set[int]:
        """Return the numbers in ``only-clients``. Raises :class:`ConfigError`."""
        numbers = self.only_clients.replace(",", " ").split()
        if not all(map(str.isdecimal, numbers)):
            raise ConfigError("only-clients", self.only_clients, "whole numbers of clients, from 0: '0 2 3'")
        return set(map(int, numbers))


@dataclass(frozen=True)
class _LearningRates:
    first: float
    decay: float

    def __getitem__(self, round: int) -> float:
        return self.first * self.decay ** (round - 1)


@dataclass(frozen=True)
class Table:
    """Base class for the options of one system or subject, with their conditions.

    The options have an effect only with the values of other keys in ``needs``.

    A condition is checked by the table whose options it reads; if it reads two tables, by the one whose key the error
    names.
    """

    needs: ClassVar[Needs] = {}
    # The name in keys; empty for the product's own tables, which have the name of their field.
    name: ClassVar[str] = ""

    def check(self, common: CommonOptions) -> None:
        """Raise :class:`ConfigError` if these options contradict each other or the ``common`` ones."""

    def fixed_on_resume(self, common: CommonOptions) -> Mapping[str, str]:
        """Return the resumable keys that these options fix in a resumed run, each with the reason."""
        return {}


def class_names(text: str) -> tuple[str, ...]:
    """Return the names in ``text``, 'cat, dog'; none if it is empty. Raises :class:`ConfigError`."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if text and (not all(names) or len(set(names)) < max(len(names), 2)):
        raise ConfigError("classes", text, "at least two names, each once")
    return names
