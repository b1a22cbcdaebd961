"""The end of a thread that used MLX.

MLX keeps streams and compiled functions per thread and frees them after Python's ``join``. The interpreter may then be
shutting down, and the process aborts. So a thread frees them itself before it ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


@contextmanager
def clears_streams() -> Iterator[None]:
    """Free the streams and compiled functions that MLX keeps for this thread when the block or function ends."""
    try:
        yield
    finally:
        mx.clear_streams()
