"""Joins threads that have used MLX.

MLX keeps compiled functions per thread, and frees them, for which it needs the interpreter, after Python's own ``join``
has returned. An interpreter that shuts down in between aborts. So ``join`` here also waits for the operating system's
thread.
"""

import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GRACE = 0.05  # seconds, where the system does not list its threads


def join(thread: threading.Thread, timeout: float) -> bool:
    """Wait at most ``timeout`` seconds for a thread to end; whether it has."""
    give_up = time.monotonic() + timeout
    thread.join(timeout)
    if thread.is_alive():
        return False
    task = _TASKS / str(thread.native_id)
    if not _TASKS.exists():
        time.sleep(_GRACE)
    while task.exists() and time.monotonic() < give_up:
        time.sleep(0.001)
    return True
