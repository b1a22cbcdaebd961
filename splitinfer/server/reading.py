"""Asks the engine for an answer and reads it, for an event loop: all choices of a request as one stream of pieces."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from splitinfer.llm import LLM
from splitinfer.llm.async_request import AsyncRequest
from splitinfer.server.answer import ChoiceReader, Parser, Piece, PlainText, Usage
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.preparing import prompt_tokens


@dataclass(frozen=True, slots=True)
class Handling:
    """How a request is treated among others: the arguments of ``LLM.submit``."""

    priority: int = 0
    timeout: float | None = None


@dataclass(slots=True)
class Answer:
    """Answers under way: their choices, each a request to the engine and what reads it. ``num_choices``: to each
    prompt; those to one prompt follow each other. ``is_cancelled``: whether the client has asked for the end."""

    requests: Sequence[AsyncRequest]
    readers: Sequence[ChoiceReader]
    num_choices: int
    is_cancelled: bool = False

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        prompts = [request.output for request in self.requests[:: self.num_choices]]
        return Usage(
            sum(output.num_prompt_tokens for output in prompts),
            sum(output.num_cached_tokens for output in prompts),
            sum(reader.num_tokens for reader in self.readers),
            sum(reader.num_reasoning_tokens for reader in self.readers),
        )

    def abort(self) -> None:
        """End all choices."""
        for request in self.requests:
            request.abort()

    def cancel(self) -> None:
        """End all choices, as the client wants it."""
        self.is_cancelled = True
        self.abort()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come. Closing the generator aborts what has not ended."""
        alone = len(self.requests) == 1
        source = _pieces_of(self.requests[0], self.readers[0]) if alone else self._merged()
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    yield piece if self.is_cancelled else as_told(piece)
        finally:
            self.abort()

    async def _merged(self) -> AsyncGenerator[Piece, None]:
        ready: asyncio.Queue[Piece | None] = asyncio.Queue()

        async def read(request: AsyncRequest, reader: ChoiceReader) -> None:
            try:
                async for piece in _pieces_of(request, reader):
                    ready.put_nowait(piece)
            finally:
                ready.put_nowait(None)

        pairs = zip(self.requests, self.readers, strict=True)
        tasks = [asyncio.create_task(read(request, reader)) for request, reader in pairs]
        try:
            left = len(tasks)
            while left:
                piece = await ready.get()
                if piece is None:
                    left -= 1
                else:
                    yield piece
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def as_told(piece: Piece) -> Piece:
    """A piece as a client is told of it that has not cancelled its request: an answer that the server itself has cut
    short has failed. Else it would look whole."""
    if piece.finish_reason != "abort" or piece.error is not None:  # an error says why, as for a deadline
        return piece
    return replace(piece, finish_reason="error", error="the server was told to end before the answer was whole")


async def _pieces_of(request: AsyncRequest, reader: ChoiceReader) -> AsyncGenerator[Piece, None]:
    async with aclosing(request.__aiter__()) as events:
        async for event in events:
            piece = reader.read(event)
            if piece is not None:
                yield piece
            if reader.has_ended:
                return


async def submit(llm: LLM, asks: Sequence[Ask], handling: Handling) -> Answer:
    """Ask the engine, for asks with as many choices each. Nothing is left running if one of them is refused.

    Raises:
        Problem: a value is out of its range.
        SplitinferError: as ``LLM.submit``.
    """
    answers: list[Answer] = []
    try:
        for i, ask in enumerate(asks):
            answers.append(await _submit(llm, ask, handling, i * ask.num_choices))
    except BaseException:
        for answer in answers:
            answer.abort()
        raise
    requests = [request for answer in answers for request in answer.requests]
    return Answer(requests, [reader for answer in answers for reader in answer.readers], asks[0].num_choices)


async def _submit(llm: LLM, ask: Ask, handling: Handling, first: int) -> Answer:
    """Ask the engine, for one prompt; its first choice has the number ``first``. What takes time is done beside the
    event loop.

    Raises:
        Problem: a value is out of its range.
        SplitinferError: as ``LLM.submit``.
    """
    prompt = await asyncio.to_thread(prompt_tokens, llm, ask.prompt)
    room = llm.context_length - len(prompt)
    params = [ask.params(llm.recommended_sampling, room, choice) for choice in range(ask.num_choices)]
    requests: list[AsyncRequest] = []
    try:
        for each in params:
            requests.append(
                await llm.asubmit(
                    prompt, each, priority=handling.priority, timeout=handling.timeout, shows_markers=True
                )
            )
        numbers = range(first, first + ask.num_choices)
        return Answer(
            requests, [ChoiceReader(i, _parser(llm, ask, prompt), ask.one_call) for i in numbers], ask.num_choices
        )
    except BaseException:
        for request in requests:
            request.abort()
        raise


def _parser(llm: LLM, ask: Ask, prompt: Sequence[int]) -> Parser:
    """Chats are told apart into parts; what continues a text is text."""
    if not isinstance(ask.prompt, Chat) or llm.tokenizer is None:
        return PlainText()
    return llm.tokenizer.answer_format.parser(prompt, ask.prompt.tools)
