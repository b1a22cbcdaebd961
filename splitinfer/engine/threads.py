"""Ends threads that have used MLX.

MLX keeps streams and compiled functions per thread. What a thread leaves behind is freed when the operating system's
thread ends, which is after Python's ``join``: freeing compiled functions then needs an interpreter that may be shutting
down, and aborts. So a thread gives them up itself, at its end.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import mlx.core as mx

P = ParamSpec("P")


def clears_streams(run: Callable[P, None]) -> Callable[P, None]:
    """Have a thread that runs ``run`` give up what MLX keeps for it."""

    @wraps(run)
    def running(*args: P.args, **named: P.kwargs) -> None:
        try:
            run(*args, **named)
        finally:
            mx.clear_streams()

    return running
