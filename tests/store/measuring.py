"""How long each thread of this process runs: the busiest is the limit on a machine with a processor for each."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def thread_seconds() -> dict[int, float]:
    """Seconds of processor by thread (Linux: Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat"); empty
    elsewhere."""
    found = {}
    with suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                found[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def busiest(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Seconds that the busiest thread ran in between; 0 where that is not known."""
    return max((seconds - before.get(number, 0.0) for number, seconds in after.items()), default=0.0)


def touch(path: Path, nbytes: int) -> None:
    """Have the system's memory for a file of that size at hand. In a virtual machine the first use of memory that its
    host took back costs more than all else that writing does, and that is not the copy's cost."""
    with path.open("wb") as file:
        for _ in range(-(-nbytes // 2**20)):
            file.write(bytes(2**20))
    path.unlink()
