"""Two processes of this machine and a link between them, for round trips."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.errors import ModelError, PeerError

_COLD = 0.1  # share of a trial's rounds, the first ones, that is not counted
_END = "splitinfer.bench.shared.link_end_process"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of link: where to listen, whether it is encrypted, whether payloads have a checksum (None: as usual)."""

    name: str
    address: str
    curve: bool = False
    checksum: bool | None = None


class Pair:
    """Two processes and the link between them.

    Raises:
        PeerError: there can be no link of this kind here.
    """

    def __init__(self, kind: Kind, processors: Sequence[int]) -> None:
        self.kind = kind
        self._ends, common = [ChildProcess(_END), ChildProcess(_END)], {"checksum": kind.checksum}
        try:
            for i, end in enumerate(self._ends):
                if processors:
                    machine.pin(end.pid, processors[i % len(processors)])
            there = self._ask(self._ends[1], {"listen": kind.address, "curve": kind.curve, **common})
            self._ask(self._ends[0], {"connect": there["address"], "key": there["key"], **common})
        except BaseException:
            self.close()
            raise

    def round_trips(self, num_bytes: int, rounds: int) -> list[float]:
        """Seconds of each round trip, the cold ones left out."""
        found = self._ask(self._ends[0], {"ping": num_bytes, "rounds": rounds})["seconds"]
        return list(found[math.ceil(rounds * _COLD) :])

    def processor_seconds(self) -> float:
        """Processor seconds of one end so far, on average."""
        return sum(sum(psutil.Process(end.pid).cpu_times()[:2]) for end in self._ends) / len(self._ends)

    def close(self) -> None:
        """End both processes."""
        for end in self._ends:
            end.close()

    def _ask(self, end: ChildProcess, options: Mapping[str, Any]) -> dict[str, Any]:
        end.send(options)
        try:
            answer = end.receive()
        except ModelError as error:
            raise PeerError(f"{self.kind.name}: {error}") from error
        if "error" in answer:
            raise PeerError(f"{self.kind.name}: {answer['error']}")
        return answer
