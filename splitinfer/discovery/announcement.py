"""Converts a worker's announcement to the properties of a TXT record (RFC 6763, section 6) and back. Pure.

    txtvers  1: the form of all others            id     a number of this run of the worker, new at each start
    name     the worker's name                    key    the fingerprint of its key; missing if it has no key
    proto, ver, mlx, mlxlm   the versions          dev    the device that it computes on
    mem         memory of the machine, in MB

It names no user, coordinator or model. A record of another form (``txtvers``) is read as far as possible, so that a
later version can be recognised. Anyone in the network can announce anything: every field is bounded and made printable.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from splitinfer.common.plain_text import plain
from splitinfer.wire.messages import Versions

SERVICE = "_splitinfer._tcp"
FORM = "1"
FINGERPRINT_DIGITS = 32  # hexadecimal: 128 bits; nobody can find another key for them
MOST_LABEL = 63  # bytes of an instance's name (RFC 6763, 4.1.1)

_ID_DIGITS, _SHOWN_ID = 16, 6
_MOST_NAME, _MOST_VERSION, _MOST_DEVICE = 60, 24, 60  # bytes
_MOST_MEGABYTES = 10**9
_HEX = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Announcement:
    """A worker's announcement. ``port``: the worker's. ``fingerprint``: of its public key, or "" if it has no key.
    ``memory``: bytes, or 0 if unknown."""

    name: str
    id: str
    port: int
    fingerprint: str
    versions: Versions
    device: str = ""
    memory: int = 0
    form: str = FORM

    @property
    def label(self) -> str:
        """The instance's name. The run's number makes it unique without asking the network. Dots are replaced, because
        dns-sd does not see python-zeroconf's names with dots (python-zeroconf issue 190)."""
        number = f" {self.id[:_SHOWN_ID]}"
        return _cut(self.name.replace(".", "-"), MOST_LABEL - len(number)) + number


def new_id() -> str:
    """Return a random number for a new run."""
    return secrets.token_hex(_ID_DIGITS // 2)


def fingerprint_of(key: str) -> str:
    """Return the fingerprint of a public key: the first 32 hexadecimal digits of its bytes' SHA-256."""
    return hashlib.sha256(bytes.fromhex(key)).hexdigest()[:FINGERPRINT_DIGITS]


def short(fingerprint: str) -> str:
    """Return the part of a fingerprint that people compare: four groups of four digits.

    >>> short("0123456789abcdef0123456789abcdef")
    '0123 4567 89ab cdef'
    """
    return " ".join(fingerprint[at : at + 4] for at in range(0, 16, 4))


def announced_name(name: str) -> str:
    """Return a worker's name for the announcement: without ``.local``, printable, and not too long.

    >>> announced_name("mini.local")
    'mini'
    """
    return _clean(name.removesuffix(".local"), _MOST_NAME) or "worker"


def to_properties(announcement: Announcement) -> dict[str, str]:
    """Return the properties of the TXT record. Their bounds keep it under 400 bytes, so that one packet can hold it
    with others (RFC 6763, section 6.2)."""
    versions, megabytes = announcement.versions, announcement.memory // 10**6
    pairs = {
        "txtvers": announcement.form,
        "id": announcement.id,
        "name": _clean(announcement.name, _MOST_NAME),
        "key": announcement.fingerprint,
        "proto": str(versions.protocol),
        "ver": _clean(versions.splitinfer, _MOST_VERSION),
        "mlx": _clean(versions.mlx, _MOST_VERSION),
        "mlxlm": _clean(versions.mlx_lm, _MOST_VERSION),
        "dev": _clean(announcement.device, _MOST_DEVICE),
        "mem": str(min(megabytes, _MOST_MEGABYTES)) if megabytes > 0 else "",
    }
    return {key: value for key, value in pairs.items() if value}


def from_properties(properties: dict[bytes, bytes | None], port: int) -> Announcement | None:
    """Return the announcement in a TXT record. Return None if it lacks a name, a number or a port, and so is not a
    worker's."""
    values = {
        key.decode("ascii", "replace").lower(): (value or b"").decode("utf-8", "replace")
        for key, value in reversed(properties.items())  # of equal keys the first counts (RFC 6763, section 6.4)
    }
    name, number = _clean(values.get("name", ""), _MOST_NAME), _hexadecimal(values.get("id", ""), _ID_DIGITS)
    if not name or not number or not 0 < port < 1 << 16:
        return None
    return Announcement(
        name=name,
        id=number,
        port=port,
        fingerprint=_hexadecimal(values.get("key", ""), FINGERPRINT_DIGITS),
        versions=_versions(values),
        device=_clean(values.get("dev", ""), _MOST_DEVICE),
        memory=_number(values.get("mem", "")) * 10**6,
        form=_clean(values.get("txtvers", ""), _MOST_VERSION),
    )


def _versions(values: Mapping[str, str]) -> Versions:
    splitinfer, mlx, mlx_lm = (_clean(values.get(key, ""), _MOST_VERSION) or "?" for key in ("ver", "mlx", "mlxlm"))
    return Versions(_number(values.get("proto", "")), splitinfer, mlx, mlx_lm)


def _clean(text: str, most: int) -> str:
    """Return a stranger's text made printable, on one line, with at most ``most`` bytes."""
    return _cut(plain(text, 4 * most), most)


def _cut(text: str, most: int) -> str:
    """Return the text cut to ``most`` bytes of UTF-8, between characters."""
    return text.encode()[:most].decode("utf-8", "ignore")


def _hexadecimal(text: str, digits: int) -> str:
    return text if len(text) == digits and _HEX.fullmatch(text) else ""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
