"""What MLX computes for a thread does not preempt it, and leaves nothing behind that would need an interpreter."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from splitinfer.engine.threads import clears_streams

TASKS = Path("/proc/self/task")  # of this process: its threads
ENDS = """
import threading
import mlx.core as mx
from splitinfer.engine.threads import clears_streams

@clears_streams
def run():
    functions.extend(mx.compile(lambda x, i=i: x + i) for i in range(100))
    mx.eval([function(mx.zeros((3,))) for function in functions[:1]])

functions = []
thread = threading.Thread(target=run, daemon=True)
thread.start()
thread.join()
"""


def test_a_process_ends_at_once_behind_a_thread_that_has_compiled():
    """Without ``clears_streams`` six of eight such processes aborted."""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has a class of threads for batch work")
def test_what_computes_for_a_thread_is_woken_without_preempting_it() -> None:
    """Where both share a processor, each of a step's operations cost two switches between them."""
    found, before = dict[str, set[int]](), set(TASKS.iterdir())

    @clears_streams
    def run() -> None:
        mx.eval(mx.ones((3,)) + 1)
        found["started"] = {os.sched_getscheduler(int(task.name)) for task in set(TASKS.iterdir()) - before}
        found["own"] = {os.sched_getscheduler(0)}

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert os.SCHED_BATCH in found["started"]
    assert found["own"] == {os.SCHED_OTHER}
