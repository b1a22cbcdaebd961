"""Text to token ids and back, for the model in one folder.

A thin wrapper over the Hugging Face tokenizer as mlx-lm loads it (which knows the oddities of many models' chat
templates). It adds this project's errors, a hash of the vocabulary, and one fixed way to decode (special tokens left
out, spaces as they are) that the incremental detokenizer shares.

Any number of threads may use it at a time, once a text was encoded (``llm.prompts``).
"""

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from splitinfer.errors import ModelError, RequestError
from splitinfer.text.answer import OPENING, AnswerFormat, Tool
from splitinfer.text.conversations import Codec
from splitinfer.text.detokenizer import Detokenizer
from splitinfer.text.harmony import MODEL_TYPE, Harmony, load_harmony
from splitinfer.text.token_bytes import bytes_of_tokens
from splitinfer.text.turns import simpler_forms

T = TypeVar("T")

_ANY_LENGTH = 10**18  # tokens; the context is checked elsewhere, and transformers would warn on standard error first
_AROUND = ("Before it.", "Behind it.")  # the texts around a picture, to see what a template writes for it
_SEPARATOR = "\n\n"  # between contents, where there is no chat template
_OF_TEMPLATES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What templates end with on values that they were not written for; they are programs of the model's authors."""
_NOT_FOR_TEMPLATES = frozenset(
    {
        "self", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that change what it returns, or its cost."""


class Tokenizer:
    """A model's tokenizer, made by ``from_folder``; ``wrapper`` is an mlx-lm ``TokenizerWrapper``. ``harmony``: what
    writes and reads for a gpt-oss model, or why nothing does."""

    def __init__(self, wrapper: Any, harmony: Harmony | str | None = None) -> None:
        self._wrapper, self._harmony = wrapper, harmony

    @classmethod
    def from_folder(
        cls, path: Path, eos_token_ids: Iterable[int] | int | None = None, model_type: str | None = None
    ) -> Self:
        """Load the tokenizer in the model folder ``path``; ``eos_token_ids`` and ``model_type`` are the model
        configuration's.

        Raises:
            ModelError: there is none, or none that can be read.
        """
        if not path.is_dir():  # otherwise mlx-lm would take the path for a hub id, and look for it there
            raise ModelError(f"there is no model folder {path}")
        if eos_token_ids is not None and not isinstance(eos_token_ids, int):
            eos_token_ids = list(eos_token_ids)
        from mlx_lm.tokenizer_utils import load  # here, because it imports transformers, which takes a second

        try:
            wrapper = load(path, eos_token_ids=eos_token_ids)
        except Exception as error:  # what a model's files make other people's code raise
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if not [*path.glob("tokenizer.*"), *path.glob("tekken.json")]:
                reason = "there is no tokenizer.json"
            raise ModelError(f"the model folder {path} has no readable tokenizer: {reason}") from error
        wrapper.model_max_length = _ANY_LENGTH
        return cls(wrapper, load_harmony(wrapper) if model_type == MODEL_TYPE else None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text: the model configuration's and the tokenizer's own."""
        own = frozenset(self._wrapper.eos_token_ids)
        return own | self._harmony.end_tokens if isinstance(self._harmony, Harmony) else own

    @property
    def writes_turns(self) -> bool:
        """Whether the model says how turns of a chat are written."""
        return self._wrapper.has_chat_template or self._harmony is not None

    @property
    def no_tools(self) -> str | None:
        """Why the model cannot be told of tools, if that is known."""
        return self._harmony if isinstance(self._harmony, str) else None

    @property
    def info(self) -> dict[str, str | None]:
        """What programs that render chats or cut texts themselves need to know, by transformers' names."""
        wrapper = self._wrapper
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        found = {name: getattr(wrapper, name, None) for name in names}
        texts = {name: value if isinstance(value, str) else None for name, value in found.items()}
        return {"tokenizer_class": type(getattr(wrapper, "_tokenizer", wrapper)).__name__, **texts}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id: the number of values noise is drawn for.

        It is the tokenizer's ``len`` unless its ids have gaps; a model's embedding may be padded beyond it.
        """
        return 1 + int(max(self._wrapper.get_vocab().values()))

    @cached_property
    def vocabulary_hash(self) -> str:
        """SHA-256 over all (token, id) pairs: equal for a model and the draft models that can be used with it."""
        pairs = sorted(self._wrapper.get_vocab().items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def encode(self, text: str, *, adds_special: bool = True) -> list[int]:
        """The ids of ``text``. ``adds_special``: with the special tokens that the tokenizer itself adds."""
        return list(self._wrapper.encode(text, **({} if adds_special else {"add_special_tokens": False})))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> list[int]:
        """A chat as token ids, as the model's chat template writes it, up to where the next answer begins; a model
        without a template gets the contents, joined by blank lines.

        Each message has ``role`` and ``content``. An answer may have its ``token_ids``, so that its cached KV is found
        even if the tokenizer would split its text in another way; they are used where the template writes the text
        unchanged and they decode to it. ``tools``: those that the model may call, as in OpenAI's API. ``options``:
        further values for the template, such as ``enable_thinking``. ``opens_answer``: false leaves out what opens the
        next answer.

        Raises:
            RequestError: the template refuses the messages, or there is none for the tools.
        """
        return self.write_chat(messages, tools=tools, options=options, opens_answer=opens_answer)[0]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """The text that ``encode_chat`` encodes."""
        return self.write_chat(messages, tools=tools, options=options, opens_answer=opens_answer)[1]

    def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> tuple[list[int], str]:
        """``encode_chat`` and ``render_chat``, of one rendering."""
        chat, settings = self._checked(messages, tools, options)
        if isinstance(self._harmony, Harmony):
            ids = self._harmony.encode_chat(chat, tools=tools, options=options, opens_answer=opens_answer)
            return ids, self._harmony.decode(ids)
        generated = {
            i: ids
            for i, message in enumerate(messages)
            if (ids := self._generated(message.get("token_ids") or (), message.get("content") or ""))
        }

        def write(form: list[dict[str, Any]]) -> tuple[list[int], str]:
            text = self._render(form, opens_answer, settings)
            if generated and form is chat:
                return self._encode_around(text, chat, generated, settings), text
            if self._reads_templates or not self._wrapper.has_chat_template:
                return self._piece(text, is_first=True), text
            return list(self._wrapper.apply_chat_template(form, add_generation_prompt=opens_answer, **settings)), text

        return _first_taken(chat, write)

    @cached_property
    def _reads_templates(self) -> bool:
        """Whether what a template writes is encoded as it stands; mistral-common makes ids of the messages."""
        return getattr(self._wrapper, "backend_tokenizer", None) is not None

    def _checked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], options: Mapping[str, Any] | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The chat as the template gets it, and its further values."""
        chat = [{name: value for name, value in message.items() if name != "token_ids"} for message in messages]
        if not chat:
            raise RequestError("a chat needs at least one message")
        if not all(isinstance(message.get("content"), str) or message.get("tool_calls") for message in chat):
            raise RequestError("every chat message needs a text 'content'")
        if tools and self.no_tools is not None:
            raise RequestError(f"tools are not supported: {self.no_tools}")
        if tools and not self.writes_turns:
            raise RequestError("this model has no chat template, so it cannot use tools")
        settings = {**(options or {}), **({"tools": list(tools)} if tools else {})}
        if not_its_own := sorted(settings.keys() & _NOT_FOR_TEMPLATES):
            raise RequestError(f"{not_its_own[0]} is not a chat template setting")
        return chat, settings

    def _generated(self, token_ids: Sequence[int], content: str) -> list[int]:
        """The ids without the end token, if they decode to ``content``; otherwise none."""
        ids = list(token_ids)
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        known = all(0 <= token_id < self.vocab_size and token_id not in self.special_ids for token_id in ids)
        return ids if known and self._decode(ids) == content else []

    def _encode_around(
        self, whole: str, chat: list[dict[str, Any]], generated: Mapping[int, list[int]], settings: Mapping[str, Any]
    ) -> list[int]:
        """The ids of a chat, rendered as ``whole``, taking those of some messages from ``generated`` (by the message's
        index)."""
        ids, at = list[int](), 0
        for i, answer in generated.items():
            before = self._before(chat[:i], settings)
            if len(before) >= at and whole.startswith(before + chat[i]["content"]):
                ids += [*self._piece(whole[at : len(before)], is_first=not at), *answer]
                at = len(before) + len(chat[i]["content"])
        return [*ids, *self._piece(whole[at:], is_first=not at)]

    def _before(self, chat: list[dict[str, Any]], settings: Mapping[str, Any]) -> str:
        """The rendered chat up to where the next answer begins."""
        if not chat:
            return ""
        return self._render(chat, True, settings) + ("" if self._wrapper.has_chat_template else _SEPARATOR)

    def _piece(self, text: str, *, is_first: bool) -> list[int]:
        """The ids of a part of a rendered chat; a template writes special tokens itself."""
        adds_special = is_first and not self._wrapper.has_chat_template
        return list(self._wrapper.encode(text, add_special_tokens=adds_special)) if text or adds_special else []

    def _render(self, chat: list[dict[str, Any]], opens_answer: bool, settings: Mapping[str, Any]) -> str:
        """A chat as the model's template writes it; without one, the contents with blank lines between them."""
        if self._wrapper.has_chat_template:
            render = self._wrapper.apply_chat_template
            return str(render(chat, tokenize=False, add_generation_prompt=opens_answer, **settings))
        return _SEPARATOR.join(message.get("content") or "" for message in chat)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens; bytes that are no character become U+FFFD.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        bad = next((each for each in token_ids if not 0 <= each < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the model's vocabulary of {self.vocab_size:,}")
        return self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._wrapper.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def picture_mark(self) -> str | None:
        """What the model's template writes for a picture between two texts; ``None`` if it takes none."""
        texts = [{"type": "text", "text": text} for text in _AROUND]
        chat = [{"role": "user", "content": [texts[0], {"type": "image"}, texts[1]]}]
        try:
            written = self._render(chat, False, {}) if self._wrapper.has_chat_template else ""
        except Exception:  # noqa: BLE001 - a template is a program, and may raise anything
            return None
        before, _, behind = written.partition(_AROUND[0])
        mark, found, _ = behind.partition(_AROUND[1])
        return mark if before and found else None

    def token_id(self, text: str) -> int | None:
        """The id of a special token; ``None`` if there is none of that text."""
        found = self._wrapper.convert_tokens_to_ids(text)
        return found if isinstance(found, int) and found in self.special_ids else None

    @property
    def tool_syntax(self) -> str | None:
        """The name of mlx-lm's parser of the model's calls; ``None`` if there is none."""
        parser = getattr(self._wrapper, "tool_parser", None) if self._harmony is None else None
        return None if parser is None else str(parser.__module__).rsplit(".", 1)[-1]

    @cached_property
    def split(self) -> Callable[[str], list[int]]:
        """Splits a text as the model does, with names of special tokens as any other text. From any thread, beside
        ``encode``: a tokenizer of Hugging Face's is copied for it."""
        backend = getattr(self._wrapper, "backend_tokenizer", None)
        if backend is None:
            return lambda text: self.encode(text, adds_special=False)
        own = copy.deepcopy(backend)
        own.encode_special_tokens = True
        own.no_truncation()
        own.no_padding()
        return lambda text: list(own.encode(text, add_special_tokens=False).ids)

    @cached_property
    def thinking(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
        """The ids that open the model's reasoning, those that end it, and those that lead out of it to that end;
        ``None`` if it marks none."""
        if isinstance(self._harmony, Harmony):
            return self._harmony.thinking
        if not self._wrapper.has_thinking:
            return None
        end = tuple(self._wrapper.think_end_tokens)
        return tuple(self._wrapper.think_start_tokens), end, end

    def has_opened(self, prompt: Sequence[int]) -> bool | None:
        """Whether a prompt ends inside reasoning; ``None``: it says nothing of reasoning, so the model may open it."""
        if isinstance(self._harmony, Harmony):
            return True
        tail = list(prompt[-OPENING:])
        opened, ended = self._wrapper.rfind_think_start(tail), self._wrapper.rfind_think_end(tail)
        return None if opened == ended else opened > ended

    @cached_property
    def codec(self) -> Codec:
        """Parts of rendered chats as ids, and ids as rendered text."""
        wrapper = self._wrapper
        return Codec(
            lambda text: list(wrapper.encode(text, add_special_tokens=False)),
            lambda ids: str(wrapper.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
            self.special_ids,
        )

    @cached_property
    def answer_format(self) -> AnswerFormat | Harmony:
        """How the model marks its reasoning and its calls of tools."""
        return self._harmony if isinstance(self._harmony, Harmony) else AnswerFormat(self._wrapper)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; of special tokens their names."""
        return self._bytes_of([token_id])[0]

    def bytes_of_all(self) -> list[bytes]:
        """``token_bytes`` of each id. Takes up to a second."""
        return self._bytes_of(range(self.vocab_size))

    @cached_property
    def _bytes_of(self) -> Callable[[Sequence[int]], list[bytes]]:
        return bytes_of_tokens(self._wrapper)

    def detokenizer(self, *, shows_markers: bool = False) -> Detokenizer:
        """A new incremental decoder for one sequence; its text is that of ``decode``. ``shows_markers``: with the
        markers of ``answer_format``, which may be special tokens."""
        if not shows_markers:
            return Detokenizer(self._decode, self.special_ids)
        return Detokenizer(self._decode_with_markers, self.special_ids - self._marker_ids)

    def _decode_with_markers(self, token_ids: Sequence[int]) -> str:
        shown = [i for i in token_ids if i not in self.special_ids or i in self._marker_ids]
        text: str = self._wrapper.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _marker_ids(self) -> frozenset[int]:
        """The special tokens that are a part of a marker."""
        encode = self._wrapper.encode
        return self.special_ids.intersection(
            *[{i for marker in self.answer_format.markers for i in encode(marker, add_special_tokens=False)}]
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that no text is made of, and that ``decode`` leaves out."""
        candidates = set(self._wrapper.all_special_ids)  # only those with a role, such as end of text
        # mistral-common lacks this list, and its ids are all among the candidates.
        with contextlib.suppress(NotImplementedError):
            candidates |= {token_id for token_id, token in self._wrapper.added_tokens_decoder.items() if token.special}
        return frozenset(token_id for token_id in candidates if not self._decode([token_id]))


def _first_taken(chat: list[dict[str, Any]], write: Callable[[list[dict[str, Any]]], T]) -> T:
    """What a template writes for a chat, or for the first simpler form of it that it takes.

    Raises:
        RequestError: it takes none; with what it says of the chat itself.
    """
    import jinja2  # here, because transformers has imported it already

    refusals = (jinja2.TemplateError, *_OF_TEMPLATES)
    try:
        return write(chat)
    except refusals as error:
        for form in simpler_forms(chat):
            with contextlib.suppress(*refusals):
                return write(form)
        raise RequestError(f"the model's chat template refuses these messages: {error}") from error
