"""What fills a gap, by a random model whose tokenizer has marks for it, and by one whose has none."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
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


def test_a_suffix_and_an_infill_are_the_same_gap(client: openai.OpenAI, http: httpx.Client, llm: LLM):
    tokens = llm.tokenizer.filling(Gap(BEFORE, BEHIND))
    expected = llm.generate([tokens], SamplingParams(max_tokens=9))[0].text
    greedy: Any = {"model": "demo", "temperature": 0, "max_tokens": 9}
    found = client.completions.create(prompt=BEFORE, suffix=BEHIND, **greedy)
    assert (found.choices[0].text, found.usage and found.usage.prompt_tokens) == (expected, len(tokens))
    body: dict[str, Any] = {
        "input_prefix": BEFORE, "input_suffix": BEHIND, "n_predict": 9, "temperature": 0, "stream": False,
        "samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_predict_ms": 500, "cache_prompt": True,
    }  # fmt: skip
    said = http.post("/infill", json=body)
    whole = said.json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == (expected, True, "limit")
    assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (9, len(tokens))
    assert "n_indent" in said.headers["x-splitinfer-ignored"]
    lines = http.post("/infill", json={**body, "stream": True}).text.strip().split("\n\n")
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(piece["content"] for piece in pieces) == expected
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    begun = llm.tokenizer.filling(Gap(BEFORE, BEHIND, "a", (("x.py", "y = 1"),)))
    more = {**body, "prompt": "a", "input_extra": [{"filename": "x.py", "text": "y = 1"}]}
    assert http.post("/infill", json=more).json()["tokens_evaluated"] == len(begun)


def test_a_mark_ends_an_answer(client: openai.OpenAI, llm: LLM):
    (pad,) = llm.tokenizer.encode("<|fim_pad|>")
    asked: Any = {"model": "demo", "prompt": BEFORE, "suffix": BEHIND, "logit_bias": {f"{pad}": 100}}
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_a_model_without_marks_says_so():
    model = Model()
    model.filling = Tokenizer.from_folder(TARGET).filling  # type: ignore[attr-defined]
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        said = told(make_app(Service(model, "demo")), path, body)  # type: ignore[arg-type]
        assert (said.status, said.json["error"]["message"][:27]) == (400, "this model fills no gaps: i")
