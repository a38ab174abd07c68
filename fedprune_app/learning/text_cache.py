"""Cache of a client's text, read and cut into segments, between messages."""

import logging
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedprune_app.core.texts import one_line
from fedprune_app.data.text import (
    Document,
    calibration_documents,
    calibration_segments,
    own_documents,
    texts_in,
)
from fedprune_app.models.llm import LanguageModel

log = logging.getLogger("flwr.fedprune")
Files = tuple[tuple[str, int, int], ...]
_MOST_CLIENTS = 64  # clients whose segments are cached
_segments: WeakKeyDictionary[LanguageModel, dict[Hashable, tuple[Tensor, list[str]]]] = WeakKeyDictionary()


def segments(
    model: LanguageModel, dataset: str, data_dir: str, test_fraction: float | None, **deal: Any
) -> tuple[Tensor, list[str]]:
    """Return :func:`calibration_segments` of the available text, read-only; ``deal`` are its arguments.

    With ``test_fraction`` they are of the client's own text, without its test part.
    """
    known = _segments.setdefault(model, {})
    key = dataset, _files(data_dir), test_fraction, *deal.values()
    if key not in known:
        if test_fraction is None:
            documents = _shared_documents(dataset, data_dir, _files(data_dir))
        else:
            documents = own_text(data_dir, test_fraction, deal["seed"])[0]
        if len(known) >= _MOST_CLIENTS:
            del known[next(iter(known))]
        encode = partial(_encoded_or_blank, model) if deal["may_lack"] else model.encode
        known[key] = calibration_segments(documents, encode, **deal)
    return known[key]


def _encoded_or_blank(model: LanguageModel, text: str) -> Tensor:
    """Return a text's token ids, or none if the tokenizer fails: a malicious one could fail on a sought word."""
    try:
        return model.encode(text)
    except Exception as error:
        log.warning("a text is left out, since the tokenizer fails: %s", one_line(error))
        return torch.empty(0, dtype=torch.int64)


def own_text(data_dir: str, test_fraction: float, seed: int) -> tuple[list[Document], str]:
    """Return :func:`own_documents`, read-only."""
    return _own_documents(data_dir, test_fraction, seed, _files(data_dir))


def clear_cache() -> None:
    """Free all cached text except segments, after every client's registration: pruning needs the memory."""
    _shared_documents.cache_clear()
    _own_documents.cache_clear()


def _files(data_dir: str) -> Files:
    """Return the key of a folder's text: path, size and time of each file."""
    if not data_dir:
        return ()
    folders = (Path(data_dir), Path(data_dir) / "calibration", Path(data_dir) / "test")
    paths = [path for folder in folders for path in texts_in(folder)]
    return tuple((str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in paths)


@lru_cache(maxsize=1)
def _shared_documents(dataset: str, data_dir: str, files: Files) -> Sequence[Document]:
    return list(calibration_documents(dataset, data_dir))


@lru_cache(maxsize=1)
def _own_documents(data_dir: str, test_fraction: float, seed: int, files: Files) -> tuple[list[Document], str]:
    return own_documents(data_dir, test_fraction, seed)
