"""One request as its reader holds it, and what may be asked of one."""

import math
from collections.abc import Iterator, Sequence

from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.coordinator.engine import Engine
from splitinfer.engine.coordinator.requests import RequestOutput, RequestState, StreamEvent
from splitinfer.errors import RequestError

Prompt = str | Sequence[int]


class Request:
    """One request under way. Iterate over it, or ask for its ``result``; either, once."""

    def __init__(self, state: RequestState, engine: Engine) -> None:
        self._state, self._engine = state, engine
        self.output = RequestOutput(state.sequence.num_prompt_tokens)
        """What has been read so far."""

    def __iter__(self) -> Iterator[StreamEvent]:
        """Events as tokens arrive; the last one has a ``finish_reason``. Leaving early aborts the request."""
        try:
            while self.output.finish_reason is None:
                event = self._state.events.get()
                self.output.add(event)
                self.output.num_cached_tokens = self._state.sequence.num_cached or 0
                self.output.queue_seconds = self._state.queue_seconds
                yield event
        finally:
            if self.output.finish_reason is None:
                self.abort()

    def result(self) -> RequestOutput:
        """Wait for the end. A request that could not go on has ``finish_reason`` "error" and keeps its tokens."""
        for _ in self:
            pass
        return self.output

    def abort(self) -> None:
        """End it where it is, on all stages; it finishes with "abort"."""
        self._engine.abort(self._state.seq_id)


class RequestEvents(Iterator[StreamEvent]):
    """A request's events; whoever drops it, even unread, aborts the request."""

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


def check_handling(session: str | None, priority: int, timeout: float | None) -> None:
    """Refuse here what would fail in the engine's thread, and every request with it.

    Raises:
        RequestError: a value of the wrong kind, or out of its range.
    """
    if session is not None and not isinstance(session, str):
        raise RequestError(f"session must be a string, not {session!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be a whole number, not {priority!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
        raise RequestError(f"timeout must be seconds over 0, not {timeout!r}")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of ``count`` prompts, from one set for all or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts came with {len(params)} sampling parameters")
    return list(params)
