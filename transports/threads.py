"""The threads of links: each calls a function of the program's before it begins.

An operating system may be told how urgent a thread is, in most by the thread itself. This package does not know how
urgent its frames are, so the program says what to call.
"""

import threading
from collections.abc import Callable
from typing import Any

_at_start: list[Callable[[], None]] = []


def at_thread_start(call: Callable[[], None]) -> None:
    """Have every thread that this package starts from now on call ``call`` first. It must not raise."""
    _at_start[:] = [call]


def make(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Return a thread that is to run ``target(*args)``; it is not started yet."""

    def run() -> None:
        for call in _at_start:
            call()
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)
