"""Strangers at the door of an encrypted worker, from the first byte of ZMTP on; and what they are told.

ZMTP with CURVE, from the side that knocks (rfc.zeromq.org/spec/23 and 26):

    greeting (64 bytes) ->                 signature, version, mechanism, as-server
    HELLO -> <- WELCOME (with a cookie)    both keys of this connection are made now, so nothing of it can be used again
    INITIATE (the long-term key) ->        here it is asked who is admitted
    <- READY, or ERROR                     only then messages, sealed

Most knocks are bytes, made of a good handshake that was listened to: damaged, cut, too long, in another order, said
again. The others are live handshakes of libzmq with the wrong key, mechanism or server. Whoever has no key must hear
nothing but WELCOME and ERROR (``words``).
"""

import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import fuzz

from transports import Frame, KeyPair, LinkOptions, Security, TransportError, connect

GREETING = 64  # bytes
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_COMMAND, _LONG = 4, 2  # flags of a ZMTP frame
_PATIENCE = 0.02  # seconds until it is believed that no more will be said
_ANSWER_SECONDS = 2.0
_LIVE_EVERY = 10  # they take as long as ten others
TO_A_STRANGER = frozenset({"WELCOME", "ERROR"})


def greeting(mechanism: bytes = b"CURVE", *, version: int = 3, as_server: bool = False) -> bytes:
    """ZMTP's first 64 bytes."""
    return _SIGNATURE + bytes([version, 0]) + mechanism.ljust(20, b"\0")[:20] + bytes([as_server]) + bytes(31)


def command(body: bytes) -> bytes:
    """A command's frame."""
    if len(body) < 256:
        return bytes([_COMMAND, len(body)]) + body
    return bytes([_COMMAND | _LONG]) + len(body).to_bytes(8, "big") + body


def frames(said: bytes) -> list[tuple[int, bytes]]:
    """Flags and bodies of what follows a greeting, the last one perhaps not whole."""
    found, at = [], GREETING
    while at + 2 <= len(said):
        flags, is_long = said[at], said[at] & _LONG
        size = int.from_bytes(said[at + 1 : at + (9 if is_long else 2)], "big")
        at += 9 if is_long else 2
        found.append((flags, said[at : at + size]))
        at += size
    return found


def words(said: bytes) -> list[str]:
    """What a listener said behind its greeting: the names of commands, "message" for everything else."""
    return [
        body[1 : 1 + body[0]].decode("ascii", "replace") if flags & _COMMAND and body else "message"
        for flags, body in frames(said)
    ]


# -- listening in ----------------------------------------------------------------------------------


@contextmanager
def tapped(port: int) -> Iterator[tuple[str, bytearray, bytearray]]:
    """The way to a worker for one connection, and what is said on it there and back."""
    said, answered = bytearray(), bytearray()

    def pass_on(one: socket.socket, other: socket.socket, heard: bytearray) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                heard += data
                other.sendall(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def join() -> None:
        with door.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=pass_on, args=(far, near, answered), daemon=True)
            back.start()
            pass_on(near, far, said)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as door:
        joined = threading.Thread(target=join, daemon=True)
        joined.start()
        yield f"tcp://127.0.0.1:{door.getsockname()[1]}", said, answered
        joined.join(5)


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a good one looked like: HELLO, INITIATE, and the sealed messages after them."""

    hello: bytes
    initiate: bytes
    sealed: bytes

    @classmethod
    def listened_to(cls, port: int, options: LinkOptions, first_word: bytes) -> "Handshake":
        """One that an admitted peer makes."""
        with tapped(port) as (address, heard, _):
            link = connect(address, timeout=5, options=options)
            link.send(Frame(first_word))
            link.close("thank you")
        said = bytes(heard)
        (hello, initiate, *_), first = frames(said), said.index(b"MESSAGE") - 1
        return cls(hello[1], initiate[1], said[first - 2 :])


# -- bytes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Door:
    """An encrypted worker's port; who is admitted, and a handshake of theirs."""

    port: int
    admitted: Security
    good: Handshake


def _noise(_door: Door, chance: random.Random) -> list[bytes]:
    return [chance.randbytes(chance.randrange(400))]


def _greeting(_door: Door, chance: random.Random) -> list[bytes]:
    """Damaged, cut, of another version or role."""
    made = greeting(version=chance.choice((0, 1, 2, 3, 4, 255)), as_server=chance.random() < 0.5)
    match chance.randrange(3):
        case 0:
            return [fuzz.mutate(made, chance)]
        case 1:
            return [made[: chance.randrange(GREETING)]]
        case _:
            return [made, chance.randbytes(chance.randrange(300))]


def _mechanism(door: Door, chance: random.Random) -> list[bytes]:
    """As if nothing were encrypted, or with a password."""
    properties = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
    opening = bytes([0, 44]) + b"SPLI" + chance.randbytes(40)
    match chance.randrange(3):
        case 0:
            return [greeting(b"NULL"), command(b"\x05READY" + properties), opening]
        case 1:
            word = command(b"\x05HELLO\x05admin\x05admin")
            return [greeting(b"PLAIN"), word, command(b"\x08INITIATE" + properties), opening]
        case _:
            return [greeting(chance.choice((b"GSSAPI", b"CURVE\0X", b"curve", b""))), command(door.good.hello), opening]


def _hello(door: Door, chance: random.Random) -> list[bytes]:
    """A damaged HELLO, and nothing good after it."""
    return [greeting(), command(_damaged(door.good.hello, chance)), chance.randbytes(chance.choice((0, 0, 50)))]


def _initiate(door: Door, chance: random.Random) -> list[bytes]:
    """A whole HELLO, and an INITIATE that was good once, or is damaged too."""
    body = chance.choice((door.good.initiate, _damaged(door.good.initiate, chance)))
    return [greeting(), command(door.good.hello), command(body)]


def _again(door: Door, chance: random.Random) -> list[bytes]:
    """All that was said by somebody who was admitted, whole or to some point."""
    said = [greeting(), command(door.good.hello), command(door.good.initiate), door.good.sealed]
    last = chance.randrange(4)
    return [*said[:last], said[last][: chance.randint(1, len(said[last]))]]


def _order(door: Door, chance: random.Random) -> list[bytes]:
    """Commands in any order, as often as it comes."""
    pieces = [command(door.good.hello), command(door.good.initiate), door.good.sealed]
    pieces += [command(b"\x05READY" + chance.randbytes(30)), command(b"\x05ERROR\x03400"), command(b"")]
    return [greeting(), *chance.choices(pieces, k=chance.randint(1, 5))]


def _sizes(door: Door, chance: random.Random) -> list[bytes]:
    """Frames that say they are longer than they are, or than anything."""
    size = chance.choice((0, 1, 200, 255, 2**16, 2**31, 2**63 - 1, 2**64 - 1))
    flags = chance.choice((_COMMAND | _LONG, _LONG, 0xFF, 0x06, 0x03))
    before = [command(door.good.hello)] if chance.random() < 0.5 else []
    return [greeting(), *before, bytes([flags]) + size.to_bytes(8, "big") + door.good.hello]


def _damaged(body: bytes, chance: random.Random) -> bytes:
    match chance.randrange(4):
        case 0:
            return fuzz.mutate(body, chance)
        case 1:
            return body[: chance.randrange(len(body))]
        case 2:
            return body + chance.randbytes(chance.randint(1, 300))
        case _:
            name = body[: 1 + body[0]]
            return name + chance.randbytes(len(body) - len(name))


BYTES = (_noise, _greeting, _mechanism, _hello, _initiate, _again, _order, _sizes)


def told(door: Door, pieces: Sequence[bytes], chance: random.Random) -> bytes:
    """What comes back, until the worker hangs up, or says no more. Each piece waits for what is said to the one before
    it, or goes right behind it."""
    heard = b""
    with socket.create_connection(("127.0.0.1", door.port)) as connection, suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_patient = chance.random() < 0.7
        for number, piece in enumerate(pieces):
            connection.sendall(piece)
            if is_patient and number < len(pieces) - 1:
                heard += _rest(connection, _PATIENCE, most=1)
        if chance.random() < 0.1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # gone without a word
            return heard
        heard += _rest(connection, _PATIENCE)
        connection.shutdown(socket.SHUT_WR)
        heard += _rest(connection, _ANSWER_SECONDS)
    return heard


def _rest(connection: socket.socket, seconds: float, most: int = 100) -> bytes:
    """What comes until nothing does for so long; at most so many pieces."""
    heard = b""
    connection.settimeout(seconds)
    with suppress(TimeoutError):
        while most and (data := connection.recv(1 << 16)):
            heard, most = heard + data, most - 1
    return heard


def _live(door: Door, chance: random.Random) -> tuple[str, bytes]:
    """A handshake of libzmq's with the wrong key, server or mechanism: which, and what came back."""
    own, there = door.admitted.own, door.admitted.peer
    wrong = {"key": Security(KeyPair.make(), there), "server": Security(own, KeyPair.make().public), "mechanism": None}
    kind = chance.choice([*wrong])
    with tapped(door.port) as (address, _, answered), suppress(TransportError):
        connect(address, timeout=1, options=LinkOptions(security=wrong[kind])).abort("enough")
    return f"wrong {kind}", bytes(answered)


def knock(door: Door, chance: random.Random, number: int) -> str:
    """One stranger; which sort. Raises AssertionError if it hears what it must not."""
    if number % _LIVE_EVERY == 0:
        kind, heard = _live(door, chance)
    else:
        way = chance.choice(BYTES)
        kind, heard = way.__name__.strip("_"), told(door, way(door, chance), chance)
    assert set(words(heard)) <= TO_A_STRANGER, f"{kind}: a stranger heard {words(heard)}"
    assert b"SPLI" not in heard, f"{kind}: bytes of ours, and not even sealed"
    return kind
