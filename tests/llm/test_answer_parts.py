"""Answers told apart while they grow, and stop strings that act on the text for the reader alone."""

from dataclasses import replace
from pathlib import Path

import pytest
from constrained import save_with_markers
from stages import pipeline

from splitinfer import SamplingParams
from splitinfer.core.stops import StopUpdate
from splitinfer.llm.answer_parts import Apart
from splitinfer.text.answer import AnswerFormat, AnswerPart, ReasoningPart, TextPart, joined
from tests.text.test_answer import CALL, OSLO, QWEN, TOOLS

THOUGHT = ReasoningPart("First I look.\n\nQuestion: what? END")
ANSWER = f"<think>{THOUGHT.text}</think>It is {CALL}said. END of it"


def told(stops: tuple[str, ...], cut: int, text: str = ANSWER) -> tuple[list[AnswerPart], str | None]:
    """The parts of a text that comes in pieces of ``cut`` characters, and the stop string that ended it."""
    apart = Apart(AnswerFormat(lambda _: QWEN, lambda _: "").parser((), TOOLS), stops)
    found = list[StopUpdate]()
    for i in range(0, len(text), cut):
        found.append(apart.feed(text[i : i + cut]))
        if found[-1].stopped is not None:
            break
    else:
        found.append(apart.finish())
    for one in found:
        assert one.text == "".join(part.text for part in one.parts if isinstance(part, TextPart))
    return joined(part for one in found for part in one.parts), found[-1].stopped


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize(
    ("stops", "behind", "stopped"),
    [
        (("Question:", "\n\n", "</think>", "<tool_call>", "Oslo", "}", "\n", "<think>"), "said. END of it", None),
        (("END",), "said. ", "END"),
        (("is said", "of it", "it!"), "said. END ", "of it"),  # a text that a call follows has ended
        (("it.",), "said. END of it", None),  # what may become one comes at the end
    ],
)
def test_stop_strings_see_the_text_for_the_reader_alone(
    stops: tuple[str, ...], behind: str, stopped: str | None, cut: int
):
    assert told(stops, cut) == ([THOUGHT, TextPart("It is "), OSLO, TextPart(behind)], stopped)


def test_a_stop_string_that_the_end_completes():
    assert told(("<tool",), 1, "a<tool") == ([TextPart("a")], "<tool")


def test_the_library_tells_an_answer_apart_unless_it_is_asked_for_as_it_is(tmp_path: Path):
    folder = save_with_markers(tmp_path, ("<think>", "</think>"), "{{ messages[0]['content'] }}<think>", special=True)
    with pipeline(folder, [2, 2]) as llm:
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Once"}])
        params = SamplingParams(max_tokens=50, thinking_budget=4, ignore_eos=True)
        (said,), (raw,) = llm.generate([prompt], params), llm.generate([prompt], params, raw=True)
        assert said.token_ids == raw.token_ids
        assert f"{said.reasoning}</think>{said.text}" == raw.text
        assert said.reasoning
        assert said.text
        stop = said.reasoning[:20]
        assert stop not in said.text
        (stopped,) = llm.generate([prompt], replace(params, stop=(stop,)))
        assert (stopped.reasoning, stopped.text, stopped.finish_reason) == (said.reasoning, said.text, "length")
        first = llm.tokenizer.encode("x")[:1]
        with pytest.raises(Exception, match="stop_token_ids has token id 9999, but the model's vocabulary is 2,050"):
            llm.generate([first], SamplingParams(stop_token_ids=(9999,)))
