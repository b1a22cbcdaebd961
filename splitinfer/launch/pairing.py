"""Exchanges the keys of two machines without ssh, by short codes that a person types from each screen into the other.

    one machine                         the other
    shows its code, reads the other's                    each code has 30 random bits
    hello: name, key, nonce, port   ◀──▶   hello
    proof                           ◀──▶   proof

Both codes together are a secret that no network has seen. A proof is an HMAC, by that secret, of both hellos, the
sender's first. An attacker between the two can neither replace a key nor find the codes afterwards: there are 2^60
pairs, and trying one takes scrypt's 16 MB (RFC 7914). After a wrong proof a person must type again.
"""

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from pydantic import Field, TypeAdapter

from splitinfer.discovery.announcer import addresses_of, registered
from splitinfer.errors import ConfigError
from splitinfer.keyring import same_key
from splitinfer.system.interfaces import local_interfaces
from transports import check_key

PORT = 5576  # one below a worker's
SERVICE = "_splitinfer-init._tcp.local."
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # 32, none of which looks like another
_HALF = 3  # letters
_NO_CODE = "a code has six letters and digits, such as K7M-2QX"
_LONGEST = 4096  # bytes of a line
_PATIENCE = 20.0  # seconds for a machine that has connected
_AGAIN = 1.0  # seconds between two rounds of connecting
_MOST_LINKS = 4  # opened by others at a time; a new one replaces the oldest

Address = tuple[str, int]


class WrongCode(Exception):
    """The other machine's proof does not follow from these codes."""


@dataclass(frozen=True, slots=True)
class PairingHello:
    """A machine's introduction. ``port``: its worker's; None: it will coordinate. ``protocol``: its version of the
    links' protocol."""

    name: str
    key: str
    port: Annotated[int, Field(gt=0, lt=1 << 16)] | None
    protocol: int
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))


_HELLO = TypeAdapter(PairingHello)


def new_code() -> str:
    """Return a new code to show, such as ``K7M-2QX``."""
    first, second = ("".join(secrets.choice(_LETTERS) for _ in range(_HALF)) for _ in range(2))
    return f"{first}-{second}"


def read_code(typed: str) -> str | None:
    """Return the code that a person typed, or None if it is not one.

    >>> read_code(" k7m2qx "), read_code("K7M")
    ('K7M-2QX', None)
    """
    letters = typed.strip().upper().replace("-", "").replace(" ", "")
    if len(letters) != 2 * _HALF or not set(letters) <= set(_LETTERS):
        return None
    return f"{letters[:_HALF]}-{letters[_HALF:]}"


def secret_of(codes: Iterable[str]) -> bytes:
    """Return the secret that follows from both codes. It takes 16 MB and tens of milliseconds."""
    return hashlib.scrypt("".join(sorted(codes)).encode(), salt=b"splitinfer init 1", n=2**14, r=8, p=1)


def exchange(link: socket.socket, own: PairingHello, secret: bytes) -> PairingHello:
    """Return the hello of the machine at the other end, which has the same secret and has proved it.

    Raises:
        WrongCode: it has another secret.
        ConfigError: it has this machine's key or another version, or both machines would coordinate, or neither.
        OSError, ValueError: it is not such a machine, or it has gone.
    """
    link.settimeout(_PATIENCE)
    said, heard = json.dumps(asdict(own)).encode(), b""
    with link.makefile("rb") as lines:
        link.sendall(said + b"\n")
        heard = _line(lines.readline(_LONGEST))
        other = _hello(heard)
        if other.nonce == own.nonce:
            raise ValueError("this machine itself")
        link.sendall(_proof(secret, said, heard).encode() + b"\n")
        if not hmac.compare_digest(_line(lines.readline(_LONGEST)), _proof(secret, heard, said).encode()):
            raise WrongCode
    if other.key == own.key:
        raise ConfigError(f"{other.name} {same_key()}")
    if other.protocol != own.protocol:
        raise ConfigError(f"{other.name} runs another version of splitinfer; install the same on both")
    if (other.port is None) == (own.port is None):
        both = "both machines have" if own.port is None else "neither machine has"
        raise ConfigError(f"{both} a model; run `splitinfer init --model MODEL` where you will chat, and only there")
    return other


def _line(read: bytes) -> bytes:
    if not read.endswith(b"\n"):
        raise OSError("the other machine has gone")
    return read[:-1]


def _hello(line: bytes) -> PairingHello:
    hello = _HELLO.validate_json(line, strict=True)
    check_key(hello.key)
    name = "".join(letter for letter in hello.name if letter.isalnum() or letter in "-_.")[:40]
    return replace(hello, name=name or "worker")


def _proof(secret: bytes, first: bytes, second: bytes) -> str:
    return hmac.new(secret, first + b"\n" + second, "sha256").hexdigest()


# ----- finding each other --------------------------------------------------------------------------


class Meeting:
    """Finds the other machine on the network. ``near``: the addresses to try; if empty, multicast DNS finds them."""

    def __init__(self, own: PairingHello, port: int = PORT, near: Iterable[Address] = ()) -> None:
        self._own, self._near, self._secret = own, tuple(near), b""
        self._met: queue.SimpleQueue[tuple[PairingHello, str] | Exception] = queue.SimpleQueue()
        self._seen: set[Address] = set(self._near)
        self._is_over = threading.Event()
        try:
            self._listening = socket.create_server(("", port))
        except OSError:
            self._listening = socket.create_server(("", 0))
        self.port = int(self._listening.getsockname()[1])

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Publish this machine, and look for the other, during a ``with`` block."""
        with self._listening, contextlib.ExitStack() as stack:
            stack.callback(self._is_over.set)
            if not self._near:
                with contextlib.suppress(OSError):  # no multicast here: the other machine may still find this one
                    self._announce(stack)
            yield

    def with_code(self, own: str, other: str) -> tuple[PairingHello, str]:
        """Return the other machine and its address from here, once both know both codes.

        Raises:
            WrongCode: a machine with other codes has answered.
            ConfigError: as ``exchange``.
        """
        self._secret = secret_of((own, other))  # once, for any number of connections
        rounds = threading.Event()
        workers = [threading.Thread(target=run, args=(rounds,), daemon=True) for run in (self._accept, self._dial)]
        for each in workers:
            each.start()
        try:
            found = self._met.get()
        finally:
            rounds.set()
        for each in workers:
            each.join(_PATIENCE)
        while isinstance(found, Exception) and not self._met.empty():  # two links may have answered in the same round
            found = self._met.get()
        if isinstance(found, Exception):
            raise found
        return found

    def _announce(self, stack: contextlib.ExitStack) -> None:
        import zeroconf

        addresses = addresses_of("0.0.0.0", local_interfaces())
        label, server = f"{self._own.nonce}.{SERVICE}", f"splitinfer-{self._own.nonce}.local."
        packed = [socket.inet_aton(each) for each in addresses]
        info = zeroconf.ServiceInfo(SERVICE, label, port=self.port, server=server, addresses=packed)
        responder = stack.enter_context(registered(info, addresses))

        def changed(name: str, state_change: zeroconf.ServiceStateChange, **_: object) -> None:
            if name == label or state_change is zeroconf.ServiceStateChange.Removed:
                return
            with contextlib.suppress(OSError, zeroconf.Error):
                info = responder.get_service_info(SERVICE, name, timeout=1000)
                if info is not None and info.port:
                    self._seen |= {(one, info.port) for one in info.parsed_addresses(zeroconf.IPVersion.V4Only)}

        browser = zeroconf.ServiceBrowser(responder, SERVICE, handlers=[changed])
        stack.callback(browser.cancel)

    def _accept(self, ended: threading.Event) -> None:
        self._listening.settimeout(0.2)
        links: list[socket.socket] = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                link, (host, *_) = self._listening.accept()
                links = [*(each for each in links if each.fileno() >= 0), link]
                if len(links) > _MOST_LINKS:  # a silent peer must not keep others out
                    with contextlib.suppress(OSError):
                        links.pop(0).shutdown(socket.SHUT_RDWR)  # another thread reads from it
                threading.Thread(target=self._try, args=(link, host, ended), daemon=True).start()

    def _dial(self, ended: threading.Event) -> None:
        while not ended.is_set():
            for address in sorted(self._seen):
                with contextlib.suppress(OSError):
                    if self._try(socket.create_connection(address, timeout=2.0), address[0], ended):
                        return
            ended.wait(_AGAIN)

    def _try(self, link: socket.socket, host: str, ended: threading.Event) -> bool:
        """Try the exchange on a link. Return whether the other end has answered, right or wrong."""
        with link:
            if ended.is_set():  # a person is asked again, and the other machine tries again
                return False
            try:
                result: tuple[PairingHello, str] | Exception = (exchange(link, self._own, self._secret), host)
            except (WrongCode, ConfigError) as error:
                result = error
            except (OSError, ValueError):  # a stranger, or the other machine has met this one on another link
                return False
        if not (ended.is_set() and isinstance(result, Exception)):  # the other may have gone on with success
            self._met.put(result)
        return True


def ask_code(read: Callable[[str], str], say: Callable[[str], None], own: str, before: str | None) -> str:
    """Ask a person for the other machine's code. ``own``: this machine's. ``before``: the code typed last, which Enter
    keeps."""
    while True:
        typed = read("the other machine's code: ")
        code = before if before and not typed.strip() else read_code(typed)
        if code not in (None, own):
            return code
        say("this is this machine's code; type the one that the other machine shows" if code else _NO_CODE)
