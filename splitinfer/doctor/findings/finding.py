"""A finding, and the evidence that findings are made from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from splitinfer.system.origin import Origin, Start

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Output:
    """The text that a command printed; ``None`` where it failed, and ``why``."""

    text: str | None
    why: str = ""


class Severity(StrEnum):
    """How much a finding matters, the worst first."""

    PROBLEM = "problem"  # something does not work
    WARNING = "warning"  # it is slow, or will stop
    NOTE = "note"  # good to know


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change. ``remedy``: mostly a command to paste."""

    area: str
    severity: Severity
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """How a worker is reached. ``host``: as the layout names it; ``address``: its number; ``route``: what the system
    says of the way there."""

    worker: str
    host: str
    address: str
    route: Output


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Another process of splitinfer on this machine, its command's name, and its nice value."""

    pid: int
    command: str
    nice: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The evidence: the commands' outputs, by name, and what this process knows of itself and of the machine.

    memory, available: bytes.
    on_gpu: whether MLX computes on a GPU.
    executable, prefix: the Python that runs this, links resolved.
    wireless: the interfaces that are known to be Wi-Fi, besides those that networksetup lists.
    killed_in_rdma: a sentence on processes that were killed inside RDMA operations, or "".
    """

    outputs: Mapping[str, Output]
    system: str  # "Darwin", "Linux" ...
    has_jaccl: bool
    environment: Mapping[str, str]
    memory: int = 0
    available: int = 0
    on_gpu: bool = False
    executable: str = ""
    prefix: str = ""
    origin: Origin = field(default_factory=lambda: Origin(Start.UNKNOWN))
    processes: tuple[OtherProcess, ...] = ()
    ways: tuple[Way, ...] = ()
    wireless: frozenset[str] = frozenset()
    killed_in_rdma: str = ""

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"

    def read(self, name: str, read: Callable[[str], T | None]) -> T | None:
        """What a command printed, parsed; ``None`` where it failed or was not run."""
        text = self.outputs[name].text if name in self.outputs else None
        return None if text is None else read(text)
