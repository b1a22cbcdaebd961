"""A request as its reader holds it, a thread or an event loop, and the checks of a request's arguments.

The engine's thread never waits for a reader.
"""

import asyncio
import math
import queue
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass

from splitinfer.core.sequence import FinishReason, SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.engine.loop.engine import Engine
from splitinfer.engine.loop.requests import (
    Reading,
    RequestOutput,
    RequestState,
    StreamEvent,
    logprobs_of,
)
from splitinfer.errors import RequestError
from splitinfer.text.answer import ReasoningPart, ToolCallPart, joined

Prompt = str | Sequence[int]


class UnderWay:
    """One request under way, as its one reader holds it."""

    def __init__(self, state: RequestState, engine: Engine) -> None:
        self._state, self._engine = state, engine
        self.output = RequestOutput(state.sequence.num_prompt_tokens)
        """The output read so far."""

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return list(self._state.sequence.sent(0, self._state.sequence.num_prompt_tokens))

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end the answer; the answer's text has none of them."""
        return self._state.sequence.end_tokens

    @property
    def submitted(self) -> float:
        """When it was submitted, in seconds on the monotonic clock."""
        return self._state.submitted

    @property
    def reading(self) -> Reading | None:
        """How far its prompt is read; ``None`` while it waits for its first step, and once it is read."""
        return self._state.reading

    def abort(self) -> None:
        """End the request on all stages; its ``finish_reason`` becomes "abort"."""
        self._engine.abort(self._state.seq_id)

    def _all_nowait(self) -> list[StreamEvent]:
        """Return the events that have come and are not read yet, up to the last one of all."""
        found = list[StreamEvent]()
        while self.output.finish_reason is None and not self._state.is_empty:
            found.append(self._read(self._state.get()))
        return found

    def _read(self, event: StreamEvent) -> StreamEvent:
        self.output.add(event)
        if event.finish_reason == FinishReason.ERROR:
            self.abort()  # where the error is one of reading, the engine does not know of it
        self.output.reasoning += "".join(part.text for part in event.parts if isinstance(part, ReasoningPart))
        if calls := [part for part in event.parts if isinstance(part, ToolCallPart)]:
            self.output.calls = joined([*self.output.calls, *calls])
        self.output.num_cached_tokens = self._state.sequence.num_cached or 0
        self.output.queue_seconds = self._state.queue_seconds
        self.output.num_tried_drafts = self._state.sequence.drafts.num_tried
        self.output.num_right_drafts = self._state.sequence.drafts.num_right
        if self._state.sequence.params.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            scores = list(self._state.sequence.scores)  # all have come before the first token
            self.output.prompt_logprobs = [one for score in scores for one in logprobs_of(score)]
        return event


class Request(UnderWay):
    """One request under way. Iterate over its events, or wait for its ``result``; either, once."""

    def __iter__(self) -> Iterator[StreamEvent]:
        """Yield events as tokens arrive; the last has a ``finish_reason``. Leaving early aborts the request."""
        with closing(self.watched(None)) as events:
            yield from (event for event in events if event is not None)

    def watched(self, every: float | None) -> Generator[StreamEvent | None]:
        """Yield the events, and ``None`` after ``every`` seconds without one. Leaving early aborts the request."""
        try:
            while self.output.finish_reason is None:
                try:
                    event = self._state.get(every)
                except queue.Empty:
                    yield None
                else:
                    yield self._read(event)
        finally:
            if self.output.finish_reason is None:
                self.abort()

    def result(self) -> RequestOutput:
        """Wait for the end. A request that failed has ``finish_reason`` "error", and the tokens it had."""
        for _ in self:
            pass
        return self.output


class RequestEvents(Iterator[StreamEvent]):
    """A request's events. Dropping this iterator, even unread, aborts the request."""

    def __init__(self, request: Request) -> None:
        self._request, self._events = request, iter(request)

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        """Abort the request if it has not ended."""
        if self._request.output.finish_reason is None:
            self._request.abort()

    def __del__(self) -> None:
        self.close()


# -- read by an event loop ----------------------------------------------------------------------------


class _Wakes:
    """Sets events on one loop for other threads. It wakes the loop once for all events that come until the loop looks
    for them: the tokens of a step come together, and a wake is a system call and a turn of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._waiting, self._is_called = loop, deque[asyncio.Event](), False

    def wake(self, has_events: asyncio.Event) -> None:
        """Have the loop set an event, from any thread. Do nothing if the loop is closed: nobody reads any more."""
        self._waiting.append(has_events)
        if not self._is_called:
            self._is_called = True
            try:
                self._loop.call_soon_threadsafe(self._set_all)
            except RuntimeError:
                self._waiting.clear()
                self._is_called = False

    def _set_all(self) -> None:
        self._is_called = False  # before looking, so that nothing comes unseen
        while self._waiting:
            self._waiting.popleft().set()


_WAKES = weakref.WeakValueDictionary[int, _Wakes]()  # by the ids of their loops, while a request is read there


def waker(has_events: asyncio.Event) -> Callable[[], None]:
    """Return a function that any thread may call after it has passed on an event, so that the running loop sets
    ``has_events``."""
    loop = asyncio.get_running_loop()
    wakes = _WAKES.setdefault(id(loop), _Wakes(loop))

    def wake() -> None:
        if not has_events.is_set():  # else its reader will look again
            wakes.wake(has_events)

    return wake


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
        """Yield the same, with all events together that have come: the tokens of a step, or what a reader is behind."""
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


# -- arguments --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handling:
    """How a request is treated among others: the arguments of ``LLM.submit``.

    They are checked here because a wrong one would fail on the engine's thread, and every request with it.

    Raises:
        RequestError: a value has the wrong type, or is out of range.
    """

    session: str | None = None
    priority: int = 0
    timeout: float | None = None
    flight: Flight | None = None

    def __post_init__(self) -> None:
        if self.session is not None and not isinstance(self.session, str):
            raise RequestError(f"session must be a string, not {self.session!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError(f"priority must be a whole number, not {self.priority!r}")
        seconds = self.timeout
        if seconds is not None and not (isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0):
            raise RequestError(f"timeout must be seconds over 0, not {seconds!r}")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return the parameters of each of ``count`` prompts, from one for all or one for each.

    Raises:
        RequestError: their number is another one.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts came with {len(params)} sampling parameters")
    return list(params)
