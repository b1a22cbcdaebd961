"""Encrypts links and authenticates their ends with CurveZMQ.

Both ends have a key pair. The connecting side knows the listener's public key beforehand, so no other process can pass
for the listener. The handshake gives the listener the connecting side's public key and proves that this side has the
secret half; the listener then admits or refuses the key. Messages are encrypted and cannot be changed or repeated. See
CurveZMQ (rfc.zeromq.org/spec/26) and ZAP (rfc.zeromq.org/spec/27), which libzmq and pyzmq implement.

A peer that is not admitted receives no message, as the handshake comes before the first one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import zmq
import zmq.utils.z85

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

KEY_HEX = 64  # characters of a key in text
Admits = Callable[[str], bool]  # a public key -> whether its owner may connect; called on a thread of its own


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A Curve25519 key pair, each half as 64 hexadecimal digits."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        check_key(self.public)
        check_key(self.secret)
        if _hex(zmq.curve_public(_z85(self.secret))) != self.public:
            raise ValueError("the two halves of a key do not belong together")

    @classmethod
    def make(cls) -> KeyPair:
        """Generate a key pair."""
        public, secret = zmq.curve_keypair()
        return cls(_hex(public), _hex(secret))


def check_key(key: str) -> None:
    """Raise ValueError unless `key` is 64 lower-case hexadecimal digits."""
    if len(key) != KEY_HEX or not set(key) <= set("0123456789abcdef"):
        raise ValueError(f"{key[:KEY_HEX]!r} is not a key: a key has {KEY_HEX} hexadecimal digits")


@dataclass(frozen=True, slots=True)
class Security:
    """How a link is encrypted.

    Args:
        own: this end's key pair.
        peer: the key that the listener must have, for connecting.
        admits: says which keys may connect, for listening; None admits no key.
    """

    own: KeyPair
    peer: str | None = None
    admits: Admits | None = None

    def __post_init__(self) -> None:
        if self.peer is not None:
            check_key(self.peer)


def secure_listener(socket: zmq.Socket[bytes], security: Security) -> None:
    """Make a socket accept only keys that `security` admits. Call it before the socket is bound."""
    domain, admits = f"splitinfer-{next(_domains)}", security.admits
    provider = SimpleNamespace(callback=lambda _domain, key: admits is not None and admits(_hex(key)))
    _authenticator(socket.context).configure_curve_callback(domain, provider)
    socket.curve_server = True
    socket.curve_secretkey = _z85(security.own.secret)
    socket.curve_publickey = _z85(security.own.public)
    socket.zap_domain = domain.encode()


def secure_connector(socket: zmq.Socket[bytes], security: Security) -> None:
    """Make a socket connect only to the owner of `security.peer`. Call it before the socket connects."""
    assert security.peer is not None
    socket.curve_serverkey = _z85(security.peer)
    socket.curve_secretkey = _z85(security.own.secret)
    socket.curve_publickey = _z85(security.own.public)


def key_of(frame: zmq.Frame) -> str | None:
    """Return the public key of a frame's sender, or None if the connection is not encrypted."""
    try:
        return _hex(str(frame.get("User-Id")).encode())
    except (zmq.ZMQError, ValueError):
        return None


_domains = itertools.count(1)
_authenticators: dict[int, ThreadAuthenticator] = {}
_authenticators_lock = threading.Lock()


def _authenticator(context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
    """Return the authenticator that all listeners of a context share. Its thread sleeps between handshakes."""
    with _authenticators_lock:
        if id(context) not in _authenticators:
            from zmq.auth.thread import ThreadAuthenticator  # here, because it imports asyncio

            found = ThreadAuthenticator(context)
            found.start()
            _authenticators[id(context)] = found
        return _authenticators[id(context)]


def _hex(z85: bytes) -> str:
    return zmq.utils.z85.decode(z85).hex()


def _z85(key: str) -> bytes:
    return zmq.utils.z85.encode(bytes.fromhex(key))
