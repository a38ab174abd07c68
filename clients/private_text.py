"""A language model's clients' private text, parsed, tokenised and cut once in a process.

A process that simulates many clients would else do it for each of them, twice. All of it stays in this process' memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import Tensor

from fedprune_app.data.text import Document, calibration_documents, calibration_segments, own_documents, texts_in
from fedprune_app.models.llm import LanguageModel

Files = tuple[tuple[str, int, int], ...]
_MOST_TOKENS = 2**24  # remembered of documents, 128 MiB
_MOST_CLIENTS = 64  # clients whose segments are remembered
_OVERHEAD = 64  # what a document counts beside its tokens


class _SegmentCache:
    """What a model's tokenizer made of texts."""

    def __init__(self) -> None:
        self.segments: dict[Hashable, tuple[Tensor, list[str]]] = {}
        self.forget_documents()

    def forget_documents(self) -> None:
        self._room = _MOST_TOKENS
        self._tokens: dict[tuple[int, str], Tensor] = {}

    def encode(self, model: LanguageModel, text: str, length: int) -> Tensor:
        """Return the token ids of a text, without the tail that fills no segment.

        Most documents of a crawl have none left then.
        """
        if (cached_ids := self._tokens.get((length, text))) is not None:
            return cached_ids
        ids = model.encode(text)
        segment_ids = ids[: len(ids) // length * length].clone()
        if (size := len(segment_ids) + _OVERHEAD) <= self._room:
            self._tokens[length, text] = segment_ids
            self._room -= size
        return segment_ids


_caches: WeakKeyDictionary[LanguageModel, _SegmentCache] = WeakKeyDictionary()


@dataclass(frozen=True)
class Deal:
    """A deal says how the text is dealt to clients: these are arguments of :func:`calibration_segments`."""

    deal: str
    client_id: int
    num_clients: int
    count: int
    max_segments: int
    length: int
    seed: int


def segments(
    model: LanguageModel, dataset: str, data_dir: str, test_fraction: float | None, deal: Deal
) -> tuple[Tensor, list[str]]:
    """Return :func:`calibration_segments` of the text there is, not to be written to.

    With ``test_fraction`` they are of the client's own text, without its test part.
    """
    cache = _caches.setdefault(model, _SegmentCache())
    files = _files(data_dir)
    key = (dataset, files, test_fraction, deal)
    if key not in cache.segments:
        if test_fraction is None:
            documents = _shared_documents(dataset, data_dir, files)
        else:
            documents = _own_documents(data_dir, test_fraction, deal.seed, files)[0]
        result = calibration_segments(
            documents,
            lambda text: cache.encode(model, text, deal.length),
            deal=deal.deal,
            partition=deal.client_id,
            num_partitions=deal.num_clients,
            count=deal.count,
            max_segments=deal.max_segments,
            length=deal.length,
            seed=deal.seed,
        )
        while len(cache.segments) >= _MOST_CLIENTS:
            del cache.segments[next(iter(cache.segments))]
        cache.segments[key] = result
    return cache.segments[key]


def own_text(data_dir: str, test_fraction: float, seed: int) -> tuple[list[Document], str]:
    """Return :func:`own_documents`, not to be written to."""
    return _own_documents(data_dir, test_fraction, seed, _files(data_dir))


def own_digests(data_dir: str, test_fraction: float, seed: int) -> list[bytes]:
    """Return a SHA-256 of each of the client's own documents, and of its test text."""
    return _own_digests(data_dir, test_fraction, seed, _files(data_dir))


def forget_documents() -> None:
    """Free the memory of all but segments, once every client has introduced itself: pruning needs the room."""
    _shared_documents.cache_clear()
    _own_documents.cache_clear()
    for cache in _caches.values():
        cache.forget_documents()


def _files(data_dir: str) -> Files:
    """Return what a folder's text depends on: path, size and time of each file."""
    if not data_dir:
        return ()
    folders = (Path(data_dir), Path(data_dir) / "calibration", Path(data_dir) / "test")
    paths = [path for folder in folders for path in texts_in(folder)]
    return tuple((str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in paths)


@lru_cache(maxsize=1)
def _shared_documents(dataset: str, data_dir: str, files: Files) -> Sequence[Document]:
    return list(calibration_documents(dataset, data_dir))


@lru_cache(maxsize=1)  # lasts longer than the documents, whose digests every message asks for
def _own_digests(data_dir: str, test_fraction: float, seed: int, files: Files) -> list[bytes]:
    documents, test = _own_documents(data_dir, test_fraction, seed, files)
    return [hashlib.sha256(text.encode()).digest() for text in [*(document.text for document in documents), test]]


@lru_cache(maxsize=1)
def _own_documents(data_dir: str, test_fraction: float, seed: int, files: Files) -> tuple[list[Document], str]:
    return own_documents(data_dir, test_fraction, seed)
