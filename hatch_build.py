"""How a wheel is built: the packages ``strategies``, ``clients`` and ``gallery`` go below ``fedprune_app``.

In a checkout, and in the bundle that Flower ships, the three packages stand beside each other. At the top of
site-packages the names ``strategies`` and ``clients`` would collide with anybody's. So a wheel holds them as
``fedprune_app.strategies`` and ``fedprune_app.clients``, and its modules import them under these names.

The libraries in C are compiled here, with the compiler ``$CC``, else ``cc``. They use nothing of Python's or PyTorch's,
so one wheel serves every Python of a platform. Without a compiler the wheel is for any platform, linear layers stay
dense, and sums over clients take longer.

The licence gets its SPDX name here, which an index asks for: Flower's bundles insist on a file in pyproject.toml. With
``FEDPRUNE_SOURCE``, the address of the repository's files at this release, README's pictures and links lead there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_INNER = ("strategies", "clients", "gallery")
_FROM = re.compile(r"^(\s*)from (strategies|clients)(?=[.\s])", re.MULTILINE)
_IMPORT = re.compile(r"^(\s*)import (strategies|clients)$", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import\s.*\b|from\s+)(strategies|clients)\b", re.MULTILINE)


_RELATIVE = re.compile(r"(\]\()(?![a-z]+:|#)(?=[^)]+\))")


class MetadataHook(MetadataHookInterface):  # type: ignore[misc]  # hatchling is there when a wheel is built
    """The hook completes what pyproject.toml cannot say."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["license"] = "Apache-2.0"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if source := os.environ.get("FEDPRUNE_SOURCE", "").rstrip("/"):
            text = _RELATIVE.sub(rf"\1{source}/", text)
            metadata["urls"]["Source"] = source
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class WheelHook(BuildHookInterface):  # type: ignore[misc, type-arg]  # hatchling is there when a wheel is built
    """The hook makes the tree that a wheel holds, in a folder of its own."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Give hatchling the files of a wheel; an editable installation uses the checkout as it is."""
        if version == "editable":
            compile_libraries(Path(self.root) / "fedprune_app" / "core" / "native")
            return
        root, self._tree = Path(self.root), Path(tempfile.mkdtemp(prefix="fedprune-wheel-"))
        package = self._tree / "fedprune_app"
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so")
        shutil.copytree(root / "fedprune_app", package, ignore=ignored)
        for name in _INNER:
            shutil.copytree(root / name, package / name, ignore=ignored)
        shutil.copytree(root / "configs", package / "configs", ignore=ignored)
        for config in (root / "gallery").glob("*.toml"):  # by its name, as `-c ssfl`
            shutil.copy(config, package / "configs")
        for module in package.rglob("*.py"):
            module.write_text(below_fedprune(module.read_text(encoding="utf-8")), encoding="utf-8")
        if compile_libraries(package / "core" / "native"):
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())
        build_data["force_include"][str(package)] = "fedprune_app"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the tree."""
        if version != "editable":
            shutil.rmtree(self._tree)


def below_fedprune(source: str) -> str:
    """Return a module's source with imports of ``strategies`` and ``clients`` from below ``fedprune_app``.

    Raises ``ValueError`` for an import of another form.
    """
    found = _FROM.sub(r"\1from fedprune_app.\2", source)
    found = _IMPORT.sub(r"\1from fedprune_app import \2", found)
    if left := _OTHER.search(found.replace("from fedprune_app import", "")):
        raise ValueError(f"an import of {left[1]} has a form that a wheel cannot change: {left[0].strip()!r}")
    return found


def compile_libraries(folder: Path) -> bool:
    """Compile each ``NAME.c`` of a folder to ``libNAME.so`` beside it; return whether there was a compiler that could.

    OpenMP is left out where the compiler has none. The library then uses one thread.
    """
    compiled = [_compile(source) for source in sorted(folder.glob("*.c"))]
    return all(compiled)


def _compile(source: Path) -> bool:
    compiler = shlex.split(os.environ.get("CC", "")) or [*filter(None, map(shutil.which, ("cc", "gcc", "clang")))][:1]
    library = source.with_name(f"lib{source.stem}.so")
    # Each operation is rounded by itself, so that results are those of PyTorch's operations, bit by bit.
    options = ["-O3", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC"]
    options.append(f'-DSOURCE="{hashlib.sha256(source.read_bytes()).hexdigest()}"')
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=source.parent) as folder:
        new = Path(folder) / library.name
        for more in (["-fopenmp"], []):
            try:
                command = [*compiler, *options, *more, "-o", str(new), str(source)]
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            new.replace(library)  # at once: another process may be using the old one
            return True
    return False
