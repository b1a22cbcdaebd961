"""Asks the engine for an answer and reads it, for an event loop: all choices of a request as one stream of pieces."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from splitinfer.llm import LLM
from splitinfer.llm.async_request import AsyncRequest
from splitinfer.server.answer import ChoiceReader, Parser, Piece, PlainText, Usage
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.late_systems import settled
from splitinfer.server.problem import unsupported


@dataclass(frozen=True, slots=True)
class Handling:
    """How a request is treated among others: the arguments of ``LLM.submit``."""

    priority: int = 0
    timeout: float | None = None


@dataclass(slots=True)
class Answer:
    """Answers under way: their choices, each a request to the engine and what reads it. ``num_choices``: to each
    prompt; those to one prompt follow each other."""

    requests: Sequence[AsyncRequest]
    readers: Sequence[ChoiceReader]
    num_choices: int

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

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come. Closing the generator aborts what has not ended."""
        try:
            if len(self.requests) == 1:
                async with aclosing(_pieces_of(self.requests[0], self.readers[0])) as pieces:
                    async for piece in pieces:
                        yield piece
            else:
                async with aclosing(self._merged()) as merged:
                    async for piece in merged:
                        yield piece
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
    prompt = await asyncio.to_thread(_prompt_tokens, llm, ask)
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


def encoded(llm: LLM, chat: Chat) -> list[int]:
    """A conversation as the model's tokens.

    Raises:
        Problem: 400, there are tools, of which the model cannot be told.
        SplitinferError: as ``LLM.encode_chat``.
    """
    if chat.tools and llm.tokenizer is not None and llm.tokenizer.no_tools is not None:
        raise unsupported("tools", llm.tokenizer.no_tools)
    chat = settled(llm, chat)
    return llm.encode_chat(chat.messages, tools=chat.tools, options=chat.options, opens_answer=chat.opens_answer)


def _prompt_tokens(llm: LLM, ask: Ask) -> list[int]:
    match ask.prompt:
        case Chat():
            return encoded(llm, ask.prompt)
        case str(text):
            return llm.encode(text)
        case tokens:
            return list(tokens)


def _parser(llm: LLM, ask: Ask, prompt: Sequence[int]) -> Parser:
    """Chats are told apart into parts; what continues a text is text."""
    if not isinstance(ask.prompt, Chat) or llm.tokenizer is None:
        return PlainText()
    return llm.tokenizer.answer_format.parser(prompt, ask.prompt.tools)
