"""Describes this machine to `up`, and makes the one line that installs its version on another.

PEP 610: an installer writes ``direct_url.json`` beside a package that did not come from an index, with the URL of the
wheel or of the folder. The line then copies it over the same ssh. It looks for uv in the places of uv's installer and
of Homebrew, because PATH is not a login's.
"""

import importlib.metadata
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.keyring import Keyring
from splitinfer.system.interfaces import own_addresses
from splitinfer.wire.messages import Versions

_FOLDER_PARTS = ("pyproject.toml", "README.md", "LICENSE", "splitinfer", "transports", "layouts")  # needed for a build
_PATH = 'PATH="$HOME/.local/bin:/opt/homebrew/bin:/usr/local/bin:$PATH"'


@dataclass(frozen=True, slots=True)
class Own:
    """This machine: its public key, if it has one, its name, its versions. ``origin``: the wheel or the folder that its
    installation came from; None: an index. ``program``: the path of its own command, if it has one; it may exist on
    the other machine, too."""

    key: str | None
    name: str
    versions: Versions
    origin: Path | None = None
    program: str | None = None


def own(*, makes_key: bool = True) -> Own:
    """Return this machine. ``makes_key``: make a key if it has none. Raises ConfigError if its key cannot be read."""
    path = Path(sys.prefix, "bin", "splitinfer")
    came_from = origin(importlib.metadata.distribution("splitinfer").read_text("direct_url.json"))
    program = str(path) if path.is_file() else None
    key = Keyring().own().public if makes_key else Keyring().public()
    return Own(key, machine_name(), own_versions(), came_from, program)


def own_names() -> set[str]:
    """Return this machine's names and addresses."""
    name = machine_name()
    short = name.partition(".")[0]
    return {name, short, f"{short}.local", *own_addresses()}


def origin(direct_url: str | None) -> Path | None:
    """Return the wheel or folder that a package's ``direct_url.json`` names, or None if it names none."""
    try:
        url = urlsplit(json.loads(direct_url or "null")["url"])
    except (ValueError, KeyError, TypeError):
        return None
    return Path(unquote(url.path)) if url.scheme == "file" else None


def install_line(ssh: str, versions: Versions, came_from: Path | None) -> str:
    """Return the command that installs this machine's version on the machine ``ssh``. A person runs it here."""
    pins = " ".join(f"--with {name}=={number}" for name, number in (("mlx", versions.mlx), ("mlx-lm", versions.mlx_lm)))
    install = f"{_PATH} uv tool install --force {{}} {pins}"
    if came_from is None:
        return _on(ssh, install.format(f"splitinfer=={versions.splitinfer}"))
    folder = f"splitinfer-{versions.splitinfer}"
    if came_from.is_dir():
        here = f"tar -C {shlex.quote(str(came_from))} -cf - {' '.join(_FOLDER_PARTS)}"
        return f"{here} | " + _on(ssh, f"mkdir -p {folder} && tar -C {folder} -xf - && {install.format(f'./{folder}')}")
    there = shlex.quote(f"./{came_from.name}")
    return _on(ssh, f"cat > {there} && {install.format(there)}") + f" < {shlex.quote(str(came_from))}"


def _on(ssh: str, command: str) -> str:
    return f"ssh {ssh} {shlex.quote(command)}"
