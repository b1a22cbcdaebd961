"""What a look around found, and what was tried."""

from dataclasses import dataclass

from splitinfer.discovery.choosing import Way
from splitinfer.discovery.workers import Worker
from splitinfer.system.interface_kind import LocalInterface


@dataclass(frozen=True, slots=True)
class Tried:
    """An interface: how many other devices were heard on it, or why it could not be asked."""

    interface: LocalInterface
    num_others: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A worker, and the ways to it, the best first. ``known_as``: the name under which its key is in this machine's
    keyring, "" if it is not; ``is_impostor``: the keyring has another key under its name; ``is_here``: it runs on this
    machine; ``difference``: of its versions from the own ones, in words, or None."""

    worker: Worker
    ways: tuple[Way, ...]
    known_as: str = ""
    is_impostor: bool = False
    is_here: bool = False
    difference: str | None = None

    @property
    def best(self) -> Way | None:
        """The best way; ``None`` if the worker does not answer at any address."""
        return self.ways[0] if self.ways and self.ways[0].seconds is not None else None

    @property
    def address(self) -> str | None:
        """The address for a layout."""
        return None if self.best is None else address_of(self.best, self.worker)


@dataclass(frozen=True, slots=True)
class Discovery:
    """All of it. ``means``: by what was browsed, "" if this machine has nothing; ``seconds``: how long; ``stale``:
    names of entries that earlier runs left behind; ``problem``: why browsing failed, or ""."""

    means: str
    seconds: float
    tried: tuple[Tried, ...]
    found: tuple[Found, ...] = ()
    stale: tuple[str, ...] = ()
    problem: str = ""


def address_of(way: Way, worker: Worker) -> str:
    """A way's address as a layout has it."""
    host = f"[{way.address}]" if ":" in way.address else way.address
    return f"tcp://{host}:{worker.announcement.port}"
