"""This machine, as `up` speaks of it, and the one line that installs its version on another.

PEP 610: an installer writes ``direct_url.json`` beside a package that did not come from an index, with the URL of the
wheel or of the folder. The line then takes that along, over the same ssh. uv is looked for where its installer and
Homebrew put it, because PATH is not that of a login.
"""

import importlib.metadata
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import psutil

from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.keyring import Keyring
from splitinfer.wire.messages import Versions

_FOLDER_PARTS = ("pyproject.toml", "README.md", "LICENSE", "splitinfer", "transports", "layouts")  # what a build needs
_PATH = 'PATH="$HOME/.local/bin:/opt/homebrew/bin:/usr/local/bin:$PATH"'


@dataclass(frozen=True, slots=True)
class Origin:
    """Where this installation came from: a wheel's path, a folder's, or, without a path, an index."""

    path: str | None = None
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class Own:
    """This machine: its public key, its name, its versions, and where its installation came from. ``program``: the path
    of its own command, if it has one: the same may be found elsewhere."""

    key: str
    name: str
    versions: Versions
    origin: Origin = field(default_factory=Origin)
    program: str | None = None


def own() -> Own:
    """This machine. Raises ConfigError: its key cannot be read."""
    path = Path(sys.prefix, "bin", "splitinfer")
    came_from = origin(importlib.metadata.distribution("splitinfer").read_text("direct_url.json"))
    program = str(path) if path.is_file() else None
    return Own(Keyring().own().public, machine_name(), own_versions(), came_from, program)


def own_addresses() -> set[str]:
    """This machine's names and addresses."""
    name = machine_name()
    short = name.partition(".")[0]
    addresses = {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}
    return {name, short, f"{short}.local", *addresses}


def origin(direct_url: str | None) -> Origin:
    """The origin that a package's ``direct_url.json`` says; ``None``: it has none."""
    try:
        read = json.loads(direct_url or "null")
        url = urlsplit(read["url"])
    except (ValueError, KeyError, TypeError):
        return Origin()
    if url.scheme != "file":
        return Origin()
    return Origin(unquote(url.path), "dir_info" in read)


def install_line(ssh: str, versions: Versions, came_from: Origin) -> str:
    """The command that a person runs here, so that the machine ``ssh`` gets the same version."""
    pins = " ".join(f"--with {name}=={number}" for name, number in (("mlx", versions.mlx), ("mlx-lm", versions.mlx_lm)))
    install = f"{_PATH} uv tool install --force {{}} {pins}"
    if came_from.path is None:
        return _on(ssh, install.format(f"splitinfer=={versions.splitinfer}"))
    folder = f"splitinfer-{versions.splitinfer}"
    if came_from.is_folder:
        here = f"tar -C {shlex.quote(came_from.path)} -cf - {' '.join(_FOLDER_PARTS)}"
        return f"{here} | " + _on(ssh, f"mkdir -p {folder} && tar -C {folder} -xf - && {install.format(f'./{folder}')}")
    name = PurePosixPath(came_from.path).name
    there = shlex.quote(f"./{name}")
    return _on(ssh, f"cat > {there} && {install.format(there)}") + f" < {shlex.quote(came_from.path)}"


def _on(ssh: str, command: str) -> str:
    return f"ssh {ssh} {shlex.quote(command)}"
