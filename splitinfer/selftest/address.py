"""The address of a worker elsewhere, as ``--worker`` and ``--key`` give it. Pure.

``emulated+tcp://host:port?link=wifi`` is the same worker over an emulated link (``transports/README.md``), to see what
a slow one looks like.
"""

import re
from dataclasses import dataclass
from urllib.parse import parse_qs

from splitinfer.errors import ConfigError

DEFAULT_PORT = 5577
_ADDRESS = re.compile(
    r"(?P<emulated>emulated\+)?(?:tcp://)?(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?(?:\?(?P<query>\S*))?"
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


def worker_address(text: str, key: str | None) -> WorkerAddress:
    """Read an address: tcp://host:port, host:port or a host alone.

    Raises:
        ConfigError: it is none, or the key is no key.

    >>> worker_address("mini.local", None).address, worker_address("emulated+tcp://[::1]:7?link=wifi", None).link
    ('tcp://mini.local:5577', 'wifi')
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--worker {text!r} is no address such as tcp://mini.local:5577")
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError("--key is no key: the worker prints one of 64 digits from 0 to 9 and a to f when it starts")
    port = int(found["port"] or DEFAULT_PORT)
    if not 1 <= port <= 65535:
        raise ConfigError(f"port {port} of --worker {text!r} is not from 1 to 65535")
    return WorkerAddress(f"tcp://{found['host']}:{port}", found["host"].strip("[]"), port, key, _link(found, text))


def _link(found: re.Match[str], text: str) -> str | None:
    named = parse_qs(found["query"] or "").get("link", [])
    if bool(found["emulated"]) != bool(named) or (found["query"] and not named):
        raise ConfigError(f"--worker {text!r}: an emulated link is emulated+tcp://host:port?link=wifi, say")
    return named[0] if named else None
