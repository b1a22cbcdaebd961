"""What fills a gap, by a random model whose tokenizer has marks for it, and by one whose has none."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from constrained import save_with_markers
from stages import pipeline

from splitinfer import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.llm import LLM
from splitinfer.server.running import make_app
from splitinfer.server.service import Service
from splitinfer.text.fill import Gap
from splitinfer.text.tokenizer import Tokenizer
from tests.server.asgi import told
from tests.server.stub_model import Model

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_with_markers(tmp_path_factory.mktemp("fill"), MARKS, "{{ messages }}", special=False)
    with pipeline(folder, [2, 2]) as running:
        yield running


def test_a_suffix_makes_a_gap(client: openai.OpenAI, llm: LLM):
    tokens = llm.tokenizer.filling(Gap(BEFORE, BEHIND))
    expected = llm.generate([tokens], SamplingParams(max_tokens=9))[0].text
    greedy: Any = {"model": "demo", "temperature": 0, "max_tokens": 9}
    found = client.completions.create(prompt=BEFORE, suffix=BEHIND, **greedy)
    assert (found.choices[0].text, found.usage and found.usage.prompt_tokens) == (expected, len(tokens))


def test_a_mark_ends_an_answer(client: openai.OpenAI, llm: LLM):
    (pad,) = llm.tokenizer.encode("<|fim_pad|>")
    asked: Any = {"model": "demo", "prompt": BEFORE, "suffix": BEHIND, "logit_bias": {f"{pad}": 100}}
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_a_model_without_marks_says_so():
    model = Model()
    model.filling = Tokenizer.from_folder(TARGET).filling  # type: ignore[attr-defined]
    said = told(make_app(Service(model, "demo")), "/v1/completions", {"prompt": "a", "suffix": "b"})  # type: ignore[arg-type]
    assert (said.status, said.json["error"]["message"][:27]) == (400, "this model fills no gaps: i")
