"""Pictures in the messages of all APIs: parts of a message's text (``pictures.marks``), read before it is asked."""

from dataclasses import replace
from typing import Annotated, Any

from splitinfer.llm import LLM
from splitinfer.llm.seeing import SeenPrompt
from splitinfer.pictures.marks import has_pictures, taken_out
from splitinfer.pictures.sources import from_url
from splitinfer.server.ask import Chat, Prompt, known_tokens
from splitinfer.server.fields import Fields, Ignored, Refused
from splitinfer.text.conversations import Conversations

SIZE = Ignored("the model's own processor says how large a picture is")
STORED = Refused("nothing is stored here; give the picture as a data URL")


class PictureURL(Fields):
    """The URL of a picture"""

    url: str
    detail: Annotated[Any, SIZE] = None


def with_marks(llm: LLM, prompt: Prompt) -> tuple[Prompt, list[str]]:
    """A prompt without its pictures, but with the model's mark for each; and their URLs."""
    if not isinstance(prompt, Chat) or not has_pictures(prompt.messages):
        return prompt, []
    messages, urls = taken_out(prompt.messages, llm.seeing.mark)
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
    return llm.seeing.prompt(tokens, sources), tokens, text


def num_tokens(llm: LLM, prompt: Prompt, known: Conversations) -> int:
    """How many tokens a prompt has if it is asked now. It takes time: call it beside the event loop.

    Raises:
        Problem, SplitinferError: as ``seen_prompt``.
    """
    return len(seen_prompt(llm, prompt, known)[0].tokens)
