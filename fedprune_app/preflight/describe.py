"""Descriptions of a run before it starts: data, clients, network, machine."""

import statistics
from collections.abc import Iterator

import numpy as np
import torch

from fedprune_app.config import Config
from fedprune_app.data.dataset import Dataset, shortened
from fedprune_app.data.splits import data_config, dataset_of, digests, label_counts, unread
from fedprune_app.data.text import calibration_documents, own_documents
from fedprune_app.learning.device import device_of
from fedprune_app.learning.language_models import evaluation_texts, evaluation_windows, language_model
from fedprune_app.models.initial import initial_model, layer_flops
from fedprune_app.models.names import chosen_name
from fedprune_app.models.vision import prunable_names
from fedprune_app.preflight.can_start import with_a_model
from fedprune_app.preflight.prepare import Prepared
from fedprune_app.registry import SYSTEMS

_MOST_OWNERS = 100  # that are shown one by one


def described(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield (subject, text) on the system, data, model, device and rounds of a run; its data are read."""
    config, system, num_clients = prepared.config, prepared.system, prepared.placement.clients
    yield "system", f"{config.system}: {system.summary}"
    if not system.reads_text:
        yield from _images(config, num_clients)
    else:
        yield "texts", f"{config.dataset} {config.data_dir}".rstrip()
        yield "model", config.model
    device = device_of(config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    yield "device", f"{name}, {config.num_threads} thread(s) for each process"
    yield "rounds", f"{config.fraction_train:.0%} of {num_clients} clients in each of {config.num_server_rounds} rounds"
    if config.dp.enabled:
        yield "privacy", _privacy(config)


def data_found(config: Config) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (subject, text) rows on a run's data, and warnings about them. Nothing is dealt to clients.

    Raises ``ValueError`` if the data cannot be read.
    """
    if SYSTEMS[config.system].reads_text:
        return _text_data(config)
    data = data_config(config)
    dataset = dataset_of(data)
    rows = [_dataset_row(config, dataset), ("classes", shortened(dataset.classes))]
    if dataset.features:
        rows.append(("features", shortened(dataset.features)))
    warnings = unread(data)
    if dataset.num_classes < 2:
        warnings.append("there is one class, and a run needs at least two")
    for part, labels in (("training", dataset.train_labels), ("test", dataset.test_labels)):
        counts = np.bincount(labels, minlength=dataset.num_classes)
        rows.append((f"{part} examples of a class", _spread(counts.tolist())))
        if absent := [name for name, count in zip(dataset.classes, counts, strict=True) if not count and len(labels)]:
            warnings.append(f"no {part} example has the class {shortened(tuple(absent))}")
    if dataset.owners is not None:
        rows.append(("owners", f"{dataset.owners.max() + 1:,}"))
        rows += [_owner_row(dataset, owner) for owner in range(min(len(dataset.owner_names), _MOST_OWNERS))]
    train, test = digests(data)
    known = set(train)
    if num_shared := len([digest for digest in test if digest in known]):
        warnings.append(f"{num_shared:,} test examples are training examples too")
    if num_duplicates := len(train) - len(known):
        warnings.append(f"{num_duplicates:,} training examples are there more than once")
    return rows, warnings


def _owner_row(dataset: Dataset, owner: int) -> tuple[str, str]:
    labels = dataset.train_labels[dataset.owners == owner]
    counts = np.bincount(labels, minlength=dataset.num_classes).tolist()
    held = [f"{name} {count:,}" for name, count in zip(dataset.classes, counts, strict=True) if count]
    return f"  {dataset.owner_names[owner]}", f"{len(labels):,} examples: {shortened(held)}"


def _text_data(config: Config) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (subject, text) rows on a run's text, and warnings about it. Nothing is dealt to clients.

    The run's model tokenizes the text. Raises ``ValueError`` if the text or the model cannot be read.
    """
    options = config.fedspallm
    if options.deal == "own" and config.dataset == "text":
        documents = own_documents(config.data_dir, config.test_fraction, config.seed)[0]
    else:
        documents = list(calibration_documents(config.dataset, config.data_dir))
    with with_a_model(config) as local_config:
        model = language_model(local_config)
        length = model.sequence_length(options.segment_length)
        sizes = [len(model.encode(document.text)) for document in documents]
        windows_by_name, _ = evaluation_windows(local_config, model)
    rows = [
        ("documents", f"{config.dataset}: {len(documents):,}, of {_spread(sizes)} tokens"),
        ("segments", f"{sum(size // length for size in sizes):,} of {length:,} tokens"),
    ]
    rows += [
        (f"test text '{name}'", f"{len(windows):,} windows of {windows.shape[1]:,} tokens")
        for name, windows in windows_by_name.items()
    ]
    shared_texts = {document.text for document in documents}
    shared_names = [name for name, (text, _) in evaluation_texts(config).items() if text in shared_texts]
    return rows, [f"test text '{name}' is a document of the clients too" for name in shared_names]


def _dataset_row(config: Config, dataset: Dataset) -> tuple[str, str]:
    shape = "x".join(map(str, dataset.image_shape))
    return "dataset", (
        f"{config.dataset}: {len(dataset.train_labels):,} training and {len(dataset.test_labels):,} test examples of "
        f"{shape}, {dataset.num_classes} classes"
    )


def _images(config: Config, num_clients: int) -> Iterator[tuple[str, str]]:
    data = data_config(config)
    dataset = dataset_of(data)
    yield _dataset_row(config, dataset)
    yield "classes", shortened(dataset.classes)
    counts = [label_counts(data, client, num_clients) for client in range(num_clients)]
    for part in ("train", "validation", "test"):
        yield f"{part} examples of a client", _spread([sum(row[part]) for row in counts])
    class_counts = [sum(count > 0 for count in row["train"]) for row in counts]
    yield "classes of a client", f"{_spread(class_counts)}, dealt by partition {config.partition!r}"
    model = initial_model(
        config.model, config.dataset, dataset.image_shape, dataset.num_classes, init=config.init, seed=config.seed
    )
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    prunable = sum(sizes[name] for name in prunable_names(model))
    flops = sum(layer_flops(config.model, config.dataset, dataset.image_shape, dataset.num_classes).values())
    yield "model", str(chosen_name(config.model, config.dataset))
    yield "parameters", f"{sum(sizes.values()):,}, of which {prunable:,} can be pruned"
    yield "forward pass", f"{flops / 1e6:,.2f} MFLOP for an example"


def _spread(numbers: list[int]) -> str:
    if min(numbers) == max(numbers):
        return f"{numbers[0]:,}"
    return f"{min(numbers):,} to {max(numbers):,}, median {statistics.median(numbers):,.10g}"


def _privacy(config: Config) -> str:
    dp = config.dp
    noise = f"noise multiplier {dp.noise_multiplier:g}" if dp.noise_multiplier else f"ε {dp.target_epsilon:g} at most"
    budget = f", budget ε {dp.epsilon_budget:g}" if dp.epsilon_budget else ""
    mechanism = "noised second moments" if SYSTEMS[config.system].reads_text else "DP-SGD"
    return f"{mechanism} with {noise}, clip norm {dp.clip_norm:g}, δ {dp.delta:g}{budget}"
