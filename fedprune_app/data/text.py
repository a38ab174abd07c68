"""Texts: documents from files or Python's standard library, cut into segments that no two clients share."""

import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from fedprune_app.core import rng
from fedprune_app.data.dataset import FileError, visible

# Maps a text to its token ids (tokens,).
Encoder = Callable[[str], Tensor]

# Clients hold _PRIVATE, and perplexity is measured on _HELD_OUT; no model here is trained on either. The first packages
# of _PRIVATE are large and very different: networking, mail, a window toolkit, tables of characters, tests, a parser
# generator.
_PRIVATE = (
    "asyncio", "email", "tkinter", "encodings", "unittest", "lib2to3", "xml", "idlelib", "multiprocessing", "importlib",
    "http", "logging", "urllib", "html", "re", "xmlrpc", "concurrent", "ctypes", "wsgiref", "collections", "json",
    "zoneinfo",
)  # fmt: skip
_HELD_OUT = ("statistics", "textwrap", "fractions", "calendar", "bisect", "heapq")
_SKIPPED = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "turtledemo"))
_JOINS = {"wikitext": "\n\n", "ptb": " ", "c4": " "}
_LIMITS = {"c4": (1100, 256)}  # the most documents, and windows


@dataclass(frozen=True)
class Document:
    """One text with its name, from a file, a line of a file, or a package of the standard library."""

    name: str
    text: str


# --- sources of documents ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _stdlib() -> Mapping[str, Document]:
    """Return the top-level packages and modules of the running Python, each as one document."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[str]] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED - {"__pycache__"})
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            name = path.relative_to(root).parts[0].removesuffix(".py")
            if not name.startswith(("_sysconfigdata", "config-")):
                parts.setdefault(name, []).append(path.read_text(encoding="utf-8", errors="replace"))
    return {name: Document(name, "\n".join(texts)) for name, texts in sorted(parts.items())}


def stdlib_training_text() -> list[Document]:
    """Return the documents of the standard library that are in no client's data and in no test."""
    return [doc for name, doc in _stdlib().items() if name not in {*_PRIVATE, *_HELD_OUT}]


def calibration_documents(dataset: str, data_dir: str) -> Iterator[Document]:
    """Yield the private documents: those of all clients, unless each client has its own folder.

    ``ValueError`` if there is no text.
    """
    if dataset == "stdlib":
        yield from (_stdlib()[name] for name in _PRIVATE if name in _stdlib())
        return
    for path in _files(data_dir, "calibration"):
        yield from _documents(path)


def own_documents(data_dir: str, test_fraction: float, seed: int) -> tuple[list[Document], str]:
    """Return a client's own text: its training documents, and a text on which it is tested.

    Documents are the files of data-dir/calibration, or of data-dir itself. The test text is the files of data-dir/test,
    joined by line ends. Without test files it is ``test_fraction`` of the documents, at least one, drawn by ``seed``.
    If there is a single document, the test text is its end. ``ValueError`` if there is no text.
    """
    part = "calibration" if (Path(data_dir) / "calibration").is_dir() else ""
    documents = [document for path in _files(data_dir, part) for document in _documents(path)]
    if files := texts_in(Path(data_dir) / "test"):
        return documents, "\n".join(document.text for path in files for document in _documents(path))
    if len(documents) == 1:
        (document,) = documents
        position = len(document.text) - round(test_fraction * len(document.text))
        return [Document(document.name, document.text[:position])], document.text[position:]
    count = min(max(round(test_fraction * len(documents)), 1), len(documents) - 1)
    order = torch.randperm(len(documents), generator=rng.generator(seed, "test split")).tolist()
    held_out = set(order[:count])
    return (
        [document for i, document in enumerate(documents) if i not in held_out],
        "\n".join(documents[i].text for i in sorted(held_out)),
    )


def perplexity_texts(
    dataset: str, data_dir: str, extra_paths: Mapping[str, Path] | None = None
) -> dict[str, tuple[str, int]]:
    """Return the texts on which perplexity is measured, by name, each with the largest number of windows (0: all).

    The dataset's own texts come first: ``stdlib`` has one, of modules that no client holds; ``text`` has the files of
    its folder. Then come the files of ``extra_paths``, by name. Texts of three corpora are joined as in SparseGPT's
    evaluation:

    * ``wikitext*``: lines are joined by blank lines;
    * ``ptb*``: lines are joined by spaces;
    * ``c4*``: the first 1100 documents are joined by spaces, and 256 windows of these are measured.

    Other files are not changed. ``ValueError`` if there is no text, or one that cannot be read.
    """
    texts, own_paths = {}, []
    if dataset == "stdlib":
        texts["stdlib"] = "\n".join(_stdlib()[name].text for name in _HELD_OUT if name in _stdlib()), 0
    else:
        own_paths = [(path.stem, path) for path in _files(data_dir, "test")]
    for name, path in [*own_paths, *(extra_paths or {}).items()]:
        if name in texts:
            raise ValueError(f"test text {name!r} is given twice, allowed: another name for {str(path)!r}")
        texts[name] = _test_text(name, path)
    return texts


def _test_text(name: str, path: Path) -> tuple[str, int]:
    """Return a file's text joined by the rule of its corpus, and the largest number of windows."""
    corpus = next((prefix for prefix in _JOINS if name.startswith(prefix)), None)
    max_documents, max_windows = _LIMITS.get(corpus or "", (None, 0))
    if corpus is None:
        text = "\n".join(document.text for document in _documents(path))
    elif path.suffix.lower() == ".jsonl":
        text = _JOINS[corpus].join([d.text for d in _documents(path)][:max_documents])
    else:
        with _open_text(path) as file:
            lines = list(itertools.islice(file, max_documents))
        if corpus == "wikitext":  # lines keep their ends and blank lines are empty, as in the hub's dataset
            lines = [line if line.strip() else "" for line in lines]
        else:
            lines = [line.strip() for line in lines]
        text = _JOINS[corpus].join(lines)
    return text, max_windows


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows tools write a byte order mark
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(path, f"cannot be read as a text in UTF-8: {error}") from None


def _files(data_dir: str, part: str) -> list[Path]:
    paths = texts_in(Path(data_dir) / part)
    if not data_dir or not paths:
        pattern = f"{part}/*.txt" if part else "*.txt"
        raise ValueError(f"data-dir is {data_dir!r}, allowed with dataset 'text': a folder with {pattern} or *.jsonl")
    return paths


def texts_in(folder: Path) -> list[Path]:
    return [path for path in map(Path, visible(folder)) if path.suffix.lower() in (".txt", ".jsonl")]


def _documents(path: Path) -> Iterator[Document]:
    if path.suffix.lower() != ".jsonl":
        with _open_text(path) as file:
            content = file.read()
        yield Document(path.stem, content)
        return
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():  # tools write blank lines between documents or at the end
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # fails for half of a surrogate pair, which a cut can leave
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                reason = f"has a line that is no object with a text under 'text': number {number}"
                raise FileError(path, reason) from None
            yield Document(f"{path.stem}:{number}", text)


# --- clients' segments ------------------------------------------------------------------------------------------------


def calibration_segments(
    documents: Sequence[Document],
    encode: Encoder,
    *,
    deal: str,
    partition: int,
    num_partitions: int,
    count: int,
    max_segments: int,
    length: int,
    seed: int,
    may_lack: bool = False,
    most_of_document: int = 0,
) -> tuple[Tensor, list[str]]:
    """Return a client's segments (count, length) of token ids, and the names of their documents.

    With ``most_of_document`` the segments come from at most ``count`` documents, at most that many of each, and the
    draw from one document does not depend on the others. There is then one name per segment.

    A document is cut into consecutive segments, and its tail is dropped. A document shorter than a segment has none. No
    client has more than ``max_segments`` segments. ``deal`` is one of these:

    * ``documents``: document ``i`` belongs to client ``i mod num_partitions``. With fewer documents than clients, the
      clients of one document take turns at its segments.
    * ``one``: client ``i`` draws from document ``i mod len(documents)`` alone. Clients of one document take turns.
    * ``segments``: one random segment of each document, then a second one of each, and so on, are dealt to all clients.
    * ``own``: the documents are this client's alone.

    In the first three no two clients share a segment, whatever the seed. ``ValueError`` for too few segments, unless
    the client ``may_lack`` some: then all available ones are returned.
    """
    if deal == "own":
        client_documents, turn, turns = list(documents), 0, 1
        draw = rng.generator(seed, "segments", partition)
    elif deal == "segments":
        client_documents, turn, turns = list(documents), partition, num_partitions
        draw = rng.generator(seed, "segments")
    else:
        owners = len(documents) if deal == "one" else min(len(documents), num_partitions)
        owner = partition % owners
        client_documents = [documents[owner]] if deal == "one" else list(documents[owner::owners])
        turn, turns = partition // owners, len(range(owner, num_partitions, owners))
        draw = rng.generator(seed, "segments", owner)
    if most_of_document:
        segments = []
        for i in torch.randperm(len(client_documents), generator=draw).tolist()[:count]:
            own_draw = rng.generator(seed, "segments of a document", i)
            (document_pieces,) = _cut_documents([client_documents[i]], encode, length, own_draw)
            segments += document_pieces[turn::turns][:most_of_document]
        return _stacked(segments, length), [name for name, _ in segments]
    pieces_by_document = _cut_documents(client_documents, encode, length, draw)
    if deal == "segments":
        segments = list(
            itertools.islice(_round_robin(pieces_by_document), max_segments * turn, max_segments * turn + count)
        )
    else:
        pool = [piece for pieces in pieces_by_document for piece in pieces]
        shuffled = [pool[i] for i in torch.randperm(len(pool), generator=draw).tolist()]
        segments = shuffled[turn::turns][:count]
    if len(segments) < count and not may_lack:
        raise ValueError(
            f"client {partition} of {num_partitions} finds {len(segments)} segments of {length} tokens of {count}; "
            "allowed: a smaller fedspallm.segments, recovery-segments or segment-length, or more text"
        )
    return _stacked(segments, length), sorted({name for name, _ in segments})


Piece = tuple[str, Tensor]  # the document's name, and a segment of it


def _stacked(segments: Sequence[Piece], length: int) -> Tensor:
    return torch.stack([piece for _, piece in segments]) if segments else torch.empty((0, length), dtype=torch.int64)


def _cut_documents(
    documents: Sequence[Document], encode: Encoder, length: int, draw: torch.Generator
) -> Iterator[list[Piece]]:
    """Yield each document's segments, both in random order; lazily, so a large collection is not read to its end."""
    for i in torch.randperm(len(documents), generator=draw).tolist():
        tokens = encode(documents[i].text)
        pieces = tokens[: len(tokens) // length * length].view(-1, length)
        yield [(documents[i].name, pieces[j]) for j in torch.randperm(len(pieces), generator=draw).tolist()]


def _round_robin(piece_lists: Iterable[list[Piece]]) -> Iterator[Piece]:
    """Yield one piece of each document, then a second one of each, and so on."""
    more_pieces = []
    for pieces in piece_lists:  # each document is read when its first piece is needed
        yield from pieces[:1]
        more_pieces.append(pieces[1:])
    for row in itertools.zip_longest(*more_pieces):
        yield from filter(None, row)


def windows_of(tokens: Tensor, length: int) -> Tensor:
    """Cut tokens into consecutive windows (windows, length); the tail is dropped.

    ``ValueError`` for a text shorter than one window.
    """
    if len(tokens) < length:
        raise ValueError(f"a test text has {len(tokens)} tokens, allowed: at least one window of {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)
