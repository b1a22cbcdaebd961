"""A request's text: turns the tokens that the scheduler reports into events for the request's reader.

Text is decoded as tokens arrive and never contains half a character. A stop string may cross tokens, so text that may
become one is held back. The reader receives events through a queue, because the engine's thread must not wait for it.
A request without stop strings is decoded on the reader's thread, so that the next step does not wait for that either.

The form of an answer and the tokenizer may fail on any token. Then only that request ends with an error.
"""

import logging
import queue
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from splitinfer.core.grammar import Text, Texts, TokenRules
from splitinfer.core.plan import SampledToken
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.stops import StopMatcher, StopUpdate, Told
from splitinfer.text.detokenizer import Detokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedRules:
    """``TokenRules`` that never raise: after the first exception, their ``failure``, they restrict nothing."""

    def __init__(self, rules: TokenRules) -> None:
        self._rules, self._failure = rules, ""

    @property
    def failure(self) -> str | None:
        return self._failure or self._rules.failure

    def refuses(self, answer: Seq[int]) -> bool:
        return self._told(lambda: self._rules.refuses(answer), False)

    def jump_forward(self, answer: Seq[int], most: int) -> tuple[int, ...]:
        return self._told(lambda: self._rules.jump_forward(answer, most), ())

    def admitted(self, answer: Seq[int], drafts: Seq[int]) -> list[bool]:
        return self._told(lambda: self._rules.admitted(answer, drafts), [])

    def alternatives(self, answer: Seq[int]) -> Texts:
        return self._told(lambda: self._rules.alternatives(answer), ())

    def decide(self, answer: Seq[int], tokens: Text) -> None:
        self._told(lambda: self._rules.decide(answer, tokens), None)

    def masks(self, answer: Seq[int], first: int) -> list[bytes | None]:
        return self._told(lambda: self._rules.masks(answer, first), [])

    def _told(self, ask: Callable[[], T], nothing: T) -> T:
        if self._failure:
            return nothing
        try:
            return ask()
        except Exception as error:
            log.warning("the form of an answer failed", exc_info=error)
            self._failure = f"the answer's form failed ({type(error).__name__}: {error})"
            return nothing


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a chosen token, and the most likely tokens as (token id, log probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New tokens and text of a request. The last event has a ``finish_reason``; its text may be empty.

    ``time`` is in seconds since submission. ``stop``: the stop string that ended it, if one did. ``parts``: the new
    parts (``text.answer.AnswerPart``) of an answer that is split into parts; ``text`` is then the text for the reader.
    """

    token_ids: tuple[int, ...]
    text: str
    time: float
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    stop: str | None = None
    parts: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """The progress of a prefill: ``read`` of ``total`` prompt tokens, ``cached`` of them from the prefix cache.
    ``seconds``: from its first step to the last one that is done; ``since``: the seconds since that one."""

    read: int
    total: int
    cached: int
    seconds: float
    since: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the first token, at the speed so far; ``None`` before the first step is done."""
        done = self.read - self.cached
        return max(0.0, self.seconds * (self.total - self.read) / done - self.since) if done > 0 else None


@dataclass(slots=True)
class RequestOutput:
    """Everything that a request produced. ``token_times``: seconds since submission, one per token; [0] is TTFT.
    ``queue_seconds``: seconds from submission to its first step; ``None`` without a step.
    ``num_tried_drafts``: the drafts that were verified; ``num_right_drafts``: the drafts that became tokens.
    ``prompt_logprobs``: for the prompt's tokens from the second on, if the request asks for them.

    ``token_ids`` holds every generated token, including the one that ended the answer; ``text`` contains neither
    special tokens nor the stop string. Unless the request is ``raw``, ``text`` is the text for the reader,
    ``reasoning`` the model's thoughts, and ``calls`` its tool calls (``text.answer.ToolCallPart``).
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    queue_seconds: float | None = None
    num_tried_drafts: int = 0
    num_right_drafts: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    calls: list[Any] = field(default_factory=list)

    def add(self, event: StreamEvent) -> None:
        """Append one event."""
        self.token_ids += event.token_ids
        self.text += event.text
        self.token_times += [event.time] * len(event.token_ids)
        if event.logprobs:
            self.logprobs = (self.logprobs or []) + list(event.logprobs)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.error = event.error or self.error


class _Taken(NamedTuple):
    """A token, not decoded yet, or an end without a token. ``time`` is in seconds since submission."""

    token: SampledToken | None
    reason: FinishReason | None
    time: float
    error: str | None = None


Came = StreamEvent | _Taken


class RequestState:
    """A request inside the engine. ``sequence`` belongs to the scheduler. Only the request's one reader calls ``get``
    and ``is_empty``. ``notify``: called on the engine's thread after each event, for a reader that cannot wait in
    ``get``; it must return at once. ``told``: splits the answer into parts and ends it at a stop string; ``None``: stop
    strings are searched in the whole text.
    """

    def __init__(
        self,
        sequence: Sequence,
        detokenizer: Detokenizer | None,
        clock: Callable[[], float],
        notify: Callable[[], None] | None = None,
        told: Told | None = None,
    ) -> None:
        self.sequence = sequence
        if sequence.rules is not None:
            sequence.rules = GuardedRules(sequence.rules)
        self._events: queue.SimpleQueue[Came] = queue.SimpleQueue()
        self._notify = notify
        self._detokenizer = detokenizer
        self._told: Told = told or StopMatcher(sequence.params.stop)
        self._clock = clock
        self.submitted = clock()
        """The time of submission, in seconds on ``clock``."""

    @property
    def seq_id(self) -> int:
        """The sequence's id, which is also the request's."""
        return self.sequence.seq_id

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from its submission to its first step; ``None`` before that."""
        begun = self.sequence.begun_at
        return None if begun is None else begun - self.submitted

    @property
    def reading(self) -> Reading | None:
        """The progress of its prefill; ``None`` before its first step and after its prefill."""
        seq, begun = self.sequence, self.sequence.begun_at
        (read, read_at), total = seq.read, seq.num_prompt_tokens
        if begun is None or read >= total or seq.num_generated:
            return None
        last = max(begun, read_at)
        return Reading(read, total, seq.num_cached or 0, last - begun, self._clock() - last)

    def take(self, token: SampledToken, reason: FinishReason | None) -> tuple[Came, FinishReason | None]:
        """Take a token. Return the item for ``tell``, and why the request ends with this token: ``reason``, a stop
        string, or None if it goes on."""
        taken = _Taken(token, reason, self._clock() - self.submitted)
        if not self.sequence.params.stop:
            return taken, reason
        event = self._event_of(taken)
        return event, None if event.finish_reason is None else FinishReason(event.finish_reason)

    def tell(self, came: Came) -> None:
        """Give an item to the reader. Count a request that ends before this call: its reader may ask for figures at
        once."""
        self._events.put(came)
        if self._notify is not None:
            self._notify()

    def get(self, timeout: float | None = None) -> StreamEvent:
        """Wait for the next event. Raises queue.Empty if no event arrives within ``timeout`` seconds."""
        came = self._events.get(timeout=timeout)
        return self._event_of(came) if isinstance(came, _Taken) else came

    @property
    def is_empty(self) -> bool:
        """Whether no event waits now. For the reader, false stays false until it calls ``get``."""
        return self._events.empty()

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request without a token, after an abort or a failure. The reader gets the text that was held back."""
        taken = _Taken(None, reason, self._clock() - self.submitted, error)
        self.tell(self._event_of(taken) if self.sequence.params.stop else taken)

    def _event_of(self, taken: _Taken) -> StreamEvent:
        """Decode an item. Call once for each item, in order. A failure ends the request with an error."""
        try:
            return self._decoded(taken)
        except Exception as error:
            log.warning("request %d: its tokens cannot be decoded", self.seq_id, exc_info=error)
            self._detokenizer, self._told = None, StopMatcher(())
            why = f"the tokenizer cannot decode the answer ({type(error).__name__}: {error})"
            return replace(self._decoded(taken), finish_reason=FinishReason.ERROR.value, error=why)

    def _decoded(self, taken: _Taken) -> StreamEvent:
        token, reason, found = taken.token, taken.reason, list[StopUpdate]()
        if token is not None:
            is_end_token = token.token_id in self.sequence.end_tokens
            new = self._detokenizer.add(token.token_id) if self._detokenizer is not None and not is_end_token else ""
            found.append(self._told.feed(new))
        if reason is not None and not (found and found[0].stopped):
            is_cut = reason is not FinishReason.STOP
            found.append(self._told.feed("" if self._detokenizer is None else self._detokenizer.flush(is_cut=is_cut)))
            if found[-1].stopped is None:
                found.append(self._told.finish(is_cut=is_cut))
        if len(found) == 1:  # nearly every token
            text, parts, stop = found[0].text, found[0].parts, found[0].stopped
        else:
            text, parts = "".join(one.text for one in found), tuple(part for one in found for part in one.parts)
            stop = next((one.stopped for one in found if one.stopped is not None), None)
        if stop is not None:
            reason = FinishReason.STOP
        ids = () if token is None else (token.token_id,)
        ended = None if reason is None else reason.value
        return StreamEvent(ids, text, taken.time, ended, logprobs_of(token), taken.error, stop, parts)


def logprobs_of(token: SampledToken | None) -> tuple[TokenLogprobs, ...]:
    """Return a token's log probabilities in a tuple; empty if the request does not ask for them."""
    return () if token is None or token.logprob is None else (TokenLogprobs(token.token_id, token.logprob, token.top),)
