"""By what workers are announced and browsed for on this machine: a library, or the system's own responder.

zeroconf is taken where it is installed (`pip install "splitinfer[discover]"`), because it tells what happens; else the
commands of the system's responder: dns-sd on macOS, avahi-browse and avahi-publish on Linux.
"""

import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from splitinfer.discovery.announcement import Announcement
from splitinfer.discovery.workers import Sighting
from splitinfer.system.interface_kind import LocalInterface


class MeansFailed(Exception):
    """What browses or announces failed; the text says why, and becomes part of a sentence."""


class Registration(Protocol):
    """A worker that is announced."""

    def update(self, announcement: Announcement) -> None:
        """Announce this from now on. Raises MeansFailed."""

    def check(self) -> None:
        """Raises MeansFailed: it is announced no more."""

    def close(self) -> None:
        """Withdraw it."""


class Means(Protocol):
    """Browses and announces."""

    name: str

    def browse(
        self, interfaces: Sequence[LocalInterface], put: Callable[[Sighting], None], is_over: Callable[[], bool]
    ) -> None:
        """Give every sighting to ``put`` until ``is_over`` says so; it is asked several times a second. Raises
        MeansFailed."""

    def announce(self, announcement: Announcement, addresses: Sequence[str]) -> Registration:
        """Announce a worker at these addresses of this machine. Raises MeansFailed."""


def means_here() -> Means | None:
    """What this machine has, the best first; ``None`` if it has nothing."""
    if importlib.util.find_spec("zeroconf") is not None:
        from splitinfer.discovery.by_zeroconf import ByZeroconf

        return ByZeroconf()
    from splitinfer.discovery.by_commands import Avahi, DnsSd

    if sys.platform == "darwin":
        return DnsSd() if shutil.which("dns-sd") else None
    return Avahi() if shutil.which("avahi-browse") and shutil.which("avahi-publish") else None
