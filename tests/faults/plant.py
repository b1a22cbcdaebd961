"""Plants faults one by one and counts the tests that catch each: what `scripts/plant_faults` runs.

The faults that few tests catch say where tests lack; those that many catch, which tests could go. Tests are run from
near to far and only until some have failed, so the count is a lower bound. At the end every test that caught something
is run without any fault: one that fails then, too, proves nothing and ends the command with 1.
"""

# ruff: noqa: T201

import argparse
import json
import queue
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import Fault, load, load_rooms
from trial import Caught, Copy, Limits, try_fault

_USUAL = Limits()
_CONTROL = Limits(failures=1000, seconds=1800.0, test_seconds=120)


def main() -> int:
    """The command."""
    args = _arguments()
    chosen = [fault for fault in load() if _is_chosen(fault, args)]
    if not chosen:
        print("no such fault", file=sys.stderr)
        return 2
    limits = Limits(args.stop_after, args.seconds, args.timeout, args.tiers)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies = [Copy(Path(folder) / str(i)) for i in range(args.jobs)]
        found = _try_all(chosen, copies, limits, args.json)
        suspects = sorted({test for caught in found for test in caught.by})
        print(f"control: {len(suspects)} tests without any fault", file=sys.stderr)
        flawed = _fail_anyway(copies[0], suspects)
        for copy in copies:
            copy.close()
    _save(args.json, found, flawed)
    _print_table(found)
    for test in flawed:
        print(f"fails without any fault, too: {test}")
    return 1 if flawed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plant_faults", description="Plant faults; count the tests that catch each.")
    parser.add_argument("--only", metavar="ID,...", help="these faults")
    parser.add_argument("--room", help="the faults of one room (or several, with commas)")
    parser.add_argument("--stop-after", type=int, default=_USUAL.failures, metavar="N", help="tests that catch a fault")
    parser.add_argument("--seconds", type=float, default=_USUAL.seconds, help="for one fault, at most")
    parser.add_argument("--timeout", type=int, default=_USUAL.test_seconds, help="seconds for one test, at most")
    parser.add_argument("--tiers", type=int, default=_USUAL.tiers, help="1: only the nearest tests; 2: the room's, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults tried at a time")
    return parser.parse_args()


def _is_chosen(fault: Fault, args: argparse.Namespace) -> bool:
    names = args.only.split(",") if args.only else [fault.name]
    rooms = args.room.split(",") if args.room else [fault.room]
    return fault.name in names and fault.room in rooms


def _try_all(chosen: Sequence[Fault], copies: Sequence[Copy], limits: Limits, file: Path | None) -> list[Caught]:
    """Try each, as many at a time as there are copies; what is known is written after each."""
    rooms, found = load_rooms(), list[Caught]()
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def attempt(fault: Fault) -> Caught:
        copy = free.get()
        try:
            return try_fault(copy, fault, rooms, limits)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        for caught in pool.map(attempt, chosen):
            found.append(caught)
            _save(file, found, ())
            print(_line(caught), file=sys.stderr, flush=True)
    return found


def _fail_anyway(copy: Copy, tests: Sequence[str]) -> tuple[str, ...]:
    """Those of the tests that fail without any fault."""
    return copy.run(tests, _CONTROL).failed if tests else ()


def _save(file: Path | None, found: Iterable[Caught], flawed: Sequence[str]) -> None:
    if file is None:
        return
    faults = {
        caught.fault.name: {
            "room": caught.fault.room,
            "what": caught.fault.what,
            "caught_by": [test for test in caught.by if test not in flawed],
            "is_complete": caught.is_complete,
            "seconds": round(caught.seconds, 1),
        }
        for caught in found
    }
    file.write_text(json.dumps({"faults": faults, "fail_without_fault": list(flawed)}, indent=1) + "\n")


def _print_table(found: Sequence[Caught]) -> None:
    """The faults that fewest tests have caught first."""
    for caught in sorted(found, key=lambda one: len(one.by)):
        print(_line(caught))
    counts = [len(caught.by) for caught in found]
    print(f"{len(found)} faults: {counts.count(0)} caught by no test, {counts.count(1)} by one")


def _line(caught: Caught) -> str:
    more = "" if caught.is_complete else " (more tests were not run)"
    tests = ", ".join(caught.by) if caught.by else f"NOT CAUGHT: {caught.fault.what}"
    return f"{caught.fault.name:32} {len(caught.by)}  {caught.seconds:5.0f} s  {tests}{more}"


if __name__ == "__main__":
    sys.exit(main())
