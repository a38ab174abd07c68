"""Loading of plug-ins, which add systems, networks, datasets and partitions.

A run names code in three ways:

* ``system``, ``model``, ``dataset`` or ``partition`` is a name that an installed package declares as an entry point of
  the groups in :data:`GROUPS`. The entry point is the module that registers the name.
* ``plugins`` names modules, or files that end in .py; each registers names when it is imported.
* ``model``, ``dataset`` or ``partition`` is ``module:function`` or ``file.py:function``.

Code is imported only if a person named it on this machine: on a command line, in a run-config file, or in a Python
call. Reading a run folder imports no code. A node of a deployment imports plug-ins that are installed there, and code
that its operator allows with ``allowed-plugins``.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from fedprune_app.config import DEFAULTS, ConfigError
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.core.texts import error_text
from fedprune_app.core.torchvision_shim import prepare_torchvision
from fedprune_app.data.names import DATASETS, DEALERS, LOADERS, PARTITIONS
from fedprune_app.models.names import BUILDERS, MODELS
from fedprune_app.plugins.registering import NAMES, clear_caches, origins

log = logging.getLogger("flwr.fedprune")
# by key of the configuration: the group of entry points for its names
GROUPS = {
    "system": "fedprune.systems",
    "model": "fedprune.models",
    "dataset": "fedprune.datasets",
    "partition": "fedprune.partitions",
}
_FUNCTIONS = ("model", "dataset", "partition")
_files: dict[str, tuple[str, ModuleType]] = {}  # by path: the digest and module of the loaded file


@dataclass(frozen=True)
class Code:
    """A module or .py file that a run's ``key`` names, and possibly one ``function`` in it."""

    key: str
    target: str
    function: str = ""

    def __str__(self) -> str:
        return f"{self.target}:{self.function}" if self.function else self.target


def names_in(values: Mapping[str, object]) -> list[str]:
    return [name.strip() for name in str(values.get("plugins") or "").split(",") if name.strip()]


def code_in(values: Mapping[str, object]) -> Iterator[Code]:
    """Yield all code that the settings ``values`` name, except entry points."""
    for target in names_in(values):
        yield Code("plugins", target)
    for key in _FUNCTIONS:
        target, colon, function = str(values.get(key) or "").rpartition(":")
        if colon and function.isidentifier():
            yield Code(key, target, function)


def load(values: Mapping[str, object], *, allows: Callable[[Code], None] | None = None) -> None:
    """Import the code that ``values`` name, so that all their names are registered.

    ``allows`` is called first for each, and raises for code that is not allowed. Raises :class:`ConfigError` for code
    that is missing or fails.
    """
    for code in code_in(values):
        if allows is not None:
            allows(code)
        if code.function:
            _register_function(code)
        else:
            _module_of(code)
    for key, group in GROUPS.items():
        name = str(values.get(key) or DEFAULTS[key])
        if name in ("auto", "auto-bn", *NAMES[key]):
            continue
        for module in _declaring_modules(group, name):
            _module_of(Code(key, module))
            if name not in NAMES[key]:
                raise ConfigError(key, name, which=f"{module} declares and does not register")


def check_named(values: Mapping[str, object], trusted: Mapping[str, object]) -> None:
    """Raise :class:`ConfigError` if ``values`` of a run folder name code that ``trusted`` does not name.

    The settings ``trusted`` come from the user at the command line, who trusts the code.
    """
    targets = {code.target for code in code_in(trusted)}
    if missing := list(dict.fromkeys(code.target for code in code_in(values) if code.target not in targets)):
        raise ConfigError(
            "--plugin",
            ...,
            f"{', '.join(missing)}, if you trust that code",
            which="does not name code that this run used",
        )


def check_reachable(values: Mapping[str, object]) -> None:
    """Raise :class:`ConfigError` for a name that the script or notebook registered: other processes lack it."""
    for key in GROUPS:
        name = str(values.get(key) or DEFAULTS[key])
        if origins.get((key, name)) == "__main__":
            raise ConfigError(
                key,
                name,
                condition="with engine 'inprocess'",
                which="was registered in this script or notebook",
                hint="or put it in a file, and name that in plugins",
            )


def described(values: Mapping[str, object]) -> dict[str, str]:
    """Return the versions, or the SHA-256 of the files, of all plug-ins that ``values`` name."""
    versions = {code.target: _identity(code.target) for code in code_in(values)}
    for key in GROUPS:
        origin = origins.get((key, str(values.get(key) or DEFAULTS[key])), "")
        if origin and not any(_files.get(target, ("", None))[1] is sys.modules.get(origin) for target in versions):
            versions.setdefault(origin, _identity(origin))
    return versions


def changed(values: Mapping[str, object], began_with: Mapping[str, str]) -> dict[str, str]:
    """Return by name a line for each plug-in that ``values`` name and whose code differs from ``began_with``."""
    return {
        name: f"plug-in {name!r} is not the code that the run began with: that was {began_with[name]}, this is {code}"
        for name, code in described(values).items()
        if began_with.get(name, code) != code
    }


def changed_since(info: Values) -> Iterable[str]:
    """Return a line for each plug-in whose code differs from that with which the run of this run.json ended."""
    latest = {**info.get("plugins", {}), **(info.get("plugins_since") or [{}])[-1]}
    return changed(info["config"], latest).values()


def _identity(target: str) -> str:
    if target in _files:
        return f"sha256 {_files[target][0]}"
    top = target.partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, []):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    file = Path(getattr(sys.modules.get(target), "__file__", None) or "")  # "<stdin>" of a script that is piped in
    return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}" if file.is_file() else "unknown"


def _module_of(code: Code) -> ModuleType:
    prepare_torchvision()  # a plug-in may import it
    try:
        return _from_file(code) if code.target.endswith(".py") else importlib.import_module(code.target)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's module may raise anything, also SystemExit
        lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == code.target]
        which = f"cannot be loaded, line {lines[-1]}" if lines else "cannot be loaded"
        raise ConfigError(code.key, code.target, which=which, hint=error_text(error)) from error


@contextmanager
def located() -> Iterator[None]:
    """Add file, line and function to errors of a plug-in's code.

    :class:`ConfigError`, which is for the user, passes unchanged. The traceback is in the log, with FEDPRUNE_LOG=DEBUG.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if not _place_in_plugin(error):
            raise
        log.debug("a plug-in failed", exc_info=True)
        raise RuntimeError(error_line(error)) from error


def error_line(error: BaseException) -> str:
    """Return an error in one line, with the place in a plug-in's code where it was raised, if any."""
    place = _place_in_plugin(error)
    return error_text(error) + (f" ({place})" if place else "")


def _place_in_plugin(error: BaseException) -> str:
    """Return the last place of an error's traceback that is in a plug-in; empty if there is none."""
    names = {module.__name__ for _, module in _files.values()} | {*origins.values()}
    places = [
        f"{Path(frame.f_code.co_filename).name}, line {line}, in {frame.f_code.co_name}"
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in names
    ]
    return places[-1] if places else ""


def _from_file(code: Code) -> ModuleType:
    """Import a file, again if its content has changed."""
    path = Path(code.target)
    if not path.is_absolute():
        raise ConfigError(code.key, code.target, "an absolute path, or a module")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(code.key, code.target, which="cannot be read", hint=str(error)) from None
    if code.target not in _files or _files[code.target][0] != digest:
        name = f"fedprune_plugin_{path.stem}_{hashlib.sha256(code.target.encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look for the module of a class
        spec.loader.exec_module(module)
        _files[code.target] = digest, module
    return _files[code.target][1]


def _register_function(code: Code) -> None:
    function, name = _function_in(code), str(code)
    tables: dict[str, tuple[ValueDict, dict[str, str]]] = {
        "model": (BUILDERS, MODELS),
        "dataset": (LOADERS, DATASETS),
        "partition": (DEALERS, PARTITIONS),
    }
    functions, summaries = tables[code.key]
    is_other = functions.get(name) not in (None, function)
    functions[name], summaries[name] = function, f"{code.function} of {code.target}"
    if is_other:
        clear_caches()


def function(key: str, name: str) -> Callable[..., Any]:
    """Return the function that ``file.py:function`` or ``module:function`` names; ``key`` is for errors.

    Raises :class:`ConfigError` if there is none.
    """
    target, _, attribute = name.rpartition(":")
    return _function_in(Code(key, target, attribute))


def _function_in(code: Code) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(_module_of(code), code.function, None)
    if not callable(function):
        raise ConfigError(code.key, str(code), f"a function in {code.target}")
    return function


@lru_cache(maxsize=64)  # reads files of all installed packages, and runs with every message to a client
def _declaring_modules(group: str, name: str) -> tuple[str, ...]:
    return tuple(entry.module for entry in importlib.metadata.entry_points(group=group, name=name))


def installed() -> dict[str, dict[str, str]]:
    """Return by key the names that installed plug-ins declare, each with the module that registers it."""
    return {
        key: {entry.name: entry.module for entry in importlib.metadata.entry_points(group=group)}
        for key, group in GROUPS.items()
    }
