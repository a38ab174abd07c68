"""Hidden states stay in the memory of a client's process from one message to the next, within a bound."""

from __future__ import annotations

import os
from collections import OrderedDict

import torch
from torch import Tensor

_SHARE = 4
"""Hidden states may fill one part in so many of a device's memory."""
Key = tuple[str, str, int]
"""The folder of a client's states, the name of the run, and the step after which the states are."""
_held: OrderedDict[Key, Tensor] = OrderedDict()


def home_of(num_bytes: int, device: torch.device) -> torch.device:
    """Return where hidden states of ``num_bytes`` lie: on ``device`` if they take little of it, else on the CPU."""
    return device if num_bytes <= bound_of(device) else torch.device("cpu")


def bound_of(device: torch.device) -> int:
    """Return how many bytes of hidden states may lie on a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // _SHARE
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _SHARE


def hold(key: Key, hidden: Tensor) -> None:
    """Keep hidden states, and let those go that were kept longest where a device holds too many.

    Other steps of the same client are let go. The caller must not write to ``hidden`` from now on.
    """
    for other in [each for each in _held if each[:2] == key[:2]]:
        del _held[other]
    _held[key] = hidden
    alike = [each for each, states in _held.items() if states.device == hidden.device]
    total = sum(_held[each].nbytes for each in alike)
    while alike and total > bound_of(hidden.device):
        total -= _held.pop(alike.pop(0)).nbytes


def take(key: Key) -> Tensor | None:
    """Return the hidden states that were kept under ``key``, which are the caller's from now on; None without any."""
    return _held.pop(key, None)


def forget() -> None:
    """Let all hidden states go, as the end of a process does."""
    _held.clear()
