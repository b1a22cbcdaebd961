"""Makes the threads of links: each first calls a function that the program has set.

An operating system can be told how urgent a thread is, in most systems by the thread itself. This package does not know
how urgent its frames are, so the program sets the function.
"""

import threading
from collections.abc import Callable
from typing import Any

_at_start: list[Callable[[], None]] = []


def at_thread_start(call: Callable[[], None]) -> None:
    """Make every thread that this package starts from now on call ``call`` first. It must not raise."""
    _at_start[:] = [call]


def make(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Return a thread, not yet started, that runs ``target(*args)``."""

    def run() -> None:
        for call in _at_start:
            call()
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)
