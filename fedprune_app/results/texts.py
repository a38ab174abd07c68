"""Test texts and models have names in words: what a perplexity was measured on, and whose models were measured."""

from collections.abc import Mapping
from typing import Any

# In place of a test text's name: every client has measured its own model on its own text.
OWN_TEXT = "own"


def windows_of_text(text: str, entry: Mapping[str, Any]) -> str:
    """Return the name of a test text with the windows of it that were measured, such as ``ptb: 64 × 128 tokens``.

    ``entry`` is the text's entry of ``perplexity_by_text``. Where only some of the windows were measured, the words are
    ``ptb: first 64 of 900 × 128 tokens``. The windows of the clients' own texts are those of all clients together.
    """
    windows, total = entry.get("windows"), entry.get("windows_in_text")
    extent = f"first {windows} of {total}" if windows and total and total > windows else windows
    return f"{'own texts' if text == OWN_TEXT else text}: {extent} × {entry.get('window')} tokens"


def own_models(round: int) -> str:
    """Return the name of the clients' own language models after ``round``.

    The papers' standalone baseline knows nothing of other clients. From the second round on a client prunes what the
    server made of all clients' layers.
    """
    return "standalone" if round == 1 else "clients' own"


def tested_on(row: Mapping[str, Any]) -> str:
    """Return the text that a round's ``perplexity_global`` was measured on, with its windows.

    That is the first text of ``row``, a row of rounds.jsonl. The name is empty where no perplexity was measured.
    """
    return next((windows_of_text(text, entry) for text, entry in (row.get("perplexity_by_text") or {}).items()), "")
