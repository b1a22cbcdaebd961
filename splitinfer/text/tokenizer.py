"""Text to token ids and back, for the model in one folder.

A thin wrapper over the Hugging Face tokenizer as mlx-lm loads it. It adds this project's errors, a hash of the
vocabulary, and one fixed way to decode (special tokens left out, spaces as they are) that the incremental detokenizer
shares. Any number of threads may use it at a time, once a text was encoded (``llm.prompts``).
"""

import contextlib
import copy
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

from splitinfer.core.call_syntax import JSON_TOOLS, NOT_WRITTEN, AnswerSyntax, CallSyntax
from splitinfer.errors import ModelError, RequestError
from splitinfer.text import harmony
from splitinfer.text.answer import AnswerFormat, Tool
from splitinfer.text.conversations import TextCodec
from splitinfer.text.detokenizer import Detokenizer
from splitinfer.text.fill import Gap, Marks, marks_in
from splitinfer.text.loading import load
from splitinfer.text.syntax_probes import find_syntax
from splitinfer.text.turns import (
    Form,
    arguments_as_objects,
    exchanges_told,
    fitting,
    in_order,
    reasoning_as,
    tools_told,
)

_ANY_LENGTH = 10**18  # tokens; the context is checked elsewhere, and transformers would warn on standard error first
_AROUND = ("Before it.", "Behind it.")  # the texts around a picture, to see what a template writes for it
_CUT = f"\ufdd2{secrets.token_hex(4)}"  # where the name of a control token is cut, up to its encoding
_LAST = f"\ufdd3{secrets.token_hex(4)}"  # the end of an answer that goes on, until a template has written it
_CUTS = re.compile(_CUT.replace("\ufdd2", r"(?:\ufdd2|\\ufdd2)"))  # also as a template's JSON has it
_SPACE = "\u2581"  # in vocabularies with byte fallback
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_MOST_WINDOWS = 16_384  # whose text is kept, in about 4 MB
_SEPARATOR = "\n\n"  # between contents, where there is no chat template
_NOT_FOR_TEMPLATES = frozenset(
    {
        "self", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that change what it returns, or its cost."""


class Tokenizer:
    """A model's tokenizer, made by ``from_folder``; ``wrapper`` is an mlx-lm ``TokenizerWrapper``. ``is_harmony``: the
    model writes Harmony. ``control_in_texts``: as in ``Settings``."""

    control_in_texts = False

    def __init__(self, wrapper: Any, *, is_harmony: bool = False) -> None:
        self._wrapper, self._is_harmony = wrapper, is_harmony
        self._syntaxes: dict[str | None, AnswerSyntax] = {}

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
        try:
            wrapper = load(path, eos_token_ids=eos_token_ids)
        except Exception as error:  # what a model's files make other people's code raise
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if not [*path.glob("tokenizer.*"), *path.glob("tekken.json")]:
                reason = "there is no tokenizer.json"
            raise ModelError(f"the model folder {path} has no readable tokenizer: {reason}") from error
        wrapper.model_max_length = _ANY_LENGTH
        if getattr(wrapper, "chat_template", None) is None and (template := _older_template(path)) is not None:
            wrapper.chat_template, wrapper.has_chat_template = template, True
        made = cls(wrapper, is_harmony=model_type == "gpt_oss" and harmony.reads_harmony(wrapper))
        made._check_templates(path)
        return made

    def _check_templates(self, path: Path) -> None:
        """Raise ModelError if a chat template in the folder ``path`` is broken."""
        from jinja2 import TemplateSyntaxError  # here, because importing it takes a while

        for has_tools in (False, True) if self.template(False) is not None else ():
            try:
                self._render(Form(({"role": "user", "content": "x"},), ({},) if has_tools else ()), True, {})
            except TemplateSyntaxError as error:
                why = f"line {error.lineno}: {error.message}"
                raise ModelError(f"the chat template in {path} is broken: {why}; mend it, or take it out") from error
            except Exception:  # noqa: BLE001 - a template is a program, and may refuse a chat
                pass

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text: the model configuration's and the tokenizer's own."""
        return frozenset(self._wrapper.eos_token_ids)

    @property
    def writes_turns(self) -> bool:
        """Whether the model says how turns of a chat are written."""
        return bool(self._wrapper.has_chat_template)

    @property
    def info(self) -> dict[str, str | None]:
        """What programs that render chats or cut texts themselves need to know, by transformers' names."""
        wrapper = self._wrapper
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        found = {name: getattr(wrapper, name, None) for name in names}
        texts = {name: value if isinstance(value, str) else None for name, value in found.items()}
        texts["chat_template"] = self.template(False)
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
        """Return the ids of ``text``. ``adds_special``: with the special tokens that the tokenizer itself adds."""
        return list(self._wrapper.encode(text, **({} if adds_special else {"add_special_tokens": False})))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
        """Return a chat as token ids. ``how``: as of ``write_chat``."""
        return self.write_chat(messages, **how)[0]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Return the text that ``encode_chat`` encodes."""
        return self.write_chat(messages, **how)[1]

    def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
        mark: str = "",
        continues: bool = False,
    ) -> tuple[list[int], str]:
        """Return a chat as token ids and as the text of one rendering, as the model's chat template writes it, up to
        where the next answer begins; a model without a template gets the contents, joined by blank lines.

        Each message has ``role`` and ``content``. An answer may have its ``token_ids``, so that its cached KV is found
        even if the tokenizer would split its text in another way; they are used where the template writes the text
        unchanged and they decode to it. ``tools``: those that the model may call, as in OpenAI's API. ``options``:
        further values for the template, such as ``enable_thinking``. ``opens_answer``: false leaves out what opens the
        next answer. ``mark``: what stands for pictures in the texts. All else in them is text, also the names of
        control tokens, unless ``control_in_texts``; an answer may have what marks reasoning and calls. ``continues``:
        the last message is an answer that goes on.

        Raises:
            RequestError: the template refuses the messages, or there is none for the tools.
        """
        chat, settings = self._checked(messages, tools, options)
        opens_answer = opens_answer and not continues
        calls = self._syntax(bool(tools)).calls or JSON_TOOLS
        chat = self._told(chat, calls)
        if self._is_harmony:
            chat = Form(tuple(map(harmony.told, chat.messages)), tuple(map(harmony.described, chat.tools)))
            settings = harmony.settings(settings)
        generated = {
            i: ids
            for i, (given, message) in enumerate(zip(messages, chat.messages, strict=False))
            if len(chat.messages) == len(messages)
            and (ids := self._generated(given.get("token_ids") or (), message.get("content") or ""))
        }
        if continues:
            last = chat.messages[-1]
            chat = replace(
                chat, messages=(*chat.messages[:-1], {**last, "content": (last.get("content") or "") + _LAST})
            )

        if self._reads_templates and not self.control_in_texts:
            chat = self._without_control(chat, mark)
        try:
            form, text = fitting(chat, lambda form: self._render(form, opens_answer, settings), calls)
        except RequestError as error:
            raise RequestError(_CUTS.sub("", str(error)).replace(_LAST, "")) from error
        if continues:
            text, *behind = text.split(_LAST)
            if len(behind) != 1 or not (self._reads_templates or not self._wrapper.has_chat_template):
                raise RequestError("the model's chat template does not write the last message so that it could go on")
        if generated and form is chat:
            ids = self._encode_around(text, chat, generated, settings)
        elif self._reads_templates or not self._wrapper.has_chat_template:
            ids = self._piece(text, is_first=True)
        else:
            ids = list(self._apply(form, settings, add_generation_prompt=opens_answer))
        return ids, _CUTS.sub("", text)

    def _told(self, chat: Form, calls: CallSyntax) -> Form:
        """Return a chat in the template's own words for reasoning and arguments. Tools and calls for which it has no
        syntax that is read are told in the chat's texts."""
        syntax = self._syntax(bool(chat.tools))
        chat = reasoning_as(chat, syntax.reasoning_name)
        if not syntax.takes_tools:
            chat = tools_told(chat, calls)
        if not syntax.takes_calls:
            chat = exchanges_told(chat, calls)
        return arguments_as_objects(chat) if syntax.takes_objects else chat

    @cached_property
    def _reads_templates(self) -> bool:
        """Whether what a template writes is encoded as it stands; mistral-common makes ids of the messages."""
        return getattr(self._wrapper, "backend_tokenizer", None) is not None

    def _checked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], options: Mapping[str, Any] | None
    ) -> tuple[Form, dict[str, Any]]:
        """Return the chat for the template, and its further values."""
        chat = [{name: value for name, value in message.items() if name != "token_ids"} for message in messages]
        if not chat:
            raise RequestError("a chat needs at least one message")
        if not all(isinstance(message.get("content"), str) or message.get("tool_calls") for message in chat):
            raise RequestError("every chat message needs a text 'content'")
        if tools and not self.writes_turns:
            raise RequestError("this model has no chat template, so it cannot use tools")
        settings = dict(options or {})
        if not_its_own := sorted(settings.keys() & _NOT_FOR_TEMPLATES):
            raise RequestError(f"{not_its_own[0]} is not a chat template setting")
        return Form(tuple(in_order(chat)), tuple(tools)), settings

    def _generated(self, token_ids: Sequence[int], content: str) -> list[int]:
        """Return the generated ids without the end token if they decode to ``content``, else an empty list."""
        ids = list(token_ids)
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        known = all(0 <= token_id < self.vocab_size and token_id not in self.special_ids for token_id in ids)
        return ids if known and self._decode(ids) == content else []

    def _encode_around(
        self, whole: str, chat: Form, generated: Mapping[int, list[int]], settings: Mapping[str, Any]
    ) -> list[int]:
        """Return the ids of a chat, rendered as ``whole``, taking those of some messages from ``generated`` (by the
        message's index)."""
        ids, at = list[int](), 0
        for i, answer in generated.items():
            before = self._before(replace(chat, messages=chat.messages[:i]), settings)
            if before is not None and len(before) >= at and whole.startswith(before + chat.messages[i]["content"]):
                ids += [*self._piece(whole[at : len(before)], is_first=not at), *answer]
                at = len(before) + len(chat.messages[i]["content"])
        return [*ids, *self._piece(whole[at:], is_first=not at)]

    def _before(self, chat: Form, settings: Mapping[str, Any]) -> str | None:
        """Return the rendered chat up to where the next answer begins; ``None``: the template does not take so
        little."""
        if not chat.messages:
            return ""
        with contextlib.suppress(Exception):  # a template is a program, and may raise anything
            return self._render(chat, True, settings) + ("" if self._wrapper.has_chat_template else _SEPARATOR)
        return None

    def _piece(self, text: str, *, is_first: bool) -> list[int]:
        """Return the ids of a part of a rendered chat; a template writes special tokens itself."""
        adds_special = is_first and not self._wrapper.has_chat_template
        first, *rest = _CUTS.split(text)
        ids = list(self._wrapper.encode(first, add_special_tokens=adds_special)) if first or adds_special else []
        return [*ids, *(i for each in rest for i in self._wrapper.encode(each, add_special_tokens=False))]

    def _without_control(self, chat: Form, mark: str) -> Form:
        """Return a chat with the names of control tokens cut in two, wherever somebody wrote them. ``mark``: is left
        whole."""
        everywhere, in_answers = self._control_names

        def message(one: Mapping[str, Any]) -> dict[str, Any]:
            calls = {"tool_calls": _cut(one["tool_calls"], everywhere)} if one.get("tool_calls") else {}
            names = in_answers if one.get("role") == "assistant" else everywhere
            return {key: _cut(value, names, mark) for key, value in one.items() if key not in calls} | calls

        return Form(tuple(map(message, chat.messages)), tuple(_cut(tool, everywhere) for tool in chat.tools))

    @cached_property
    def _control_names(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The names of all control tokens, and the names that no answer from a client may contain."""
        added = {token.content: token.special for token in self._wrapper.added_tokens_decoder.values()}
        markers = self.answer_format.markers
        handed = () if self._is_harmony else markers  # its messages and their headers are taken apart
        names = {name for name, is_special in added.items() if len(name) > 1 and (is_special or name in markers)}
        return _any_of(names), _any_of({name for name in names if not any(name in marker for marker in handed)})

    def _render(self, chat: Form, opens_answer: bool, settings: Mapping[str, Any]) -> str:
        """Return a chat as the model's template writes it; without one, the contents with blank lines between them."""
        if self._wrapper.has_chat_template:
            return str(self._apply(chat, settings, tokenize=False, add_generation_prompt=opens_answer))
        return _SEPARATOR.join(message.get("content") or "" for message in chat.messages)

    def _apply(self, chat: Form, settings: Mapping[str, Any], **how: bool) -> Any:
        """Return what the template makes of a chat. It is told of thinking only what somebody said: mlx-lm's wrapper
        would switch it on where the vocabulary has marks for it, and off elsewhere, against the template's own
        default."""
        wrapper, given = self._wrapper, dict(settings)
        if chat.tools or self._counts_tools:
            given["tools"] = list(chat.tools)
        if "enable_thinking" in given:
            given.setdefault("thinking", given["enable_thinking"])  # the word of DeepSeek's and of Granite's
        elif wrapper._chat_template is None:
            wrapper, how = wrapper._tokenizer, {"return_dict": False, **how}
        if wrapper is not self._wrapper and (template := self.template(bool(chat.tools))) is not None:
            given["chat_template"] = template
        return wrapper.apply_chat_template(list(chat.messages), **how, **given)

    @cached_property
    def _counts_tools(self) -> bool:
        """Whether the template for chats without tools takes an empty list of them, and not None."""
        template, asked = self.template(False), [{"role": "user", "content": "x"}]
        if template is None:
            return False

        def takes(tools: list[Tool] | None) -> bool:
            with contextlib.suppress(Exception):  # a template is a program, and may raise anything
                self._wrapper.apply_chat_template(asked, tools=tools, chat_template=template, tokenize=False)
                return True
            return False

        return not takes(None) and takes([])

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Return the text of ``token_ids``; bytes that are no character become U+FFFD. ``shows_special``: with the
        names of special tokens, which are left out otherwise.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        bad = next((each for each in token_ids if not 0 <= each < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the model's vocabulary of {self.vocab_size:,}")
        return self.codec.decode(token_ids) if shows_special else self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._wrapper.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def picture_mark(self) -> str | None:
        """Return what the model's template writes for a picture between two texts. Return None if it takes none."""
        texts = [{"type": "text", "text": text} for text in _AROUND]
        chat = {"role": "user", "content": [texts[0], {"type": "image"}, texts[1]]}
        try:
            written = self._render(Form((chat,)), False, {}) if self._wrapper.has_chat_template else ""
        except Exception:  # noqa: BLE001 - a template is a program, and may raise anything
            return None
        before, _, behind = written.partition(_AROUND[0])
        mark, found, _ = behind.partition(_AROUND[1])
        return mark if before and found else None

    @cached_property
    def fill_marks(self) -> Marks | None:
        """The marks around a gap in a text; ``None``: the model has none."""
        return marks_in(self._wrapper.get_vocab())

    def filling(self, gap: Gap) -> list[int]:
        """Return a gap as token ids.

        Raises:
            RequestError: the model has no marks for it.
        """
        if (marks := self.fill_marks) is None:
            raise RequestError("this model fills no gaps: its tokenizer has no marks for what is before and behind one")
        names = _any_of(marks.ids)

        def encode(text: str) -> list[int]:
            return self._piece(_cut(_cut(text, self._control_names[0]), names), is_first=False)

        return [*self.encode(""), *marks.around(gap, encode)]

    def token_id(self, text: str) -> int | None:
        """Return the id of a special token. Return None if there is none of that text."""
        found = self._wrapper.convert_tokens_to_ids(text)
        return found if isinstance(found, int) and found in self.special_ids else None

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
        """The ids that open the model's reasoning, the ids that end it, and the ids that lead out of it.
        None if the model has no marks for reasoning."""
        if self._is_harmony:
            start, end, leave = (tuple(self.codec.encode(text)) for text in harmony.THINKING)
            return start, end, leave
        if (marks := self._syntax(False).reasoning) is None:
            return None
        start, end = (tuple(self.codec.encode(mark)) for mark in marks)
        return start, end, end

    def has_opened(self, prompt: Sequence[int]) -> bool | None:
        """Return as ``AnswerFormat.has_opened`` does, but True for Harmony, which always begins with reasoning."""
        return True if self._is_harmony else self.answer_format.has_opened(prompt)

    @cached_property
    def thinks_by_default(self) -> bool | None:
        """Whether the model's template has it reason where nobody says so; ``None`` if it has no switch for that."""
        switch: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
        try:
            usual, on, off = (self._render(Form(({"role": "user", "content": "x"},)), True, each) for each in switch)
        except Exception:  # noqa: BLE001 - a template is a program, and may raise anything
            return None
        return None if on == off else usual != off

    @cached_property
    def codec(self) -> TextCodec:
        """Parts of rendered chats as ids, and ids as rendered text."""
        wrapper = self._wrapper
        return TextCodec(
            lambda text: list(wrapper.encode(text, add_special_tokens=False)),
            lambda ids: str(wrapper.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
            self.special_ids,
        )

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model marks its reasoning and its calls of tools."""
        return AnswerFormat(self._syntax, self.codec.decode)

    def _syntax(self, has_tools: bool) -> AnswerSyntax:
        """Return how answers are written by the template that is in force with tools, or without."""
        if self._is_harmony:
            return harmony.SYNTAX
        template = self.template(has_tools)
        if template not in self._syntaxes:
            self._syntaxes[template] = self._find_syntax(template, has_tools)
        return self._syntaxes[template]

    def _find_syntax(self, template: str | None, has_tools: bool) -> AnswerSyntax:
        def render(
            messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], opens: bool, /, **settings: Any
        ) -> str:
            return self._render(Form(tuple(messages), tuple(tools) if has_tools else ()), opens, settings)

        names = " ".join(str(token) for token in self._wrapper.added_tokens_decoder.values())
        found = find_syntax(render, f"{template or ''} {names}")
        if found.calls is not None or template is None:
            return found
        known = [one for words, one in NOT_WRITTEN if "tools" in template and any(map(template.__contains__, words))]
        takes_tools = found.takes_tools and bool(known)
        return replace(found, calls=[*known, JSON_TOOLS][0], takes_tools=takes_tools, takes_calls=False)

    def template(self, has_tools: bool) -> str | None:
        """Return the chat template that is in force for a request with tools, or without; None if there is none."""
        given = getattr(self._wrapper, "chat_template", None)
        if isinstance(given, Mapping):
            names = [*(("tool_use",) if has_tools else ()), "default", *given]
            return next((given[name] for name in names if name in given), None)
        return given if isinstance(given, str) else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character; of special tokens their names."""
        return self._bytes_of([token_id])[0]

    def bytes_of_all(self) -> list[bytes]:
        """Return ``token_bytes`` of each id. Takes up to a second."""
        return self._bytes_of(range(self.vocab_size))

    @cached_property
    def _bytes_of(self) -> Callable[[Sequence[int]], list[bytes]]:
        return bytes_of_tokens(self._wrapper)

    def detokenizer(self, *, shows_markers: bool = False, behind: Sequence[int] = ()) -> Detokenizer:
        """Return a new incremental decoder for one sequence; its text is that of ``decode``. ``shows_markers``: with
        the markers of ``answer_format``, which may be special tokens. ``behind``: the ids with which it goes on."""
        if not shows_markers:
            return Detokenizer(self._decode, self.special_ids, behind)
        window = self._window
        return Detokenizer(lambda token_ids: window(tuple(token_ids)), self.special_ids - self._marker_ids, behind)

    @cached_property
    def _window(self) -> Callable[[tuple[int, ...]], str]:
        """Returns the text of a few tokens, special ones included. The same few come again and again."""
        return lru_cache(_MOST_WINDOWS)(self.codec.decode)

    @cached_property
    def _marker_ids(self) -> frozenset[int]:
        """The special tokens that are a part of a marker, or unknown: what one divides must not be joined."""
        wrapper = self._wrapper
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        silent = {*self.eos_token_ids, *(getattr(wrapper, name, None) for name in names)}
        marks = {i for mark in self.answer_format.markers for i in wrapper.encode(mark, add_special_tokens=False)}
        return (self.special_ids - silent) | (self.special_ids & marks)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that no text is made of, and that ``decode`` leaves out."""
        candidates = set(self._wrapper.all_special_ids)  # only those with a role, such as end of text
        # mistral-common lacks this list, and its ids are all among the candidates.
        with contextlib.suppress(NotImplementedError):
            candidates |= {token_id for token_id, token in self._wrapper.added_tokens_decoder.items() if token.special}
        return frozenset(token_id for token_id in candidates if not self._decode([token_id]))


def _older_template(path: Path) -> str | None:
    """Return the template of ``chat_template.json``, which older folders of models with pictures have."""
    try:
        found = json.loads((path / "chat_template.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def _cut(value: Any, names: re.Pattern[str], mark: str = "") -> Any:
    """Return a value with names in its texts cut behind their first letter, but for those in ``mark``."""
    if isinstance(value, str):
        texts = value.split(mark) if mark else [value]
        return mark.join(names.sub(lambda name: f"{name[0][0]}{_CUT}{name[0][1:]}", one) for one in texts)
    if isinstance(value, Mapping):
        return {key: _cut(one, names, mark) for key, one in value.items()}
    return [_cut(one, names, mark) for one in value] if isinstance(value, list | tuple) else value


def bytes_of_tokens(wrapper: Any) -> Callable[[Sequence[int]], list[bytes]]:
    """Return what maps token ids to their bytes, which a decoder does not show: a token may be a part of a character.
    In a vocabulary at *byte level* (GPT-2, Qwen, Llama 3) each byte is one printable character; in one with *byte
    fallback* (Llama 2, Gemma) text is text, and a byte that is not text is ``<0xE2>``."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # here, because importing it takes long

    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()} if _is_byte_level(wrapper) else None
    added = {i: str(token).encode() for i, token in getattr(wrapper, "added_tokens_decoder", {}).items()}

    def bytes_of(piece: object) -> bytes:
        if not isinstance(piece, str):
            return b""  # an id of padding
        if alphabet is not None and all(letter in alphabet for letter in piece):
            return bytes(alphabet[letter] for letter in piece)
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()

    def bytes_of_all(token_ids: Sequence[int]) -> list[bytes]:
        pieces = wrapper.convert_ids_to_tokens(list(token_ids))  # all at once: one by one takes five times as long
        return [added[i] if i in added else bytes_of(piece) for i, piece in zip(token_ids, pieces, strict=True)]

    return bytes_of_all


def _is_byte_level(wrapper: Any) -> bool:
    """Return whether the decoder maps characters to bytes."""
    backend = getattr(wrapper, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return any(one.get("type") == "ByteLevel" for one in (decoder, *decoder.get("decoders", ())))
