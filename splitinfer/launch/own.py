"""This machine, as `up` speaks of it."""

import sys
from pathlib import Path

import psutil

from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.keyring import Keyring
from splitinfer.launch.install import own_origin
from splitinfer.launch.steps import Own


def own() -> Own:
    """This machine's public key, name and versions. Raises ConfigError: its key cannot be read."""
    return Own(Keyring().own().public, machine_name(), own_versions(), own_origin())


def own_program() -> str | None:
    """The path of the command of this installation, by which the same may be found elsewhere."""
    path = Path(sys.prefix, "bin", "splitinfer")
    return str(path) if path.is_file() else None


def own_addresses() -> set[str]:
    """This machine's names and addresses."""
    name = machine_name()
    short = name.partition(".")[0]
    addresses = {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}
    return {name, short, f"{short}.local", *addresses}
