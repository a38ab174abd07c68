"""CIFAR-10 and CIFAR-100 are read from their binary versions."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedprune_app.data.dataset import (
    Dataset,
    Split,
    fetch_archive,
    require,
)

CIFAR10_NORM = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))  # as Sub-FedAvg; Dis-PFL's std differs
_CIFAR100_NORM = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz"


def cifar_binary(name: str, folder: Path, download: bool) -> Dataset:
    """Read CIFAR's binary version: records of label bytes (CIFAR-100: coarse, fine) and 3072 pixels, by channel."""
    if name == "cifar10":
        folder_name, archive, md5 = "cifar-10-batches-bin", "cifar-10-binary", "c32a1d4ab5d03f1284b67883e8d87530"
        batches, test = [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"
        names, label_bytes, norm = "batches.meta.txt", 1, CIFAR10_NORM
    else:
        folder_name, archive, md5 = "cifar-100-binary", "cifar-100-binary", "03b5dce01913d631647c71ecec9e9cb8"
        batches, test = ["train.bin"], "test.bin"
        names, label_bytes, norm = "fine_label_names.txt", 2, _CIFAR100_NORM
    root = folder / folder_name
    files = [root / file for file in (*batches, test, names)]
    hint = " (nor train/<class>/* and test/<class>/*; pickled batches are not read)" if name == "cifar10" else ""
    url = f"{_CIFAR_HOME}/{archive}.tar.gz"
    require(name, files, folder, download, lambda: fetch_archive(url, folder, md5), hint)
    classes = tuple(files[-1].read_text().split())

    def read(paths: Iterable[Path]) -> Split:
        parts = []
        for path in paths:
            content = np.fromfile(path, dtype=np.uint8)
            if not len(content) or len(content) % (label_bytes + 3072):
                raise ValueError(f"'{path}' has {len(content)} bytes, not whole records of {label_bytes + 3072}")
            records = content.reshape(-1, label_bytes + 3072)
            images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
            parts.append((images, records[:, label_bytes - 1].astype(np.int64)))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    return Dataset(name, *read(files[: len(batches)]), *read(files[-2:-1]), classes, *norm)
