"""The address of a worker elsewhere, as ``--worker`` and ``--key`` give it. Pure.

``emulated+tcp://host:port?link=wifi`` is the same worker over an emulated link (``transports/README.md``), to see what
a slow one looks like.
"""

import re
from dataclasses import dataclass
from typing import Any

from splitinfer.errors import ConfigError

DEFAULT_PORT = 5577
_ADDRESS = re.compile(
    r"(emulated\+)?(?:tcp://)?(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?(?:\?link=(?P<link>[\w.-]+))?"
)
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """``address``: tcp://host:port; ``key``: the worker's public key, if links to it are encrypted; ``link``: the
    emulated link to it, if any."""

    address: str
    host: str
    port: int
    key: str | None = None
    link: str | None = None

    @property
    def stage(self) -> dict[str, Any]:
        """What a stage of a layout says of it."""
        return {"address": self.address, **({} if self.key is None else {"key": self.key})}


def worker_address(text: str, key: str | None) -> WorkerAddress:
    """Read an address: tcp://host:port, host:port or a host alone.

    Raises:
        ConfigError: it is not an address, or the key is not a key.

    >>> worker_address("mini.local", None).address, worker_address("emulated+tcp://[::1]:7?link=wifi", None).link
    ('tcp://mini.local:5577', 'wifi')
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--worker {text!r} is not an address such as tcp://mini.local:5577")
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError(
            "--key is not a key: the worker prints its key when it starts, 64 digits from 0 to 9 and a to f"
        )
    port = int(found["port"] or DEFAULT_PORT)
    if not 1 <= port <= 65535:
        raise ConfigError(f"port {port} of --worker {text!r} is not from 1 to 65535")
    if bool(found[1]) != bool(found["link"]):
        raise ConfigError(f"--worker {text!r}: write an emulated link as emulated+tcp://host:port?link=wifi")
    return WorkerAddress(f"tcp://{found['host']}:{port}", found["host"].strip("[]"), port, key, found["link"])
