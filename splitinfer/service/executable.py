"""Which program a service starts: the installed command, by a path that stays.

What is running may be found under several names, and not every one is there tomorrow:

    uv tool, pipx    ~/.local/bin/splitinfer, a link into the tool's environment; both stay across upgrades
    a venv           .venv/bin/splitinfer
    Homebrew         PREFIX/Cellar/splitinfer/0.1.0/libexec/bin/splitinfer; goes with the version, while
                     PREFIX/opt/splitinfer/libexec/bin/splitinfer leads to the installed one (Formula Cookbook:
                     opt_prefix)
    uvx, pipx run    an environment in a cache folder, which may be removed any time (uv's manual, "Tools": what uvx
                     makes is "disposable" and lies in the cache)
"""

import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from splitinfer.errors import ConfigError

_CACHES = (".cache", "Caches", "archive-v0")  # the last is uv's own, wherever UV_CACHE_DIR is
_INSTALL = "install it first, with `uv tool install` or `pipx install`"


def find_executable() -> str:
    """The absolute path of the command that runs. Raises ConfigError: there is none that stays."""
    called = shutil.which(sys.argv[0]) if sys.argv[0].endswith("splitinfer") else None
    beside = Path(sys.prefix, "bin", "splitinfer")  # python -m splitinfer
    candidates = [Path(called).absolute()] if called else [beside] if beside.is_file() else []
    if not candidates:
        raise ConfigError(f"there is no installed command `splitinfer` that a service could start: {_INSTALL}")
    return str(stable(candidates[0], temporary_folders()))


def temporary_folders() -> tuple[Path, ...]:
    """Folders whose content does not stay. The caches of uv and pipx are known by their names."""
    return tuple(Path(folder).resolve() for folder in {tempfile.gettempdir(), "/tmp", "/var/tmp"})


def stable(path: Path, temporary: Iterable[Path]) -> Path:
    """The path to write down for a program at ``path``. Raises ConfigError: it is in a folder that does not stay."""
    lasting = _of_homebrew(path)
    real = lasting.resolve()
    in_cache = any(part in _CACHES for part in real.parts)
    if in_cache or any(real.is_relative_to(folder) for folder in temporary):
        raise ConfigError(f"{path} is in a folder that may be emptied any time, so no service can start it: {_INSTALL}")
    return lasting


def _of_homebrew(path: Path) -> Path:
    """The same program by Homebrew's link to the installed version."""
    parts = path.parts
    if "Cellar" not in parts[:-3]:
        return path
    at = parts.index("Cellar")
    linked = Path(*parts[:at], "opt", parts[at + 1], *parts[at + 3 :])
    return linked if linked.exists() else path
