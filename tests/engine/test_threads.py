"""A thread that uses MLX leaves nothing behind that would need an interpreter."""

import subprocess
import sys

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
