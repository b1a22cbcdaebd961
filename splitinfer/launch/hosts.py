"""Reads the hosts from the command line, from a hostfile of mlx.launch, or from the last `up`. Pure.

A word is ``[NAME=][USER@]HOST[:PORT]``. HOST is an argument of `ssh`, so it may be an alias of ~/.ssh/config; PORT is
the worker's, not ssh's. A word that begins with "-" would be an option to ssh; it is not an ``Endpoint``, and refused.

A hostfile has MLX's form (its page "Launching Distributed Programs"; ``Hostfile.from_file`` in its
``_distributed_utils/common.py``): a list of ``{"ssh", "ips", "rdma"}``, or a mapping with that list under ``hosts``
beside ``backend`` and ``envs``. Its first host is often the machine that reads it. Interfaces under ``rdma`` are not
used: a layout says which links are RDMA.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pydantic

from splitinfer.common.endpoint import WORKER_PORT, Endpoint, free_name, is_loopback
from splitinfer.errors import ConfigError

MOST_HOSTS = 64

_WORD = re.compile(r"(?:(?P<name>[A-Za-z][\w.-]*)=)?(?P<user>[A-Za-z0-9_][\w.+-]*@)?(?P<at>[^@=\n]*)")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine to run a worker on.

    name: of its stage, also for messages. ssh: the argument of ssh, ``[USER@]HOST``. address: of its worker, without
    brackets; None: the address that ssh connects to. port: its worker's.
    """

    name: str
    ssh: str
    address: str | None = None
    port: int = WORKER_PORT

    def url(self, hostname: str) -> str:
        """Return the worker's address in a layout. ``hostname``: the address that ssh connects to."""
        return str(Endpoint(self.address or hostname, self.port))


def from_words(words: Iterable[str], port: int = WORKER_PORT) -> tuple[Host, ...]:
    """Return the hosts in a command line's words. Raises ConfigError if a word is not a host, or two are the same.

    >>> [(each.name, each.ssh, each.port) for each in from_words(["mini.local", "air=eve@10.0.0.3:7000"])]
    [('mini', 'mini.local', 5577), ('air', 'eve@10.0.0.3', 7000)]
    """
    return _named(_host(word, port) for word in words)


def _host(word: str, port: int) -> Host:
    match = _WORD.fullmatch(word)
    try:
        if match is None or "://" in word:
            raise ConfigError(f"{word!r:.100} is not a host")
        at = Endpoint.parse(match["at"], port)
    except ConfigError as error:
        form = "a host is [NAME=][USER@]HOST[:PORT], HOST as ssh knows it, PORT the worker's"
        raise ConfigError(f"{error}: {form}") from error
    return Host(match["name"] or "", f"{match['user'] or ''}{at.host}", None, at.port)


def from_hostfile(text: str, where: str, own: Collection[str], port: int = WORKER_PORT) -> tuple[Host, ...]:
    """Return the hosts of a hostfile, without this machine.

    ``where``: the file, for messages. ``own``: this machine's names and addresses.

    Raises:
        ConfigError: the text is not a hostfile, or names no other machine.
    """
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    entries = read.get("hosts") if isinstance(read, dict) else read
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f'{where} is not a hostfile: it needs a list of {{"ssh": ..., "ips": [...]}}')
    hosts = [_entry(entry, f"host {number} of {where}", port) for number, entry in enumerate(entries, 1)]
    others = [each for each in hosts if not _is_own(each, own)]
    if not others:
        raise ConfigError(f"{where} names no machine but this one")
    return _named(others)


def _entry(entry: Any, where: str, port: int) -> Host:
    ssh, ips = (entry.get("ssh"), entry.get("ips") or []) if isinstance(entry, dict) else (None, [])
    if not isinstance(ssh, str) or "=" in ssh or (host := _host(ssh, port)).port != port:
        raise ConfigError(f"{where} has no name for ssh")
    if not isinstance(ips, list) or not all(isinstance(ip, str) for ip in ips):
        raise ConfigError(f"'ips' of {where} is not a list of addresses")
    return replace(host, address=Endpoint.parse(Endpoint(ips[0], port).authority).host if ips else None)


def _is_own(host: Host, own: Collection[str]) -> bool:
    names, places = {each.lower() for each in own}, (host.ssh.rpartition("@")[2].lower(), (host.address or "").lower())
    return any(place in names or is_loopback(place) for place in places)


def _named(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return the hosts, each with a distinct name. Raises ConfigError if two are the same place, or they are too
    many."""
    found: list[Host] = []
    for host in hosts:
        if any((each.ssh, each.port) == (host.ssh, host.port) for each in found):
            raise ConfigError(f"{host.ssh} is named twice")
        if host.name and any(each.name == host.name for each in found):
            raise ConfigError(f"two hosts are named {host.name}")
        found.append(host if host.name else replace(host, name=_name(host, found)))
    if len(found) > MOST_HOSTS:
        raise ConfigError(f"{len(found)} hosts are too many; the most is {MOST_HOSTS}")
    return tuple(found)


def _name(host: Host, taken: Sequence[Host]) -> str:
    at = Endpoint(host.ssh.rpartition("@")[2])
    return free_name(at.name or at.host, [each.name for each in taken])


# ----- the last `up` -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Last:
    """The hosts of an `up`, and its model."""

    hosts: tuple[Host, ...]
    model: str | None

    def encode(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


_LAST = pydantic.TypeAdapter(Last)


def decode(text: str | None, where: str) -> Last:
    """Return the last `up` in a file's text, or an empty one for None. Raises ConfigError if the text is invalid."""
    if text is None:
        return Last((), None)
    try:
        last = _LAST.validate_json(text, strict=True)
    except ValueError as error:
        raise ConfigError(f"{where} is not what `splitinfer up` writes; remove it, and name the hosts again") from error
    return Last(last.hosts[:MOST_HOSTS], last.model)


def choose(last: Last, hosts: Sequence[Host], model: str | None) -> Last:
    """Return the hosts and the model to use: the given ones, else the remembered ones.

    Raises:
        ConfigError: one is neither given nor remembered.
    """
    if not hosts and not last.hosts:
        raise ConfigError("no host is known yet: name one, such as `splitinfer up mini.local --model OWNER/MODEL`")
    chosen = model or last.model
    if chosen is None:
        raise ConfigError("no model is known yet: name one with --model, once; it is remembered")
    return Last(tuple(hosts) or last.hosts, chosen)


def hosts_of(last: Last, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts for `down` and `status`: the named ones, with their remembered details, else all remembered.

    Raises:
        ConfigError: no host is named or remembered.
    """
    if not hosts and not last.hosts:
        raise ConfigError("no host is known yet: `splitinfer up` remembers those that it was given; name one")
    known = {each.ssh: each for each in last.hosts}
    return tuple(known.get(each.ssh, each) for each in hosts) or last.hosts
