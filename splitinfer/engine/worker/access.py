"""Access control of an encrypted worker: it admits coordinators whose keys it knows, and the stage before.

An admitted coordinator sends each worker the key of the stage that will send it hidden states. So workers need not know
each other's keys; that key holds for one session, and allows nothing else. A worker on the coordinator's own machine
connects with that machine's key. In the same way it sends the keys of the other workers, which may take weights.
"""

import threading
from collections.abc import Iterable

from splitinfer.keyring import Keyring
from transports import LinkOptions, Security


class AccessControl:
    """Decides what a peer may do by its key. ``keys``: ``None`` where links are not encrypted, and every peer may
    connect."""

    def __init__(self, keys: Keyring | None) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._upstream = ""
        self._readers: frozenset[str] = frozenset()

    def begin(self, upstream: str = "") -> None:
        """Another session begins, or the last one is over. ``upstream``: the key of the stage before; empty: no stage
        connects with a key."""
        with self._lock:
            self._upstream, self._readers = upstream, frozenset()

    def let_read(self, readers: Iterable[str]) -> None:
        """Let the owners of these keys take weights in this session."""
        with self._lock:
            self._readers = frozenset(filter(None, readers))

    def is_own(self, key: str | None) -> bool:
        """Whether ``key`` is this machine's own."""
        return self._keys is not None and key == self._keys.own().public

    def may_coordinate(self, key: str | None) -> bool:
        """Whether the owner of ``key`` may be this worker's coordinator."""
        return self._keys is None or (key is not None and self._keys.admits(key))

    def may_send_hidden_states(self, key: str | None) -> bool:
        """Whether the owner of ``key`` is the stage before, which may send hidden states."""
        with self._lock:
            return self._keys is None or (bool(key) and key == self._upstream)

    def may_read_weights(self, key: str | None) -> bool:
        """Whether the owner of ``key`` may copy weights from this machine: whoever may coordinate, and the workers that
        the coordinator has named."""
        if self.may_coordinate(key):
            return True
        with self._lock:
            return bool(key) and key in self._readers

    @property
    def options(self) -> LinkOptions:
        """The options to listen with."""
        return (
            LinkOptions()
            if self._keys is None
            else LinkOptions(security=Security(self._keys.own(), None, self._admits))
        )

    def _admits(self, key: str) -> bool:
        assert self._keys is not None
        if self.may_send_hidden_states(key) or self.may_read_weights(key):
            return True
        self._keys.log_unknown(key)
        return False
