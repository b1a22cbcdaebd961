"""How a result walks through the code: ``python -m tests.campaigns.update_walk``.

Profiles the toy pipeline's ``Scheduler.update`` and ``schedule``, with and without drafts. A *stay* is a run of calls
of functions of one file of ``splitinfer``; a walk *comes back* when it stays in a file that it has left. Fewer files
and fewer returns are easier to follow; fewer calls are faster.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import median
from types import FrameType
from typing import Any

from splitinfer.core.speculation.flight import Flight
from tests.core.toy import Guesser, House

_PACKAGE = "splitinfer/"


@dataclass
class Walk:
    """The functions called within one call of a method, in order, each as its file and its name."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def stays(self) -> list[str]:
        """The files, each once for every stay."""
        return [file for file, _ in groupby(file for file, _ in self.calls)]

    def summary(self) -> tuple[int, int, int, int]:
        """Stays, files, returns to a file, calls."""
        stays = self.stays
        return len(stays), len(set(stays)), len(stays) - len(set(stays)), len(self.calls)


@contextmanager
def profiled(walk: Walk) -> Any:
    """Note the calls of the package's functions in a ``with`` block."""

    def note(frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and _PACKAGE in file:
            walk.calls.append((file.rpartition(_PACKAGE)[2], frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def walks_of(house: House, name: str, until: int) -> list[Walk]:
    """The walks through one of the scheduler's methods in a run of so many results."""
    method: Callable[..., Any] = getattr(house.scheduler, name)
    walks: list[Walk] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        walks.append(Walk())
        with profiled(walks[-1]):
            return method(*args, **kwargs)

    setattr(house.scheduler, name, watched)
    for _ in range(until):
        while house.step() is not None:
            pass
        if not house.toy.under_way:
            break
        house.deliver()
    return walks


def house_of(num_sequences: int, right: float | None) -> House:
    """A house in which sequences decode, with drafts that are ``right`` so often where it is given."""
    house = House(max_running=num_sequences, token_budget=64, speculates=right is not None)
    if right is not None:
        house.guess = Guesser(Random(1), right)
    for seed in range(num_sequences):
        house.add([1, 2, 3, seed % 5], max_tokens=400, seed=seed, flight=Flight(3) if right is not None else None)
    return house


def main() -> None:
    """Print the median and the range of each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=int, default=200)
    parser.add_argument("--show", action="store_true", help="print a walk of median length")
    args = parser.parse_args()
    for name in ("update", "schedule"):
        for num_sequences, right in ((1, None), (1, 0.8), (4, None), (4, 0.8)):
            walks = walks_of(house_of(num_sequences, right), name, args.results)[args.results // 4 :]
            columns = list(zip(*(walk.summary() for walk in walks), strict=True))
            text = ", ".join(
                f"{median(column):g} {title} ({min(column)} to {max(column)})"
                for title, column in zip(("stays", "files", "returns", "calls"), columns, strict=True)
            )
            drafts = "no drafts" if right is None else f"drafts {right:g} right"
            print(f"{name}, {num_sequences} sequences, {drafts}: {text}")
            if args.show:
                shown = sorted(walks, key=lambda walk: len(walk.calls))[len(walks) // 2]
                print("\n".join(f"    {Path(file).as_posix()} {function}" for file, function in shown.calls))


if __name__ == "__main__":
    main()
