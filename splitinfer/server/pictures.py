"""Pictures in the messages of all APIs: parts of a message's text (``pictures.marks``), read before it is asked."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

from splitinfer.llm import LLM
from splitinfer.llm.seeing import SeenPrompt
from splitinfer.pictures.marks import has_pictures
from splitinfer.pictures.sources import from_url
from splitinfer.server.ask import Chat, Prompt, known_tokens
from splitinfer.text.conversations import Conversations

_turns = threading.BoundedSemaphore(3)  # fewer than the threads of the smallest machine's event loop
_TURN_SECONDS = 0.05


def with_marks(llm: LLM, prompt: Prompt) -> tuple[Prompt, list[str]]:
    """A prompt without its pictures, but with the model's mark for each; and their URLs."""
    if not isinstance(prompt, Chat) or not has_pictures(prompt.messages):
        return prompt, []
    messages, urls = llm.seeing.taken_out(prompt.messages)
    return replace(prompt, messages=tuple(messages)), urls


def seen_prompt(llm: LLM, prompt: Prompt, known: Conversations) -> tuple[SeenPrompt, list[int], str | None]:
    """A prompt with its pictures read; its tokens without them, those of a known beginning as they were computed; and
    the text that the template made, if it is a chat. It takes time: call it beside the event loop.

    Raises:
        Problem, SplitinferError: as ``known_tokens`` and ``LLM.submit``.
    """
    prompt, urls = with_marks(llm, prompt)
    if urls:
        llm.seeing.check(len(urls))
    tokens, text = known_tokens(llm, prompt, known)
    if not urls:
        return SeenPrompt(tuple(tokens)), tokens, text
    sources = [from_url(url, llm.seeing.limits.nbytes, llm.seeing.folders) for url in urls]
    return llm.seeing.prompt(tokens, sources, llm.context_length), tokens, text


async def read_prompt(llm: LLM, prompt: Prompt, known: Conversations) -> tuple[SeenPrompt, list[int], str | None]:
    """``seen_prompt`` beside the event loop. Of prompts with pictures, which may take many seconds, few are read at a
    time, so that those without always find a thread.

    Raises:
        Problem, SplitinferError: as ``seen_prompt``.
    """
    if not isinstance(prompt, Chat) or not has_pictures(prompt.messages):
        return await asyncio.to_thread(seen_prompt, llm, prompt, known)
    while not _turns.acquire(blocking=False):
        await asyncio.sleep(_TURN_SECONDS)
    reading = asyncio.ensure_future(asyncio.to_thread(seen_prompt, llm, prompt, known))
    reading.add_done_callback(_read)
    return await asyncio.shield(reading)  # whose client goes away keeps its thread to the end


def _read(reading: asyncio.Future[Any]) -> None:
    _turns.release()
    if not reading.cancelled():
        reading.exception()  # which nobody may wait for any more


async def num_tokens(llm: LLM, prompt: Prompt, known: Conversations) -> int:
    """How many tokens a prompt has if it is asked now.

    Raises:
        Problem, SplitinferError: as ``seen_prompt``.
    """
    return len((await read_prompt(llm, prompt, known))[0].tokens)
