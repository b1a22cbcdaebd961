"""Parses and writes the addresses of workers; layouts, options and ssh hosts share this one grammar.

tcp://HOST:PORT    HOST:PORT    HOST         HOST is a name or a number; without a port, WORKER_PORT is used
tcp://[::1]:PORT   [::1]:PORT   [::1]        an IPv6 address is written in brackets
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address

from splitinfer.errors import ConfigError

WORKER_PORT = 5577

_FORM = re.compile(r"(?P<host>\w[\w.-]*|\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%\w[\w.-]*)?\])(?::(?P<port>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host, without brackets, and a port. ``str`` gives the form that layouts use."""

    host: str
    port: int = WORKER_PORT

    @classmethod
    def parse(cls, text: str, port: int = WORKER_PORT) -> "Endpoint":
        """Return the endpoint that ``text`` names, with the default ``port`` if the text has none.

        Raises:
            ConfigError: ``text`` is not an address.

        >>> str(Endpoint.parse("mini.local")), str(Endpoint.parse("[fe80::1%en5]:7"))
        ('tcp://mini.local:5577', 'tcp://[fe80::1%en5]:7')
        """
        scheme, mark, rest = text.strip().rpartition("://")
        if mark and scheme != "tcp":
            rdma = "; for RDMA a layout has 'transport: rdma' beside it" if scheme == "rdma" else ""
            raise ConfigError(f"{text!r:.100} begins with {scheme}://; write host:port or tcp://host:port{rdma}")
        match = _FORM.fullmatch(rest)
        if match is None:
            cure = (
                "an IPv6 address stands in brackets, as in [::1]:5577"
                if rest.count(":") > 1
                else "write host, host:port or tcp://host:port"
            )
            raise ConfigError(f"{text!r:.100} is not an address; {cure}")
        digits = match["port"]
        number = port if digits is None else int(digits.lstrip("0")[:6] or 0)
        if not 1 <= number <= 65535:
            raise ConfigError(f"port {digits:.10} of {text!r:.100} is not from 1 to 65535")
        return cls(match["host"].strip("[]"), number)

    def __str__(self) -> str:
        return f"tcp://{self.authority}"

    @property
    def authority(self) -> str:
        """``host:port``, as in URLs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """A name for the machine: the first part of its host name. Empty if the host is a number."""
        first = self.host.partition(".")[0]
        return first if first[:1].isalpha() and ":" not in self.host else ""


def free_name(name: str, taken: Collection[str]) -> str:
    """Return ``name``, with a number appended if it is taken."""
    count, found = 1, name
    while found in taken:
        count += 1
        found = f"{name}-{count}"
    return found


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``, a name or a number.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "[::1]", "::1%lo0", "0.0.0.0", "mini.local", "")]
    [True, True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
