"""Names of the datasets, texts and partitions, each with a one-line description; quick to import."""

from collections.abc import Callable
from typing import Any

DATASETS: dict[str, str] = {
    "digits": "8x8 grey digits, 10 classes, 1,797 images; comes with scikit-learn, needs no data-dir",
    "mnist": "28x28 grey digits, 10 classes, 60,000 + 10,000; data-dir/MNIST/raw/*-ubyte",
    "fashion-mnist": "28x28 grey clothing, 10 classes, 60,000 + 10,000; data-dir/FashionMNIST/raw/*-ubyte",
    "emnist-digits": "28x28 grey digits, 10 classes, 240,000 + 40,000; data-dir/EMNIST/raw/emnist-digits-*-ubyte",
    "emnist-letters": "28x28 grey letters, 26 classes, 124,800 + 20,800; data-dir/EMNIST/raw/emnist-letters-*-ubyte",
    "emnist-letters-10": "the first ten letters of these, 48,000 + 8,000: FedP3's EMNIST-L",
    "cifar10": "32x32 colour photographs, 10 classes, 50,000 + 10,000; cifar-10-batches-bin/*.bin or image folder",
    "cifar100": "32x32 colour photographs, 100 classes, 50,000 + 10,000; data-dir/cifar-100-binary/*.bin",
    "tiny-imagenet": "64x64 colour photographs, 200 classes, 100,000 + 10,000 (its validation set)",
    "image-folder": "your own: data-dir/train/<class>/* and data-dir/test/<class>/*, images of one size or image-size",
    "table": "your own numbers: data-dir/train.csv and test.csv, or .parquet, with a column of labels; extra 'data'",
    "huggingface": "your own images: data-dir is what save_to_disk of Hugging Face's datasets wrote; extra 'data'",
}

TEXTS: dict[str, str] = {
    "stdlib": "the Python standard library's sources; clients hold packages of their own",
    "text": "files in data-dir: calibration/*.txt (a document each) or *.jsonl (one per line), and test/* likewise",
}

PARTITIONS: dict[str, str] = {
    "iid": "shuffled and dealt out evenly",
    "shards": "sorted by label, cut into shards, a few shards per client (McMahan et al.; Sub-FedAvg)",
    "classes": "a fixed number of classes per client, equal volumes (FedP3's class-wise, Dis-PFL's pathological)",
    "dirichlet-class": "each class split over the clients by a Dirichlet draw, unequal volumes (Fed-LTP)",
    "dirichlet-client": "each client draws its label preferences, equal volumes (Dis-PFL, FedP3)",
    "owners": "each client has its own: data-dir/<client>/<class>/*, a table's owner-column, a plug-in's owners",
}

OWNERS = "owners"
# A plug-in's datasets: name → function that loads it from the key data-dir. See ``data/plugin_datasets.py``.
LOADERS: dict[str, Callable[[str], Any]] = {}
# A plug-in's partitions: name → function of (labels, number of clients, generator).
DEALERS: dict[str, Callable[..., Any]] = {}
