"""What MLX computes for a thread does not preempt it, and leaves nothing behind that would need an interpreter."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from splitinfer.engine import threads
from splitinfer.engine.threads import ComputingThread, clears_streams

TASKS = Path("/proc/self/task")  # of this process: its threads
ENDS = """
import threading
import mlx.core as mx
from splitinfer.engine.threads import clears_streams

@clears_streams()
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
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has a class of threads for batch work")
@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_computes_for_a_thread_preempts_it_only_beside_a_processor_of_its_own(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both share a processor, each of a step's operations cost two switches between them. A process may be pinned
    after it has begun."""
    classes, before = list[set[int]](), set(TASKS.iterdir())

    def look() -> None:
        classes.append({os.sched_getscheduler(int(task.name)) for task in set(TASKS.iterdir()) - before})

    @clears_streams()
    def run() -> None:
        computing = ComputingThread()
        computing.update(0.0)
        mx.eval(mx.ones((3,)) + 1)
        look()
        monkeypatch.setattr(threads, "has_own_processor", lambda: is_pinned)
        computing.update(60.0)
        look()
        classes.append({os.sched_getscheduler(0)})

    monkeypatch.setattr(threads, "has_own_processor", lambda: False)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    usual = {os.SCHED_OTHER}
    assert classes == [usual, usual | {os.SCHED_BATCH} if is_pinned else usual, usual]
