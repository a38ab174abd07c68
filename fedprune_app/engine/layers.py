"""Layers of a model on disk, each packed by the codec in a file of its own, by the version that wrote it."""

from __future__ import annotations

import re
from pathlib import Path

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.files import replace_file

_NAME = re.compile(r"layer-(\d{5,})-version-(\d{5,})\.fp")


class LayerFiles:
    """Written in one step each; a later version does not touch an earlier one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, layer: int, version: int, payload: Payload) -> None:
        """Write a layer."""
        replace_file(self._path(layer, version), codec.pack(payload))

    def load(self, layer: int, version: int, max_bytes: int) -> Payload:
        """Read a layer of at most so many decoded bytes. ``ValueError`` if it is not there or damaged."""
        path = self._path(layer, version)
        try:
            return codec.unpack(path.read_bytes(), max_bytes)
        except (OSError, ValueError) as error:
            raise ValueError(f"layer file {str(path)!r} cannot be read: {error}") from None

    def drop_before(self, layer: int, version: int) -> None:
        """Remove a layer's versions that are older than this one."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            match = _NAME.fullmatch(path.name)
            if match and int(match.group(1)) == layer and int(match.group(2)) < version:
                path.unlink(missing_ok=True)

    def _path(self, layer: int, version: int) -> Path:
        return self.folder / f"layer-{layer:05d}-version-{version:05d}.fp"
