"""An answer while it grows: asks the engine for it, and reads it on an event loop, with all choices of a request as one
stream.

Each choice ends for a reason that every API translates: "stop", "length", "tool_calls" if the model called a tool,
"abort" or "error". A choice limited to one call ends with that call, whatever the model would add. If the client was
told of a call that then proves invalid, the choice ends with an error.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from splitinfer.core.sampling_params import MAX_BIAS, MAX_BIASED
from splitinfer.engine.loop.requests import Reading, StreamEvent, TokenLogprobs
from splitinfer.llm import LLM
from splitinfer.llm.request import AsyncRequest, Handling
from splitinfer.server.ask import Ask, AskedChat
from splitinfer.server.problem import AGAIN, Problem
from splitinfer.server.reading import Reader
from splitinfer.server.stream import COMMENT_PING, EVENTS, PING_EVERY
from splitinfer.text.answer import AnswerParser, AnswerPart, BrokenCall, ReasoningPart, TextPart, ToolCallPart
from splitinfer.text.fill import Gap


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request. A prompt counts once, whatever the number of choices. ``reasoning``: the generated
    tokens that are reasoning. ``tried``, ``right``: drafts that were verified, and drafts that were accepted."""

    prompt: int
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    tried: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceTimes:
    """The times of one choice, in seconds on the monotonic clock. A time is ``None`` if the choice never got there."""

    submitted: float
    begun: float | None = None
    first: float | None = None
    last: float | None = None


class Piece(NamedTuple):
    """The news of one choice. ``finish_reason``: set on its last piece. ``error``: why it failed, if it did;
    ``status``: the HTTP status for that. ``stop``: the stop string that ended it, if one did."""

    choice: int
    parts: tuple[AnswerPart, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    stop: str | None = None
    status: int = 503

    @property
    def problem(self) -> Problem:
        """What a client is told where it failed."""
        return Problem(self.status, self.error or "the pipeline has failed", retry_after=AGAIN)


_BROKEN = "the model's call of a tool is not valid; ask again"


@dataclass(slots=True)
class Choice:
    """One choice: sends a request to the engine and makes pieces of its events. ``number``: its index. ``one_call``:
    end it after its first call. ``tell``: called with its tokens when it is over. ``num_reasoning_tokens``: tokens of
    the pieces that begin with reasoning, so markers around reasoning count for the piece that follows them. ``ends``:
    end tokens, which are not part of its text."""

    number: int
    request: AsyncRequest
    one_call: bool = False
    tell: Callable[[list[int]], None] = lambda _: None
    ends: frozenset[int] = frozenset()
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    has_ended: bool = False  # its last piece was made
    is_broken: bool = False  # by an invalid call
    _num_told: int = 0  # tokens of the pieces so far
    _has_called: bool = False
    _logprobs: list[TokenLogprobs] = field(default_factory=list)  # of tokens whose text is still held back

    @property
    def times(self) -> ChoiceTimes:
        """The times that the choice has reached so far."""
        output, at = self.request.output, self.request.submitted
        first, last = (at + output.token_times[0], at + output.token_times[-1]) if output.token_times else (None, None)
        begun = None if output.queue_seconds is None else at + output.queue_seconds
        return ChoiceTimes(at, begun, first, last)

    @property
    def is_scored(self) -> bool:
        """Whether all requested log probabilities of its prompt are there. Without them an echo would look complete."""
        found = self.request.output.prompt_logprobs
        return found is None or len(found) >= len(self.request.prompt) - 1

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        """Yield the choice's pieces as they come."""
        async with aclosing(self.request.batches()) as batches:
            async for events in batches:
                if pieces := [piece for event in events if (piece := self.read(event)) is not None]:
                    yield pieces
                if self.has_ended:
                    return

    def read(self, event: StreamEvent) -> Piece | None:
        """Return the next piece. Return None while all text is still held back, or if the choice has ended."""
        if self.has_ended:
            return None
        self.num_tokens += len(event.token_ids)
        self._logprobs += [one for one in event.logprobs if one.token_id not in self.ends]
        reason, parts, is_cut = event.finish_reason, event.parts, False
        if event.text and not parts:  # the text was not parsed
            parts = (TextPart(event.text),)
        if any(isinstance(part, ToolCallPart | BrokenCall) for part in parts):
            parts, is_cut = self._up_to_end(parts)
        ends = reason is not None or is_cut or self.is_broken
        if not parts and not ends:
            return None
        self.has_ended = ends
        if parts and isinstance(parts[0], ReasoningPart):
            self.num_reasoning_tokens += self.num_tokens - self._num_told
        self._num_told = self.num_tokens
        logprobs, self._logprobs = tuple(self._logprobs), []
        if self.is_broken:
            return Piece(self.number, parts, logprobs, "error", _BROKEN, status=500)
        if ends and self._has_called and reason in (None, "stop"):
            reason = "tool_calls"
        return Piece(self.number, parts, logprobs, reason, event.error, event.stop)

    def _up_to_end(self, parts: tuple[AnswerPart, ...]) -> tuple[tuple[AnswerPart, ...], bool]:
        """Note the calls among the parts. Return the parts up to the one that ends the choice, and whether a call ends
        it."""
        calls = [i for i, part in enumerate(parts) if isinstance(part, ToolCallPart) and part.ends]
        self._has_called |= bool(calls)
        is_cut = self.one_call and bool(calls)
        if is_cut:
            parts = parts[: calls[0] + 1]
        if BrokenCall() in parts:
            parts, self.is_broken = parts[: parts.index(BrokenCall())], True
        return parts, is_cut


# -- asking the engine -----------------------------------------------------------------------------


log = logging.getLogger(__name__)

_CUT_SHORT = "the server shut down before the answer was complete"


@dataclass(slots=True)
class Answer:
    """The choices of one request, under way. ``num_choices``: for each prompt; the choices of one prompt are adjacent.
    ``failure``: returns why the pipeline no longer accepts requests, if it does not (``PipelineHealth``).
    ``is_cancelled``: whether the client has cancelled, maybe before any choice was submitted."""

    num_choices: int
    failure: Callable[[], str | None] = lambda: None
    choices: list[Choice] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def usage(self) -> Usage:
        outputs = [choice.request.output for choice in self.choices]
        prompts = outputs[:: self.num_choices]
        return Usage(
            sum(output.num_prompt_tokens for output in prompts),
            sum(output.num_cached_tokens for output in prompts),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_reasoning_tokens for choice in self.choices),
            sum(output.num_tried_drafts for output in outputs),
            sum(output.num_right_drafts for output in outputs),
        )

    @property
    def tokens_by_prompt(self) -> list[list[int]]:
        """The number of tokens of each choice so far, grouped by prompt."""
        numbers, each = [len(choice.request.output.token_ids) for choice in self.choices], self.num_choices
        return [numbers[first : first + each] for first in range(0, len(numbers), each)]

    @property
    def reading(self) -> Reading | None:
        """The progress of the first prompt that is still being read."""
        return next((found for one in self.choices if (found := one.request.reading) is not None), None)

    @property
    def first_reading(self) -> Reading:
        """The finished reading of the first prompt, once its answer has begun."""
        output = self.choices[0].request.output
        total, first = output.num_prompt_tokens, next(iter(output.token_times), 0.0)
        return Reading(total, total, output.num_cached_tokens, max(0.0, first - (output.queue_seconds or 0.0)))

    def abort(self) -> None:
        for choice in self.choices:
            choice.request.abort()

    def cancel(self) -> None:
        """End all choices because the client cancelled."""
        self.is_cancelled = True
        self.abort()

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces of all choices as they come; pieces that come together are one batch. Closing the generator
        aborts all unfinished choices."""
        source = self.choices[0].batches() if len(self.choices) == 1 else self._merged()
        try:
            async with aclosing(source) as batches:
                async for batch in batches:
                    yield [piece if piece.finish_reason is None else self._told(piece) for piece in batch]
        finally:
            self.abort()
            for choice in self.choices:
                choice.tell(choice.request.output.token_ids)

    def _told(self, piece: Piece) -> Piece:
        """Return a piece in the form that a client sees. If the server itself cut the answer short, the piece is an
        error, else the answer would look complete. A failure that ended every request mentions addresses and words of
        libraries, which belong in the log only."""
        if piece.finish_reason == "abort" and not self.choices[piece.choice].is_scored:
            why = piece.error or "the request was ended"
            piece = piece._replace(finish_reason="error", error=f"{why} before its prompt was scored")
        if piece.finish_reason == "abort" and piece.error is None and not self.is_cancelled:
            piece = piece._replace(finish_reason="error", error=_CUT_SHORT)
        if piece.finish_reason != "error" or (said := self.failure()) is None or piece.error == said:
            return piece
        log.warning("an answer ended with the pipeline: %s", piece.error)
        return piece._replace(error=said)

    async def _merged(self) -> AsyncGenerator[list[Piece], None]:
        ready: asyncio.Queue[list[Piece] | None] = asyncio.Queue()

        async def read(choice: Choice) -> None:
            try:
                async with aclosing(choice.batches()) as batches:
                    async for batch in batches:
                        ready.put_nowait(batch)
            finally:
                ready.put_nowait(None)

        tasks = [asyncio.create_task(read(choice)) for choice in self.choices]
        try:
            left = len(tasks)
            while left:
                found = [await ready.get()]
                while not ready.empty():
                    found.append(ready.get_nowait())
                left -= found.count(None)
                if batch := [piece for each in found if each is not None for piece in each]:
                    yield batch
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Writer:
    """An answer in one API's words: a stream, or the document that is made of the same pieces. A stream ends with the
    first piece that failed, which is written without its own end."""

    media_type: ClassVar[str] = EVENTS

    @property
    def ping_every(self) -> float:
        """Seconds of silence after which a ping is sent."""
        return PING_EVERY

    def ping(self, answer: Answer) -> bytes:
        return COMMENT_PING

    def begin(self, answer: Answer) -> bytes:
        return b""

    def written(self, piece: Piece) -> bytes:
        raise NotImplementedError

    def end(self, last: Piece, usage: Usage) -> bytes:
        raise NotImplementedError

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        raise NotImplementedError


async def written(answer: Answer, writer: Writer) -> AsyncGenerator[bytes, None]:
    """Yield an answer as a stream."""
    yield writer.begin(answer)
    last = Piece(0)
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            yield b"".join(map(writer.written, batch))
            last = next((piece for piece in batch if piece.finish_reason == "error"), batch[-1])
            if last.finish_reason == "error":
                break
    yield writer.end(last, answer.usage)


async def submit(reader: Reader, answer: Answer, ask: Ask, handling: Handling, size: int) -> None:
    """Ask the engine for the answers to one prompt, beside those to the prompts before it. ``size``: of the request, in
    bytes. What takes time is done beside the event loop. What was asked is in ``answer`` also where this fails.

    Raises:
        Problem: a value is out of its range.
        SplitinferError: as ``LLM.submit``.
    """
    llm = reader.llm
    seen, prompt, text = await reader.read(ask.prompt, size)
    room = llm.context_length - len(seen.tokens)
    has_form = ask.sampling.get("grammar") is not None and not ask.must_call
    if ask.has_formed_calls:
        grammar = await asyncio.to_thread(llm.call_grammar, ask.tools, must=ask.must_call, form=ask.form)
        ask = replace(ask, sampling={**ask.sampling, "grammar": grammar})
    if isinstance(ask.prompt, Gap) and (marks := llm.tokenizer.fill_marks) is not None:
        ends = (*ask.sampling.get("stop_token_ids", ()), *marks.ids.values())
        ask = replace(ask, sampling={**ask.sampling, "stop_token_ids": ends})
    if isinstance(ask.prompt, AskedChat) and ask.prompt.tools and not ask.tools:
        ask = replace(ask, sampling=_without_calls(llm, ask.sampling))
    for params in [ask.params(llm.recommended_sampling, room, choice) for choice in range(ask.num_choices)]:
        parser = _parser(llm, ask, prompt, has_form)
        request = await llm.asubmit(
            seen,
            params,
            priority=handling.priority,
            timeout=handling.timeout,
            raw=parser is None,
            parser=parser,
            goes_on=isinstance(ask.prompt, str | tuple) or (isinstance(ask.prompt, AskedChat) and ask.prompt.continues),
        )
        choice = Choice(len(answer.choices), request, ask.one_call, ends=request.end_tokens)
        if text is not None:
            choice.tell = partial(_tell, reader, text, prompt)
        answer.choices.append(choice)


def _tell(reader: Reader, text: str, prompt: list[int], answer: list[int]) -> None:
    """Make an answer known, without its end token: templates write one of their own, or none."""
    ends = reader.llm.tokenizer.eos_token_ids
    reader.known.answered(text, prompt, answer[:-1] if answer and answer[-1] in ends else list(answer))


def _parser(llm: LLM, ask: Ask, prompt: Sequence[int], has_form: bool) -> AnswerParser | None:
    """Return what tells a chat's answer apart. Return None for what continues a text, which is text."""
    if not isinstance(ask.prompt, AskedChat):
        return None
    begun = ask.prompt.begun
    return llm.tokenizer.answer_format.parser(prompt, ask.tools, has_form=has_form, grows=ask.grows, begun=begun)


def _without_calls(llm: LLM, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sampling of an answer that may call no tool, although its prompt tells of some. The token that opens a
    call never comes, if there is such a token; a call in other tokens is text."""
    opening, biases = llm.tokenizer.answer_format.call_start, dict(sampling.get("logit_bias", ()))
    is_mark = any(map(str.isalpha, opening)) and not opening.isalpha()  # neither a bracket nor a word
    ids = llm.tokenizer.encode(opening, adds_special=False) if is_mark and len(biases) < MAX_BIASED else []
    return {**sampling, "logit_bias": tuple({**biases, ids[0]: -MAX_BIAS}.items())} if len(ids) == 1 else sampling
