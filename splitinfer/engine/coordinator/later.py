"""What need not be done between a result and the step that it allows: counting, mostly. It is done in order, when there
is time, or before anybody asks for figures."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_MOST = 256  # calls that are put off; a loop that is never idle makes them then


class Later:
    """Calls that are put off. One thread puts; any thread may run them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._running = threading.Lock()

    def put(self, call: Callable[..., None], *arguments: object) -> None:
        """Make a call later."""
        self._calls.append((call, arguments))
        if len(self._calls) > _MOST:
            self.run()

    def run(self) -> None:
        """Make all calls that were put off so far."""
        self.then(lambda: None)

    def then(self, read: Callable[[], T]) -> T:
        """Make all calls that were put off so far; the result of ``read``, during which none is made."""
        with self._running:
            while self._calls:
                call, arguments = self._calls.popleft()
                call(*arguments)
            return read()
