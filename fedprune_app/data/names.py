"""The datasets, texts and partitions that there are to choose, each with one line on it; they are quick to import."""

from __future__ import annotations

DATASETS: dict[str, str] = {
    "digits": "8x8 grey digits, 10 classes, 1,797 images; comes with scikit-learn, needs no data-dir",
    "mnist": "28x28 grey digits, 10 classes, 60,000 + 10,000",
    "fashion-mnist": "28x28 grey clothing, 10 classes, 60,000 + 10,000",
    "emnist-digits": "28x28 grey digits, 10 classes, 240,000 + 40,000",
    "emnist-letters": "28x28 grey letters, 26 classes, 124,800 + 20,800",
    "cifar10": "32x32 colour photographs, 10 classes, 50,000 + 10,000; binary version or image folder",
    "cifar100": "32x32 colour photographs, 100 classes, 50,000 + 10,000; binary version",
    "tiny-imagenet": "64x64 colour photographs, 200 classes, 100,000 + 10,000 (its validation set)",
    "image-folder": "your own: data-dir/train/<class>/* and data-dir/test/<class>/*, images of one size",
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
}
