"""A model's layers on disk, each in a versioned file packed by the codec."""

import re
from pathlib import Path

from fedprune_app.core import codec
from fedprune_app.core.digests import verified_body, with_digest
from fedprune_app.core.payload import Payload
from fedprune_app.files import replace_file

_NAME = re.compile(r"layer-(\d{5,})-version-(\d{5,})\.fp")


class LayerFiles:
    """Files of layers, each written atomically, with a digest; a later version does not overwrite an earlier one.

    ``owner`` is whose layers these are. If it is given, layers of other owners count as damaged.
    """

    def __init__(self, folder: Path, owner: str | None = None) -> None:
        self.folder = folder
        self.owner = owner

    def save(self, layer: int, version: int, payload: Payload) -> None:
        body = codec.encode_once(payload)[codec.KEY].data
        replace_file(self._path(layer, version), with_digest(body, self._metadata(layer, version)), private=True)

    def load(self, layer: int, version: int, max_bytes: int) -> Payload:
        """Read a layer of at most ``max_bytes`` decoded bytes.

        Raises ``ValueError`` if the layer is missing or damaged.
        """
        body = self.check(layer, version)
        try:
            return codec.unpack(body, max_bytes)
        except ValueError as error:
            raise ValueError(f"layer file {str(self._path(layer, version))!r} is damaged: {error}") from None

    def check(self, layer: int, version: int) -> memoryview:
        """Return a layer in packed form. Raises ``ValueError`` naming the file if it is missing or damaged."""
        path = self._path(layer, version)
        try:
            return verified_body(path.read_bytes(), self._metadata(layer, version))
        except OSError as error:
            raise ValueError(f"layer file {str(path)!r} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"layer file {str(path)!r} is damaged: {error}") from None

    def _metadata(self, layer: int, version: int) -> dict[str, int | str]:
        metadata: dict[str, int | str] = {"layer": layer, "version": version}
        return metadata if self.owner is None else {**metadata, "owner": self.owner}

    def drop_before(self, layer: int, version: int) -> None:
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            match = _NAME.fullmatch(path.name)
            if match and int(match.group(1)) == layer and int(match.group(2)) < version:
                path.unlink(missing_ok=True)

    def _path(self, layer: int, version: int) -> Path:
        return self.folder / f"layer-{layer:05d}-version-{version:05d}.fp"
