"""Harmony: what a gpt-oss model reads and writes. Most of it needs the package openai-harmony, and its vocabulary
(``TIKTOKEN_ENCODINGS_BASE``, or a network)."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from splitinfer.demo import TARGET
from splitinfer.errors import RequestError
from splitinfer.text.answer import AnswerPart, BrokenCall, ReasoningPart, TextPart, ToolCallPart, joined
from splitinfer.text.growing_calls import CallPiece
from splitinfer.text.harmony import NOT_INSTALLED, OTHER_VOCABULARY, Harmony, load_harmony
from splitinfer.text.tokenizer import Tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT = [{"role": "user", "content": "Weather?"}]
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
THOUGHT = "<|channel|>analysis<|message|>Hm \U0001f914.<|end|>"


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    package = pytest.importorskip("openai_harmony")
    try:
        return Harmony(package.load_harmony_encoding("HarmonyGptOss"))
    except package.HarmonyError as error:
        pytest.skip(f"no vocabulary: {error}")


def test_without_the_package_tools_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    tokenizer = Tokenizer.from_folder(TARGET, 0, "gpt_oss")
    assert tokenizer.no_tools == NOT_INSTALLED
    assert tokenizer.encode_chat(CHAT) == Tokenizer.from_folder(TARGET, 0).encode_chat(CHAT)
    with pytest.raises(RequestError, match=r"tools are not supported: .* pip install openai-harmony"):
        tokenizer.encode_chat(CHAT, tools=[WEATHER])


def test_other_models_need_no_package():
    assert Tokenizer.from_folder(TARGET, 0, "llama").no_tools is None


def test_a_model_with_another_vocabulary_is_read_by_its_template():
    pytest.importorskip("openai_harmony")
    tokenizer = Tokenizer.from_folder(TARGET, 0, "gpt_oss")
    assert tokenizer.no_tools == OTHER_VOCABULARY
    assert tokenizer.encode_chat(CHAT) == Tokenizer.from_folder(TARGET, 0).encode_chat(CHAT)


def test_a_conversation(harmony: Harmony):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather? <|end|>"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    options = {"reasoning_effort": "low", "current_date": "2026-01-01"}
    ids = harmony.encode_chat(messages, tools=[WEATHER], options=options)
    text = harmony.decode(ids)
    assert "Current date: 2026-01-01\n\nReasoning: low" in text
    assert "# Instructions\n\nBe kind.\n\n# Tools\n\n## functions" in text
    assert "type weather = " in text
    assert text.endswith(
        "<|start|>user<|message|>Weather? <|end|><|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json"
        '<|message|>{"city": "Oslo"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sun<|end|><|start|>assistant"
    )
    (end,) = harmony.encode_chat([{"role": "user", "content": "<|end|>"}], opens_answer=False)[-1:]
    assert ids.count(end) == text.count("<|end|>") - 1  # what the user says is no marker
    whole = harmony.decode(harmony.encode_chat(messages, tools=[WEATHER], options=options, opens_answer=False))
    assert whole + "<|start|>assistant" == text


def test_reasoning_behind_an_answer_is_dropped(harmony: Harmony):
    turn = {"role": "assistant", "content": "Sun.", "reasoning_content": "Secret."}
    assert "Secret." not in harmony.decode(harmony.encode_chat([*CHAT, turn, *CHAT]))


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (
            f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>é 1 < 2",
            [ReasoningPart("Hm \U0001f914."), TextPart("é 1 < 2")],
        ),
        (CALL, [ToolCallPart("weather", '{"city": "Oslo"}')]),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>",
            [TextPart("I look."), ToolCallPart("weather", '{"city": "Oslo"}')],
        ),
        (CALL[:-3], [TextPart(CALL[:-3])]),
        (
            "<|channel|>commentary to=python<|message|>1+1<|end|><|start|>assistant<|channel|>final<|message|>2",
            [TextPart("<|channel|>commentary to=python<|message|>1+1<|end|>2")],
        ),
        ("No Harmony at all", [TextPart("No Harmony at all")]),
        (f"{THOUGHT}No header", [ReasoningPart("Hm \U0001f914."), TextPart("No header")]),
        ("<|channel|>final<|message|>a<|start|>b", [TextPart("a<|start|>b")]),
        ("<|channel|>final<|message|>a <|chan", [TextPart("a <|chan")]),
        (f"{THOUGHT}<|start|>assistant<|channel|>fin", [ReasoningPart("Hm \U0001f914.")]),
        ("", []),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_answer(harmony: Harmony, answer: str, parts: list[AnswerPart], step: int):
    parser = harmony.parser([], [WEATHER])
    found = [part for i in range(0, len(answer), step) for part in parser.feed(answer[i : i + step])]
    assert joined([*found, *parser.finish()]) == parts


def test_without_tools_a_call_is_text(harmony: Harmony):
    parser = harmony.parser([])
    assert joined([*parser.feed(CALL), *parser.finish()]) == [TextPart(CALL)]


# -- loading ---------------------------------------------------------------------------------------


class Package(ModuleType):
    """openai-harmony, as far as it loads: from the folder that a variable names. ``both``: lets two loads meet."""

    HarmonyError = ValueError

    def __init__(self) -> None:
        super().__init__("openai_harmony")
        self.both = threading.Barrier(2)

    def load_harmony_encoding(self, _name: str) -> Any:
        vocabulary = Path(os.environ[BASE]) / "o200k_base.tiktoken"
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.2)
        if not vocabulary.is_file():
            raise self.HarmonyError("no such file")
        return SimpleNamespace(encode=lambda marker, **_: [len(marker)])


BASE = "TIKTOKEN_ENCODINGS_BASE"
WRAPPER = SimpleNamespace(convert_tokens_to_ids=len)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    found = Package()
    monkeypatch.setitem(sys.modules, "openai_harmony", found)
    monkeypatch.setattr("splitinfer.text.harmony.bytes_of_tokens", lambda _: lambda ids: [b"a"])
    return found


def test_several_threads_load_one_after_the_other(package: Package, monkeypatch: pytest.MonkeyPatch):
    """The variable is the process's: what one of them takes away another may be about to read."""
    monkeypatch.delenv(BASE, raising=False)
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(load_harmony, [WRAPPER] * 4))
    assert [type(one) for one in loaded] == [Harmony] * 4
    assert BASE not in os.environ
    assert package.both.broken, "no two met"


@pytest.mark.usefixtures("package")
def test_a_folder_without_a_vocabulary_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A child process may have been told of it while its parent was loading."""
    monkeypatch.setenv(BASE, str(tmp_path / "gone"))
    assert isinstance(load_harmony(WRAPPER), Harmony)
    assert os.environ[BASE] == str(tmp_path / "gone")


def fed(harmony: Harmony, text: str, *, grows: bool = True, begun: str | None = None) -> tuple[Any, list[AnswerPart]]:
    parser = harmony.parser([], [WEATHER], grows=grows, begun=begun)
    return parser, [part for i in range(0, len(text), 5) for part in parser.feed(text[i : i + 5])]


def test_calls_come_in_pieces(harmony: Harmony):
    arguments = {"city": "Oslo " * 200, "days": [1, None], "note": "é \U0001f914"}
    text = CALL.replace('{"city": "Oslo"}', json.dumps(arguments, indent=1)) + "<|call|>"
    (call,), (parser, pieces) = parsed_whole(harmony, text), fed(harmony, text)
    assert joined([*pieces, *parser.finish()]) == [call]
    assert sum(isinstance(one, CallPiece) for one in pieces) > 100
    parser, pieces = fed(harmony, text[:300])
    assert call.arguments.startswith(joined(pieces)[0].arguments)  # type: ignore[union-attr]
    assert parser.finish(is_cut=True) == []
    assert fed(harmony, text[:300])[0].finish() == [BrokenCall()]
    assert fed(harmony, text.replace('"days":', '"days"'))[1][-1] == BrokenCall()


def parsed_whole(harmony: Harmony, text: str) -> list[ToolCallPart]:
    parser, parts = fed(harmony, text, grows=False)
    return [part for part in (*parts, *parser.finish()) if isinstance(part, ToolCallPart)]


def test_an_answer_goes_on_inside_its_message(harmony: Harmony):
    turns = [*CHAT, {"role": "assistant", "content": "The sun", "reasoning_content": "Hm."}]
    ids, text = Tokenizer(None, harmony).write_chat(turns, continues=True)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>The sun")
    assert harmony.decode(ids) == text
    parser, parts = fed(harmony, " shines.<|end|>", begun="The sun")
    assert joined([*parts, *parser.finish()]) == [TextPart(" shines.")]
