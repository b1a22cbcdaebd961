"""Describes a service as values: the worker's program and options, and its state.

The program is the installed command, by a lasting path: the link of `uv tool` and pipx in ~/.local/bin, or a venv's
bin. The environment of uvx or `pipx run` is "disposable" (uv's manual, "Tools") and in a cache, so it is refused.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitinfer.errors import ConfigError

_CARRIED = (
    "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
)  # fmt: skip
"""The variables that locate models, stored KV and keys; none is secret. A service does not see the shell's others."""
_CACHES = (".cache", "Caches", "archive-v0")  # the last is uv's own, at any UV_CACHE_DIR
_INSTALL = "install it first, with `uv tool install` or `pipx install`"


NAME = "worker"  # of the service, and of the command that it runs
LABEL = f"io.splitinfer.{NAME}"  # its name for launchd
UNIT = f"splitinfer-{NAME}.service"  # its name for systemd
STOP_SECONDS = 20  # from SIGTERM to SIGKILL; longer than the command takes to end in the worst case


@dataclass(frozen=True, slots=True)
class Definition:
    """A service, as its file describes it.

    command: the program's absolute path, the command's name and its options, as words.
    environment: the variables that it gets in addition to the system's.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """The system's state of a service.

    is_loaded: the system knows it. pid: None if it does not run. starts: the number of its starts, or None if unknown.
    last_exit: how it ended last, or None if it never ended or the system does not say.
    """

    is_loaded: bool
    pid: int | None = None
    starts: int | None = None
    last_exit: str | None = None

    @property
    def is_running(self) -> bool:
        return self.pid is not None


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that a service also needs, with absolute paths."""
    found = {name: environment[name] for name in _CARRIED if environment.get(name)}
    is_path = ("_HOME", "_CACHE")
    return {name: os.path.abspath(value) if name.endswith(is_path) else value for name, value in found.items()}  # noqa: PTH100


def absolute(value: str) -> str:
    """Return an option's path as an absolute one. A word that is not a path ("none", a hub id) stays unchanged."""
    if not value or value == "none":
        return value
    path = Path(os.path.expanduser(value))  # noqa: PTH111 - unlike Path, it keeps an unknown ~user, which the command reports
    return str(path.absolute()) if path.exists() or value[0] in "~./" else value


# ----- the program ---------------------------------------------------------------------------------


def find_executable() -> str:
    """Return the absolute path of the running command. Raises ConfigError if it has no lasting path."""
    called = shutil.which(sys.argv[0]) if sys.argv[0].endswith("splitinfer") else None
    beside = Path(sys.prefix, "bin", "splitinfer")  # python -m splitinfer
    path = Path(called).absolute() if called else beside
    if not path.is_file():
        raise ConfigError(f"there is no installed command `splitinfer` that a service could start: {_INSTALL}")
    return str(stable(path, temporary_folders()))


def temporary_folders() -> tuple[Path, ...]:
    """Return the system's folders for temporary files. The caches of uv and pipx are recognised by their names."""
    return tuple(Path(folder).resolve() for folder in {tempfile.gettempdir(), "/tmp", "/var/tmp"})


def stable(path: Path, temporary: Iterable[Path]) -> Path:
    """Return ``path`` for a service's file. Raises ConfigError if the program is in a folder that may be emptied."""
    real = path.resolve()
    if any(part in _CACHES for part in real.parts) or any(real.is_relative_to(folder) for folder in temporary):
        raise ConfigError(f"{path} is in a folder that may be emptied any time, so no service can start it: {_INSTALL}")
    return path


# -- where a service is installed --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServicePlace:
    """Where a service is installed.

    platform: a value of ``sys.platform``. user: the user's id. sleep: waits for a number of seconds.
    """

    platform: str
    home: Path
    user: int
    environment: Mapping[str, str] = field(default_factory=dict)
    sleep: Callable[[float], None] = time.sleep


def here() -> ServicePlace:
    """Return the place of this process's user on this machine."""
    return ServicePlace(sys.platform, Path.home(), os.geteuid(), dict(os.environ))
