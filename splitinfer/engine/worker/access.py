"""Who may come to an encrypted worker: coordinators whose keys are known, and for one session the stage before.

The coordinator, which was admitted, tells each worker the key of the stage that will bring it hidden states. So
workers need not know each other, and that key is good for nothing else. A worker on the coordinator's own machine comes
with that machine's key.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from splitinfer.core.layout import StageSpec
from transports import KeyPair, LinkOptions, Security


class Keys(Protocol):
    """This machine's key pair, and whose keys it knows."""

    def own(self) -> KeyPair:
        """The pair."""
        ...

    def admits(self, key: str) -> bool:
        """Whether a key is known."""
        ...

    def tell_stranger(self, key: str) -> None:
        """One came whose key is not."""
        ...


class AccessControl:
    """``keys``: ``None`` where links are not encrypted, and anybody may come."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._upstream = ""

    def expect(self, upstream: str) -> None:
        """The key of the stage before, as long as this session lasts; empty: none comes."""
        with self._lock:
            self._upstream = upstream

    def may_coordinate(self, key: str | None) -> bool:
        """Whether whoever proved to own ``key`` may give orders."""
        return self._keys is None or (key is not None and self._keys.admits(key))

    def may_bring(self, key: str | None) -> bool:
        """Whether it may bring hidden states."""
        with self._lock:
            return self._keys is None or (bool(key) and key == self._upstream)

    @property
    def options(self) -> LinkOptions:
        """For listening."""
        return LinkOptions() if self._keys is None else LinkOptions(security=Security(self._keys.own(), None, self._in))

    def _in(self, key: str) -> bool:
        assert self._keys is not None
        if self.may_bring(key) or self._keys.admits(key):
            return True
        self._keys.tell_stranger(key)
        return False


def upstream_key(before: StageSpec | None, stage: StageSpec, own: Callable[[], KeyPair]) -> str:
    """The key with which the worker ``before`` comes to ``stage``; empty where it comes in the open, or it is the
    coordinator that comes."""
    if before is None or before.address is None or stage.key is None:
        return ""
    return before.key or own().public


def options_to(key: str | None, own: Callable[[], KeyPair]) -> LinkOptions:
    """For connecting to the owner of ``key``; without one, in the open."""
    return LinkOptions(security=Security(own(), key)) if key else LinkOptions()
