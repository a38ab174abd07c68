"""Libraries in C are compiled where fedprune is installed, from the sources in ``native``.

Without a compiler there are none.
"""

import ctypes
import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("native")


@cache
def library(name: str) -> ctypes.CDLL | None:
    """Return the library that was compiled from ``native/{name}.c``, or None where there is none.

    A library that was compiled from another version of this file counts as none.
    """
    try:
        source = (FOLDER / f"{name}.c").read_bytes()
        handle = ctypes.CDLL(str(FOLDER / f"lib{name}.so"))
        source_digest = handle.fedprune_source
    except (OSError, AttributeError):  # or a library of somebody else
        return None
    source_digest.restype = ctypes.c_char_p
    return handle if source_digest().decode() == hashlib.sha256(source).hexdigest() else None
