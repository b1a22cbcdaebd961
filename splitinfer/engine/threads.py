"""The end of a thread that used MLX.

MLX keeps streams and compiled functions per thread, and frees them after Python's ``join``, when the interpreter may be
shutting down: that aborts. So a thread gives them up itself, at its end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


@contextmanager
def clears_streams() -> Iterator[None]:
    """Have a thread give up, at the end of what this decorates, what MLX keeps for it."""
    try:
        yield
    finally:
        mx.clear_streams()
