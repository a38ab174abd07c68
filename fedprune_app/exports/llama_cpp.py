"""GGUF files in llama.cpp, by the package xllamacpp: to continue a text, and to measure the time per token."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from fedprune_app.core.texts import one_line

_CONTEXT = 1024  # tokens
_TURNS = 5
_TIMED = 32  # tokens in a turn


class Continuation(NamedTuple):
    """Generated text, the ids of its tokens, and the milliseconds per token."""

    text: str
    tokens: list[int]
    milliseconds: float


class LlamaCpp:
    """Runs a GGUF file on the CPU with ``threads`` threads; with -1 llama.cpp chooses their number.

    Raises ``ValueError`` if xllamacpp is not installed, or if llama.cpp cannot load the file.
    """

    def __init__(self, path: Path, threads: int = -1) -> None:
        try:
            import xllamacpp
        except ImportError:
            raise ValueError(
                "GGUF files run with the package xllamacpp: install the extra fedprune[llamacpp]"
            ) from None
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = _CONTEXT, 1, 0
        parameters.verbosity = -1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        try:
            self._server = xllamacpp.Server(parameters)
        except RuntimeError as error:
            raise ValueError(f"llama.cpp cannot load {str(path)!r}: {str(error).splitlines()[0]}") from None

    def complete(self, prompt: str | Sequence[int], most: int, *, ends: bool = True) -> Continuation:
        """Return at most ``most`` tokens after a text or token ids, always the likeliest one.

        With ``ends`` an end-of-text token stops the text.
        """
        request = {"prompt": prompt, "n_predict": most, "temperature": 0.0, "ignore_eos": not ends}
        request |= {"return_tokens": True, "cache_prompt": False}
        address = f"{self._server.listening_address}/completion"
        reply = httpx.post(address, json=request, timeout=None, trust_env=False)
        if reply.is_error:
            raise ValueError(f"llama.cpp refuses the text: {one_line(reply.text)[:200]}")
        answer = reply.json()
        return Continuation(answer["content"], answer["tokens"], answer["timings"]["predicted_per_token_ms"])


def token_milliseconds(paths: Sequence[Path]) -> list[float]:
    """Return each file's median milliseconds per token on one thread; the files take turns."""
    models = [LlamaCpp(path, threads=1) for path in paths]
    turns = [[model.complete([1], _TIMED, ends=False).milliseconds for model in models] for _ in range(_TURNS + 1)]
    return [statistics.median(times) for times in zip(*turns[1:], strict=True)]
