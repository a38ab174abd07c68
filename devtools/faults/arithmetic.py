"""Processes of a simulated run compute from equal numbers once.

A process that resumes a run repeats rounds of the process before. Gradients and tests of models are functions of
numbers alone, and take half of a small run's time. All else is done anew every time: above all what reads, writes,
draws or decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from clients import base, dispfl, fedfomo
from fedprune_app.learning import grouped, work
from fedprune_app.learning.evaluate import dense_gradient, evaluate
from fedprune_app.learning.grouped import GroupedForm
from fedprune_app.privacy import clipped_sums
from strategies import fedltp as fedltp_server


class Remembered:
    """Results of gradients and tests of models, kept by the numbers from which they were computed."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def forget(self) -> None:
        """Drop all results."""
        self._found.clear()

    def _once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        if key not in self._found:
            self._found[key] = compute()
        return self._found[key]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let gradients and tests of models be looked up here until the block ends."""
        with ExitStack() as on:
            on.enter_context(mock.patch.object(work, "grouped_gradients", self._gradients(grouped.grouped_gradients)))
            on.enter_context(mock.patch.object(dispfl, "dense_gradient", self._of_model(dense_gradient)))
            for module in (base, fedfomo, fedltp_server):
                on.enter_context(mock.patch.object(module, "evaluate", self._of_model(evaluate)))
            methods = {name: self._clipped_sums(method) for name, method in clipped_sums.METHODS.items()}
            on.enter_context(mock.patch.dict(clipped_sums.METHODS, methods))
            yield

    def _gradients(self, compute: Callable[..., tuple[Tensor, list[Tensor]]]) -> Callable[..., Any]:
        def remembered(
            form: GroupedForm, weights: Mapping[str, Tensor], leaves: Sequence[Tensor], *examples: Tensor
        ) -> tuple[Tensor, list[Tensor]]:
            # the result is kept with its form, since a later form may have the id of one that is gone
            trained = tuple(name for name, values in weights.items() if values.requires_grad)
            key = id(form), tuple(weights), trained, _digest((*weights.values(), *examples))
            found: tuple[tuple[Tensor, list[Tensor]], GroupedForm]
            found = self._once(key, lambda: (compute(form, weights, leaves, *examples), form))
            return found[0]

        return remembered

    def _of_model(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(model: nn.Module, *examples: Tensor, **more: Any) -> Any:
            key = compute.__name__, *_key(model), tuple(more.items()), _digest(examples)
            return self._once(key, lambda: compute(model, *examples, **more))

        return remembered

    def _clipped_sums(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def remembering(
            model: nn.Module, trained: Mapping[str, Tensor], masks: Mapping[str, Tensor], clip_norm: float
        ) -> Iterator[Callable[..., Any]]:
            with method(model, trained, masks, clip_norm) as compute:

                def remembered(*examples: Tensor, **part: Any) -> dict[str, Tensor]:
                    if part:
                        return compute(*examples, **part)  # type: ignore[no-any-return]
                    numbers = _digest((*masks.values(), *examples))
                    key = id(method), clip_norm, *_key(model), tuple(trained), tuple(masks), numbers
                    return self._once(key, lambda: compute(*examples))  # type: ignore[no-any-return]

                yield remembered

        return remembering


def _key(model: nn.Module) -> tuple[Hashable, ...]:
    state = model.state_dict()
    return type(model).__qualname__, tuple(state), model.training, _digest(state.values())


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.digest()
