"""Requests for asyncio: an event loop reads what the engine's thread produces.

The engine's thread must never wait for a reader, and a loop that serves many requests must not be woken once for each
token of each of them: a step brings tokens for all members of a group at once, and each wake-up from another thread is
a system call. So readers of one loop share a ``LoopBell``. The first event after the loop has run wakes it, the events
until it runs again only mark their readers, and the loop then wakes them all. A bell keeps no loop: that of each
`asyncio.run` goes when it is closed.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from weakref import WeakKeyDictionary, ref

from splitinfer.engine.coordinator.engine import Engine
from splitinfer.engine.coordinator.requests import RequestOutput, RequestState, StreamEvent
from splitinfer.llm.request import UnderWay


class LoopBell:
    """Wakes the readers of one event loop from any thread, once for all that came since the loop last ran."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._lock = threading.Lock()
        self._marked: dict[ref[asyncio.Event], None] = {}  # in the order of their events; one that waits has its loop
        self.num_wakes = 0
        """Times that the loop was woken."""

    def ring(self, reader: asyncio.Event) -> None:
        """Have the loop set ``reader``. Nothing happens where the loop is closed: nobody reads any more."""
        with self._lock:
            is_first, self._marked[ref(reader)] = not self._marked, None
            if not is_first:
                return
            self.num_wakes += 1
            loop = self._loop()
            try:
                if loop is None:
                    raise RuntimeError
                loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed, or gone
                self._marked.clear()

    def _wake(self) -> None:
        with self._lock:
            marked, self._marked = self._marked, {}
        for mark in marked:
            if (reader := mark()) is not None:
                reader.set()


_bells: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBell]" = WeakKeyDictionary()


def bell_of_running_loop() -> LoopBell:
    """The bell that all readers of the running loop share. Call it on the loop."""
    loop = asyncio.get_running_loop()
    return _bells.setdefault(loop, LoopBell(loop))


class AsyncRequest(UnderWay):
    """One request under way, read by an event loop. Iterate over its events, or await its ``result``; either, once.

    ``has_events``: set on the loop after each event.
    """

    def __init__(self, state: RequestState, engine: Engine, has_events: asyncio.Event) -> None:
        super().__init__(state, engine)
        self._has_events = has_events

    async def __aiter__(self) -> AsyncGenerator[StreamEvent, None]:
        """Yield events as tokens arrive; the last has a ``finish_reason``. Leaving early, or the cancellation of the
        task that reads, aborts the request."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self) -> AsyncGenerator[list[StreamEvent], None]:
        """The same, with all events together that have come: the tokens of a step, or what a reader is behind."""
        try:
            while self.output.finish_reason is None:
                self._has_events.clear()  # before looking, so that nothing comes unseen
                if batch := self._all_nowait():
                    yield batch
                else:
                    await self._has_events.wait()
        finally:
            if self.output.finish_reason is None:
                self.abort()

    async def result(self) -> RequestOutput:
        """Wait for the end. A request that failed has ``finish_reason`` "error", and the tokens it had."""
        async for _ in self:
            pass
        return self.output
