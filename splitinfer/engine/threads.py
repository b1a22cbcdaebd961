"""Ending a thread that has used MLX.

MLX keeps compiled functions per thread, and lets go of them, for which it needs Python, after Python's
own ``join`` has already returned. An interpreter that shuts down in between aborts. So joining waits for
the operating system's thread, too.
"""

import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GRACE = 0.05  # seconds, where the system does not tell which threads there are


def join(thread: threading.Thread, timeout: float) -> bool:
    """Wait at most ``timeout`` seconds for a thread to be gone; whether it is."""
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
