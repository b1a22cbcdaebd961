"""Turns prompts of requests into tokens: on threads, and so that short prompts do not wait for long ones.

These threads are few, five on the smallest machine, and grammars, `/metrics` and large bodies share them. So only a few
of the prompts that may take long are read at a time, each kind in order of arrival; short prompts need no turn.
Pictures are parts of a message's text (``pictures.marks``).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from splitinfer.llm import LLM
from splitinfer.llm.seeing import SeenPrompt
from splitinfer.pictures.marks import has_pictures, unseen
from splitinfer.pictures.sources import from_url
from splitinfer.server.ask import AskedChat, AskedPrompt, known_tokens
from splitinfer.server.history import NO_PICTURE
from splitinfer.text.conversations import Conversations

T = TypeVar("T")

_LONG = 1 << 18  # bytes of a request; more take over a tenth of a second


def with_marks(llm: LLM, prompt: AskedPrompt) -> tuple[AskedPrompt, list[str]]:
    """Return a prompt with the model's mark in place of each picture, and the URLs of the pictures. If the model cannot
    see a picture, text replaces it, unless the picture is in the user's last message."""
    if not isinstance(prompt, AskedChat) or not has_pictures(prompt.messages):
        return prompt, []
    *before, last = prompt.messages
    is_last, takes = last["role"] == "user", llm.seeing.takes
    before = before if is_last else [*before, last]
    messages, urls = llm.seeing.taken_out([*unseen(before, takes, NO_PICTURE), *([last] if is_last else [])])
    return replace(prompt, messages=tuple(messages), mark=llm.seeing.mark), urls


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the prompts of one server, on its event loop. ``known``: the conversations so far; each prompt is added."""

    llm: LLM
    known: Conversations = field(default_factory=Conversations)
    _long: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    _pictures: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    async def read(self, prompt: AskedPrompt, size: int) -> tuple[SeenPrompt, list[int], str | None]:
        """Return a prompt with its pictures read, its tokens without pictures, and, for a chat, the text that the
        template made. The tokens of a known beginning are the ones computed earlier. ``size``: of the request, in
        bytes.

        Raises:
            Problem, SplitinferError: as ``known_tokens`` and ``LLM.submit``.
        """
        sees = isinstance(prompt, AskedChat) and has_pictures(prompt.messages)
        return await self.beside(lambda: self._seen(prompt), size, self._pictures if sees else None)

    async def beside(self, work: Callable[[], T], size: int, turns: asyncio.Semaphore | None = None) -> T:
        """Return the result of ``work``, run on a thread, for a request of ``size`` bytes. A caller that stops waiting
        gives up its turn. Work that has begun keeps its turn to the end."""
        turns = turns or (self._long if size > _LONG else None)
        if turns is None:
            return await asyncio.to_thread(work)
        await turns.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(work))

        def end(done: asyncio.Future[Any]) -> None:
            turns.release()
            if not done.cancelled():
                done.exception()  # maybe nobody waits for it any more

        working.add_done_callback(end)
        return await asyncio.shield(working)

    def _seen(self, prompt: AskedPrompt) -> tuple[SeenPrompt, list[int], str | None]:
        llm = self.llm
        prompt, urls = with_marks(llm, prompt)
        if urls:
            llm.seeing.check(len(urls))
        tokens, text = known_tokens(llm, prompt, self.known)
        if not urls:
            return SeenPrompt(tuple(tokens)), tokens, text
        sources = [from_url(url, llm.seeing.limits.nbytes, llm.seeing.folder) for url in urls]
        return llm.seeing.prompt(tokens, sources, llm.context_length), tokens, text
