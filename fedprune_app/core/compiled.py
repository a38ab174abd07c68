"""Libraries in C, compiled from the sources in ``native`` at installation; none without a compiler."""

import ctypes
import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("native")


@cache
def library(name: str) -> ctypes.CDLL | None:
    """Return the library compiled from ``native/{name}.c``, or None.

    A library compiled from another version of the source counts as missing.
    """
    try:
        source = (FOLDER / f"{name}.c").read_bytes()
        handle = ctypes.CDLL(str(FOLDER / f"lib{name}.so"))
        source_digest = handle.fedprune_source
    except (OSError, AttributeError):  # or another library of this name
        return None
    source_digest.restype = ctypes.c_char_p
    return handle if source_digest().decode() == hashlib.sha256(source).hexdigest() else None
