"""Keys on links between stages: this machine's own, those it knows, and which one a link to a stage needs."""

from collections.abc import Callable
from typing import Protocol

from splitinfer.core.layout import StageSpec
from transports import KeyPair, LinkOptions, Security


class Keys(Protocol):
    """This machine's key pair, and the keys that it admits."""

    def own(self) -> KeyPair:
        """This machine's key pair."""
        ...

    def admits(self, key: str) -> bool:
        """Whether a key is among the admitted ones."""
        ...

    def log_unknown(self, key: str) -> None:
        """Log that a peer with an unknown key was refused."""
        ...


def upstream_key(before: StageSpec | None, stage: StageSpec, own: Callable[[], KeyPair]) -> str:
    """The key with which the worker ``before`` connects to ``stage``; empty where that link is not encrypted, or where
    the stage before is the coordinator."""
    if before is None or before.address is None or stage.key is None:
        return ""
    return before.key or own().public


def options_to(key: str | None, own: Callable[[], KeyPair]) -> LinkOptions:
    """The options to connect to the owner of ``key``; without a key, unencrypted."""
    return LinkOptions(security=Security(own(), key)) if key else LinkOptions()
