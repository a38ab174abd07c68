"""What somebody gives: the settings of files and of a command line or a call, and the folder of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedprune_app import plugins
from fedprune_app.config import OPTIONS, Scalar, parse_override, paths_from_here, read_toml
from fedprune_app.config.errors import unknown_key
from fedprune_app.config.toml import config_file


@dataclass(frozen=True)
class Given:
    """These settings are given, and this is asked of a run with them.

    ``base`` has settings that nobody gives now: those of a run that has begun. ``files`` win over it, later files over
    earlier ones, and the command line wins over all. ``out`` is the run's folder; with ``resume`` the run in it
    continues. ``is_whole`` says that the settings are all that there are: a resumed run takes none from its run.json.
    ``where`` is named in errors.
    """

    base: Mapping[str, object] = field(default_factory=dict)
    files: Sequence[Mapping[str, Scalar]] = ()
    on_command_line: Mapping[str, Scalar] = field(default_factory=dict)
    out: Path | None = None
    resume: bool = False
    accept_loss: bool = False
    is_whole: bool = False
    where: str = ""

    @property
    def folder(self) -> Path:
        """The absolute path of ``out``, which must be given."""
        assert self.out is not None
        return self.out.expanduser().resolve()

    @property
    def chosen(self) -> dict[str, Scalar]:
        """The settings of files and of the command line, with absolute paths."""
        sources = (*self.files, self.on_command_line)
        return paths_from_here({key: value for source in sources for key, value in source.items()})

    def for_run_in(self, out: Path, *, resume: bool = False, accept_loss: bool = False) -> Given:
        return replace(self, out=out, resume=resume, accept_loss=accept_loss)


def given_in(
    files: Sequence[Path] | None, overrides: Sequence[str] | None, more_plugins: Sequence[str] | None = None
) -> Given:
    """Return the settings in run-config files, or shipped ones by name, and in texts ``key=value``, the last of a key.

    ``more_plugins`` are added to the key ``plugins``. All code that the settings name is loaded.
    """
    in_files = [read_toml(config_file(file)) for file in files or []]
    return with_plugins(in_files, dict(map(parse_override, overrides or [])), more_plugins)


def with_plugins(
    files: Sequence[Mapping[str, Scalar]],
    on_command_line: Mapping[str, Scalar],
    more_plugins: Sequence[str] | None = None,
) -> Given:
    given = Given(files=files, on_command_line=on_command_line)
    if more_plugins:
        names = ",".join(dict.fromkeys([*plugins.names_in(given.chosen), *more_plugins]))
        given = replace(given, on_command_line={**on_command_line, "plugins": names})
    plugins.load(given.chosen)
    for key in on_command_line:  # before anything heavy is imported
        if key not in OPTIONS:
            raise unknown_key(key, OPTIONS)
    return given


def trusted_code(names: Sequence[str] | None) -> list[str]:
    """Load the plug-ins of these names, and return them with absolute paths."""
    return plugins.names_in(with_plugins([], {}, names).chosen)


def of_run(settings: Mapping[str, object], trusted: Collection[str]) -> Given:
    """Return the settings that a run folder holds, whose code may be loaded where ``trusted`` names it."""
    plugins.check_named(settings, {"plugins": ",".join(trusted)})
    return Given(settings)
