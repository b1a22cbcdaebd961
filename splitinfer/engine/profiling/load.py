"""The load by other programs while this one measures: the processors that they use, and the busiest program."""

import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from splitinfer.machine.profile import Load


def _busy_seconds() -> float:
    """Return the processor time of all programs since the system started, in seconds, with a hypervisor's share."""
    times = psutil.cpu_times()
    guests = (getattr(times, name, 0.0) for name in ("guest", "guest_nice"))  # user and nice have them, too
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - sum(guests))


def _by_process() -> dict[tuple[int, str], float]:
    """Return the processor time of each process that the system reports, in seconds."""
    found = dict[tuple[int, str], float]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            times = process.cpu_times()
            found[process.pid, process.name()] = times.user + times.system
    return found


def _own() -> set[int]:
    """Return the ids of this process and of its child processes."""
    own = psutil.Process()
    with suppress(psutil.Error, OSError):
        return {own.pid, *(child.pid for child in own.children(recursive=True))}
    return {own.pid}


@dataclass(slots=True)
class LoadWatch:
    """Watches the load from its creation until ``load`` is called."""

    _began: float = field(default_factory=time.monotonic)
    _busy: float = field(default_factory=_busy_seconds)
    _each: dict[tuple[int, str], float] = field(default_factory=_by_process)

    def load(self) -> Load:
        """Return the load since the watch began."""
        own, now = _own(), _by_process()
        took = {one: seconds - self._each.get(one, 0.0) for one, seconds in now.items()}
        seconds = max(1e-3, time.monotonic() - self._began)
        mine = sum(each for (pid, _), each in took.items() if pid in own)
        others = max(0.0, _busy_seconds() - self._busy - mine) / seconds
        by_name = dict[str, float]()
        for (pid, name), each in took.items():
            if pid not in own:
                by_name[name] = by_name.get(name, 0.0) + each
        busiest = max(by_name, key=by_name.__getitem__, default="")
        return Load(others, psutil.cpu_count() or 1, busiest if by_name.get(busiest, 0.0) > 0 else "")
