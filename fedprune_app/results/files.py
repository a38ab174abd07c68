"""How results are written: see :mod:`fedprune_app.files`."""

from fedprune_app.files import append_lines, replace_file

__all__ = ["append_lines", "replace_file"]
