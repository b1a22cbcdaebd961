"""Authenticates peers that connect to a worker's port, even while the engine is busy.

A worker serves one coordinator at a time. The acceptor replies at once, on the link's thread, because the engine may be
loading for minutes. After a successful handshake, a link reaches the engine, or ``Readers`` in the role "reader".

An encrypted worker admits coordinators whose keys it knows. A coordinator sends each worker the key of the stage that
will send it hidden states, and the keys of the workers that may copy weights. So workers do not need to know each
other's keys. Such a key is valid for one session and for this role only. A worker on the coordinator's own machine
connects with that machine's key.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from splitinfer.common.endpoint import is_loopback
from splitinfer.common.plain_text import plain
from splitinfer.engine.links.connection import Connection
from splitinfer.engine.versions import device_name, own_versions
from splitinfer.engine.weights.answering import Readers
from splitinfer.errors import ProtocolError
from splitinfer.keyring import Keyring, same_key
from splitinfer.models.memory import free_bytes
from splitinfer.system.interfaces import own_addresses
from splitinfer.wire.headers import Session
from splitinfer.wire.messages import Hello, Refuse, Welcome
from transports import (
    Frame,
    Link,
    LinkClosed,
    LinkOptions,
    LinkTimeout,
    Listener,
    ListenerClosed,
    Security,
    TransportError,
)


class AccessControl:
    """Decides by a peer's key what it may do. ``keys``: ``None`` if links are not encrypted; then every peer may
    connect."""

    def __init__(self, keys: Keyring | None) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._upstream = ""
        self._readers: frozenset[str] = frozenset()

    def begin(self, upstream: str = "") -> None:
        """Begin another session, or end the last one. ``upstream``: the key of the previous stage; empty: no stage
        connects with a key."""
        with self._lock:
            self._upstream, self._readers = upstream, frozenset()

    def let_read(self, readers: Iterable[str]) -> None:
        """Let the owners of these keys copy weights in this session."""
        with self._lock:
            self._readers = frozenset(filter(None, readers))

    def is_own(self, key: str | None) -> bool:
        """Return whether ``key`` is this machine's own."""
        return self._keys is not None and key == self._keys.own().public

    def allows(self, role: str, key: str | None) -> bool:
        """Return whether the owner of ``key`` may connect in a role. Admitted coordinators may use any role except
        "upstream". The previous stage may use "upstream" and "probe". The readers that the coordinator named may use
        "reader"."""
        if self._keys is None:
            return True
        with self._lock:
            named = {"reader": self._readers, "probe": (self._upstream,), "upstream": (self._upstream,)}.get(role, ())
        return bool(key) and (key in named or (role != "upstream" and self._keys.admits(str(key))))

    @property
    def options(self) -> LinkOptions:
        """The options of the listener."""
        security = None if self._keys is None else Security(self._keys.own(), None, self._admits)
        return LinkOptions(security=security)

    def _admits(self, key: str) -> bool:
        assert self._keys is not None
        if any(self.allows(role, key) for role in ("upstream", "reader")):
            return True
        self._keys.log_unknown(key)
        return False


log = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0  # for a peer to send its first message
_PATIENCE = 0.1  # seconds for reading the free memory; short, because this thread serves all links
_NAME_LENGTH = 60  # characters of a peer's name that are logged
REASON_LENGTH = 600  # characters of a reason that are logged or sent


Deliver = Callable[[Connection, Frame | LinkClosed], None]


class Acceptor:
    """Accepts links on its own thread. After a link's handshake, its frames and its end go to ``deliver``."""

    def __init__(
        self, listener: Listener, deliver: Deliver, name: str, access: AccessControl, readers: Readers
    ) -> None:
        self._listener, self._deliver, self._name, self._access = listener, deliver, name, access
        self._readers = readers
        self._versions = own_versions()
        self._lock = threading.Lock()
        self._pending: dict[Link, float] = {}  # links before their first message, and when they were accepted
        self._owner: Connection | None = None
        self._thread = threading.Thread(target=self._accept_all, name="acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all accepted links."""
        self._listener.close()
        self._thread.join(timeout=1.0)

    @property
    def owner(self) -> Connection | None:
        """The coordinator that was admitted last, or None after its session."""
        with self._lock:
            return self._owner

    def release(self, owner: Connection | None) -> None:
        """End the session of this coordinator, so that any coordinator, also this one, may connect. Do nothing if
        another one has connected already."""
        with self._lock:
            if self._owner is owner:
                self._owner = None
                self._access.begin()

    def _accept_all(self) -> None:
        while True:
            try:
                self._expect_hello(self._listener.accept(timeout=1.0))
            except LinkTimeout:
                pass
            except ListenerClosed:
                return
            self._drop_silent()

    def _expect_hello(self, link: Link) -> None:
        with self._lock:
            self._pending[link] = time.monotonic()
        connection: list[Connection] = []

        def on_item(item: Frame | LinkClosed) -> None:
            if connection:
                deliver = self._readers.deliver if connection[0].role == "reader" else self._deliver
                deliver(connection[0], item)
                return
            with self._lock:
                self._pending.pop(link, None)
            if isinstance(item, Frame):
                connection.extend(self._receive_first(link, item))

        link.deliver_to(on_item)

    def _receive_first(self, link: Link, frame: Frame) -> list[Connection]:
        """Reply to a link's first frame. Return a list with the connection, or an empty one if it was refused."""
        session = Session(opened=False)
        try:
            hello = session.decode(frame.header)
            assert isinstance(hello, Hello)
            connection = Connection(link, hello.role, plain(hello.name, _NAME_LENGTH), hello.session, session)
            reason = self._reason_against(connection, hello)
            if reason:
                reason = plain(reason, REASON_LENGTH)
                log.warning("refused %s at %s: %s", connection.name, link.address, reason)
                connection.send(Refuse(reason))
                link.close(reason)
                return []
            connection.send(Welcome(self._name, self._versions, device_name(), free_bytes(_PATIENCE)))
            return [connection]
        except ProtocolError as error:
            reason = plain(str(error), REASON_LENGTH)
            log.warning("dropped %s: %s", link.address, reason)
            link.close(reason)
        except TransportError as error:
            log.warning("lost %s: %s", link.address, error)
        except Exception:  # on the transport's thread, which serves the other links, too
            log.exception("dropped %s", link.address)
            link.abort()
        return []

    def _reason_against(self, connection: Connection, hello: Hello) -> str | None:
        difference = self._versions.difference(hello.versions, f"on {self._name}", f"on {connection.name}")
        if difference:
            return f"the worker runs another version ({difference}); install the same on both"
        if not self._access.allows(hello.role, connection.link.peer_key):
            return "this key is not admitted here"
        if hello.role == "reader":
            return self._readers.reason_against
        with self._lock:
            owner = None if self._owner is None or self._owner.link.closed is not None else self._owner
            if hello.role in ("upstream", "probe"):
                belongs = owner is not None and owner.session_id == hello.session
                return None if belongs else "this worker does not belong to that pipeline"
            if hello.role != "coordinator":
                return f"a worker accepts no peer in the role {hello.role!r:.40}"
            if owner is not None:
                return f"the worker is busy with {owner.name} ({owner.link.address}); try again when it is done"
            self._owner = connection
            self._access.begin(hello.upstream_key)
        self._warn_of_copied_key(connection)
        return None

    def _warn_of_copied_key(self, connection: Connection) -> None:
        """Log a warning if a coordinator on another machine has this machine's key, which was copied."""
        host = connection.link.address.removeprefix("tcp://").rpartition(":")[0].strip("[]").partition("%")[0]
        if self._access.is_own(connection.link.peer_key) and not is_loopback(host) and host not in own_addresses():
            log.warning("%s at %s %s", connection.name, host, same_key())

    def _drop_silent(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [link for link, since in self._pending.items() if now - since > _HELLO_SECONDS]
            for link in late:
                del self._pending[link]
        for link in late:
            log.warning("dropped %s: it sent no message for %.0f s", link.address, _HELLO_SECONDS)
            link.abort("no message came in time")
