"""`POST /v1/completions`: a request as one `Ask` for each prompt. The model continues the prompt's text or tokens
without a template. A chunk of a stream and the whole document have one form; a chunk has less of each choice's text.

Tokens are text here, and among the probabilities they are field names. A token that is part of a character has no text,
and two such tokens would share a name. So they are written as their bytes, ``bytes:\\xe2\\x82``, as OpenAI's models do
(*assumed*: seen in their answers, described nowhere).
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator

from splitinfer.common.model_config import is_integer
from splitinfer.core.sampling_params import MAX_LOGPROBS
from splitinfer.engine.loop.requests import TokenLogprobs
from splitinfer.server.answer import Piece, Usage
from splitinfer.server.ask import Ask, AskedChat, AskedPrompt
from splitinfer.server.fields import MOST_TOKENS, not_a, wrong
from splitinfer.server.openai.chat_writer import REASONS, ChunkWriter, usage_of
from splitinfer.server.openai.forms import TextFormat
from splitinfer.server.openai.generating import Choices, Streaming
from splitinfer.server.problem import Problem, invalid, unsupported
from splitinfer.server.refused import COMPLETIONS
from splitinfer.server.stream import event
from splitinfer.text.answer import TextPart
from splitinfer.text.fill import Gap

MAX_ANSWERS = 128  # of one request: prompts by choices
DEFAULT_TOKENS = 16  # OpenAI's API reference, "Create completion": max_tokens


def _prompts(given: Any) -> list[AskedPrompt]:
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(is_integer, given))):
        given = [given]
    if not isinstance(given, list):
        raise not_a("text or a list", given)
    if not given:
        raise wrong(" must have at least one text or token id")
    return [_prompt(i, one) for i, one in enumerate(given)]


def _prompt(i: int, given: Any) -> AskedPrompt:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(map(is_integer, given)):
        raise not_a("text or a list of token ids", given, inside=f"[{i}]")
    return tuple(given)


_OFF = _UNBOUNDED = -1  # no log probabilities; as many tokens as fit
_Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_Most = Annotated[int, Field(ge=_UNBOUNDED, le=MOST_TOKENS)]


class CompletionRequest(Streaming):
    """``max_tokens``: with ``echo`` also 0, for the prompt alone. ``best_of``: must equal ``n``. ``logprobs``: the
    number of likeliest tokens beside each token; true is 0, false and -1 are off. ``prompt_logprobs``: as in vLLM.
    ``suffix``: the text after the answer."""

    refused = COMPLETIONS
    prompt: Annotated[list[AskedPrompt], PlainValidator(_prompts)]
    max_tokens: _Most = DEFAULT_TOKENS
    max_completion_tokens: _Most | None = None  # takes precedence
    n: Choices = 1
    best_of: Choices | None = None
    logprobs: Annotated[
        int,
        Field(ge=_OFF, le=MAX_LOGPROBS),
        BeforeValidator(lambda given: (0 if given else _OFF) if isinstance(given, bool) else given),
    ] = _OFF
    prompt_logprobs: _Top | None = None
    top_logprobs: _Top = 0
    echo: bool = False
    suffix: str = ""
    response_format: TextFormat | None = None

    @property
    def num_top(self) -> int | None:
        return max(self.logprobs, self.top_logprobs) if self.logprobs > _OFF or self.top_logprobs else None

    @property
    def most(self) -> int:
        """The token limit of an answer; 0 shows no answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def asks(self) -> tuple[Ask, ...]:
        prompts, most, num_top = self.prompt, self.most, self.num_top
        self._check()
        if self.suffix:
            prompts = [Gap(one, self.suffix) for one in prompts if isinstance(one, str | tuple)]
        sampling = self.sampling() | self.form(self.response_format, "response_format")
        scored = [top for top in (num_top if self.echo else None, self.prompt_logprobs) if top is not None]
        sampling |= {"prompt_logprobs": max(scored)} if scored else {}
        return tuple(Ask(one, sampling, None if most == _UNBOUNDED else max(1, most), self.n) for one in prompts)

    def _check(self) -> None:
        number, prompts = self.n, len(self.prompt)
        if self.suffix and self.echo:
            raise invalid("suffix", "a prompt with a suffix cannot be echoed")
        if prompts * number > MAX_ANSWERS:
            raise Problem(400, f"{prompts} prompts by {number} choices are over {MAX_ANSWERS} answers", param="prompt")
        if self.best_of not in (None, number):
            raise unsupported("best_of", "answers are not ranked, so that it can be n only", self.best_of)
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs", "a stream has none; use echo with logprobs")
        if not self.most and not self.echo:
            raise invalid("max_tokens", "max_tokens must be at least 1 without echo")


# -- the answer ------------------------------------------------------------------------------------


_ROOM = 4  # characters of a text that the tokenizer may turn into one
_NO_LOGPROBS: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


@dataclass(slots=True)
class CompletionWriter(ChunkWriter):
    """Writes the answers to all prompts of a request."""

    asked: CompletionRequest
    _offsets: dict[int, "_Offsets"] = field(default_factory=dict)  # by choice, once it has begun

    kind, text_name = "text_completion", "text"

    def events(self, piece: Piece) -> bytes:
        if piece.choice in self._offsets and self.asked.most and (text := self.only_text(piece)) is not None:
            return self.text_event(piece.choice, text)
        return b"".join(map(event, self.chunks(piece)))

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.chunk([self._choice([piece])])]

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.choice, []).append(piece)
        choices = [self._choice(by_choice[choice]) for choice in sorted(by_choice)]
        for choice in choices if self.asked.prompt_logprobs is not None else ():
            choice["prompt_logprobs"] = self._prompt_logprobs(choice["index"], self.asked.prompt_logprobs or 0)
        return {**self.head(), "choices": choices, "usage": self.usage(usage)}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the usage without the token that is generated where the prompt alone is wanted."""
        return usage_of(usage if self.asked.most else replace(usage, generated=0))

    def _prompt_logprobs(self, choice: int, num_top: int) -> list[dict[str, Any] | None]:
        """Return the prompt's log probabilities as vLLM writes them: by id, each with its rank if known."""
        lines = list[dict[str, Any] | None]([None])
        for one in self.answer.choices[choice].request.output.prompt_logprobs or ():
            ranked = {token: (rank, logprob) for rank, (token, logprob) in enumerate(one.top[:num_top], 1)}
            found = {one.token_id: (None, one.logprob), **ranked}
            lines.append({f"{token}": self._ranked(token, *each) for token, each in found.items()})
        return lines

    def _ranked(self, token: int, rank: int | None, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.token_text(token).decode("utf-8", "replace")}

    def choice(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        index, reason, begins = pieces[0].choice, pieces[-1].finish_reason, pieces[0].choice not in self._offsets
        echo = self._echo(index) if begins and self.asked.echo else ""
        offsets = self._offsets.setdefault(index, _Offsets(len(echo)))
        shown = pieces if self.asked.most else ()
        text = "".join(part.text for piece in shown for part in piece.parts if isinstance(part, TextPart))
        made = self.choice(index) | {"text": echo + text, "finish_reason": REASONS.get(reason or "")}
        if self.asked.num_top is not None:
            before = self._of_prompt(index, echo) if begins and self.asked.echo else _NO_LOGPROBS
            behind = self._logprobs([one for piece in shown for one in piece.logprobs], offsets.next)
            made["logprobs"] = {name: before[name] + behind[name] for name in behind}
        return made

    def _echo(self, choice: int) -> str:
        prompt = self.asked.prompt[choice // self.asked.n]
        assert not isinstance(prompt, AskedChat | Gap)
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self.token_text, prompt)).decode("utf-8", "replace")

    def _of_prompt(self, choice: int, echo: str) -> dict[str, list[Any]]:
        """Return the log probabilities of the prompt's tokens; the first token has none."""
        asked, offsets = self.answer.choices[choice].request, _EchoOffsets(0, echo=echo)
        raw = self.token_text(asked.prompt[0])
        first: dict[str, list[Any]] = {"tokens": [token_name(raw)], "text_offset": [offsets.next(raw)]}
        found = self._logprobs(asked.output.prompt_logprobs or (), offsets.next)
        return {name: first.get(name, [None]) + lines for name, lines in found.items()}

    def _logprobs(self, tokens: Sequence[TokenLogprobs], offset: Callable[[bytes], int]) -> dict[str, list[Any]]:
        return {
            "tokens": [token_name(self.token_text(one.token_id)) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [self._top(one) for one in tokens],
            "text_offset": [offset(self.token_text(one.token_id)) for one in tokens],
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the chosen one."""
        likely = [*one.top[: self.asked.num_top or 0], (one.token_id, one.logprob)]
        return {token_name(self.token_text(token_id)): logprob for token_id, logprob in likely}


@dataclass(slots=True)
class _Offsets:
    """Where an answer's tokens begin in its text, in characters. ``_length``: of the text before the next token."""

    _length: int
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def next(self, raw: bytes) -> int:
        """Return where the next token begins; one that goes on with a character, where the character does."""
        begin = self._length
        self._length += len(self._decoder.decode(raw))
        return begin


@dataclass(slots=True)
class _EchoOffsets(_Offsets):
    """The offsets of a prompt's tokens in its text. Special tokens are not in the text, and tokenizers change some
    characters. So a token that is not found takes no room, and the search for the following ones reaches a little
    further."""

    echo: str = ""
    _room: int = 0  # characters in which the next token may begin

    def next(self, raw: bytes) -> int:
        """Return where the next token begins."""
        text = self._decoder.decode(raw)
        begin, found = self._found(text)
        if text:
            self._room = 0 if found else self._room + _ROOM * len(text)
        self._length = begin + len(found)
        return begin

    def _found(self, text: str) -> tuple[int, str]:
        """Return a token's place, and what of it is there: all, or all but a blank that the tokenizer has put before
        it."""
        for room in (0, self._room):
            for one in filter(None, (text, text.lstrip())):
                if (place := self.echo.find(one, self._length, self._length + room + len(one))) >= 0:
                    return place, one
        return self._length, ""


def token_name(raw: bytes) -> str:
    """Return a token as text; one that is a part of a character as its bytes.

    >>> token_name(b"Hi"), token_name(bytes([0xE2, 0x82]))
    ('Hi', 'bytes:\\\\xe2\\\\x82')
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
