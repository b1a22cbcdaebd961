"""Signals to processes that tests start."""

import signal
import time
from pathlib import Path

import psutil


def let_children_hear_them() -> None:
    """Ctrl-C. A shell that runs this process in the background has it ignore Ctrl-C, and its children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def freeze(process: psutil.Process) -> None:
    """Stop a process, and wait until each of its threads has stopped.

    SIGSTOP goes to one thread, and the others stop once it runs: on a busy machine they went on for up to 24 ms, in
    which a peer can be accepted.
    """
    process.suspend()
    given_up = time.monotonic() + 10
    while (states := _states(process)) - {psutil.STATUS_STOPPED, "T"}:
        assert time.monotonic() < given_up, f"process {process.pid} does not stop: {states}"
        time.sleep(0.001)


def _states(process: psutil.Process) -> set[str]:
    """The states of its threads as /proc has them, else (on a Mac) that of the process."""
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.exists():
        return {process.status()}
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in tasks.glob("*/stat")}
