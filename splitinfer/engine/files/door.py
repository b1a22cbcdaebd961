"""The file door of a worker: readers on its port, each with an outlet of its own.

Who may enter is decided before (``engine.worker.access``): an admitted key, as for a coordinator, or a worker that the
coordinator has named. A reader gets the messages about weights and nothing else, whatever the engine does meanwhile; it
can make the worker write nothing.
"""

import threading
from collections.abc import Callable

from splitinfer.engine.files.outlet import Outlet, Shelf
from splitinfer.engine.links.connection import Connection
from splitinfer.store.pace import BESIDE_SERVING
from transports import Frame, LinkClosed

_MOST_READERS = 4  # at a time


class Door:
    """Readers, and what they are answered. ``is_serving``: whether requests may be under way, so that a reader is to
    leave the link to them."""

    def __init__(self, shelf: Shelf, is_serving: Callable[[], bool]) -> None:
        self._shelf, self._is_serving = shelf, is_serving
        self._lock = threading.Lock()
        self._outlets: dict[int, Outlet] = {}  # by the connection's identity

    @property
    def reason_against(self) -> str | None:
        """Why no reader may enter now; ``None``: one may."""
        with self._lock:
            count = len(self._outlets)
        return None if count < _MOST_READERS else f"{count} others copy weights from here; try again when one is done"

    def deliver(self, connection: Connection, item: Frame | LinkClosed) -> None:
        """Take what arrived on a reader's link; on the transport's thread."""
        with self._lock:
            outlet = self._outlets.get(id(connection))
            if isinstance(item, LinkClosed):
                self._outlets.pop(id(connection), None)
            elif outlet is None:
                outlet = self._outlets[id(connection)] = Outlet(connection, self._shelf, self._rate)
        if outlet is not None and isinstance(item, Frame):
            outlet.put(item)
        elif outlet is not None:
            outlet.close()

    def _rate(self) -> float | None:
        return BESIDE_SERVING if self._is_serving() else None
