"""Models that somebody trained: each promise once, against mlx-lm, on every model folder within the folder that
SPLITINFER_REAL_MODELS names. Random weights do not show what a trained model does: near-ties are rare, windows matter,
and templates are real."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2 as httpx
import mlx.core as mx
import mlx.nn as nn
import pytest
from asgi import InMemory
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from stages import pipeline, shorten_blocks, tokens_of

from splitinfer.core.grammar import Grammar
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

_FOLDER = os.environ.get("SPLITINFER_REAL_MODELS", "")
MODELS = sorted(file.parent for file in Path(_FOLDER).expanduser().glob("*/config.json")) if _FOLDER else []
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not MODELS, reason="SPLITINFER_REAL_MODELS names no folder that holds model folders"),
]
QUESTION = "What is the capital of France? Answer with one word."
NEW = 12  # tokens of an answer
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}}}  # fmt: skip
CUTS: dict[str, Callable[[int], list[int]]] = {
    "whole": lambda n: [n],
    "first": lambda n: [1, n - 1],
    "last": lambda n: [n - 1, 1],
    "three": lambda n: [n // 3, n // 3, n - 2 * (n // 3)],
}


@dataclass
class Real:
    """A model's folder, and what mlx-lm says."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "config.json").read_text()))

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def halves(self) -> list[int]:
        return [self.num_layers // 2, self.num_layers - self.num_layers // 2]

    @cached_property
    def model(self) -> nn.Module:
        model, _ = load_model(self.folder)
        model.set_dtype(mx.float32)
        return model

    def greedy(self, tokens: list[int], count: int = NEW) -> list[int]:
        cache, found, given = make_prompt_cache(self.model), list[int](), tokens
        while len(found) < count:
            found.append(int(mx.argmax(self.model(mx.array([given]), cache=cache)[0, -1]).item()))
            given = found[-1:]
        return found

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of the tokens from the second on."""
        logits = self.model(mx.array([tokens[:-1]]))[0]
        own = mx.take_along_axis(logits, mx.array(tokens[1:])[:, None], axis=-1)[:, 0]
        return [float(one) for one in (own - mx.logsumexp(logits, axis=-1)).tolist()]


@pytest.fixture(scope="module", params=MODELS or [Path("none")], ids=lambda folder: folder.name)
def real(request: pytest.FixtureRequest) -> Real:
    return Real(request.param)


@pytest.fixture(scope="module")
def served(real: Real) -> dict[str, Any]:
    return {"model": real.folder, "cuts": real.halves}


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> list[int]:
    """A turn, or, where the model was not trained to chat, a text."""
    if not llm.tokenizer.writes_turns:
        return llm.tokenizer.encode(f"{QUESTION}\n")
    return llm.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])


@pytest.mark.parametrize("cut", CUTS)
def test_tokens_are_mlx_lms_at_every_cut(real: Real, prompt: list[int], cut: str) -> None:
    with pipeline(real.folder, CUTS[cut](real.num_layers)) as running:
        assert tokens_of(running, prompt, temperature=0, max_tokens=NEW) == real.greedy(prompt)


def test_several_together_are_what_each_is_alone(real: Real, llm: LLM, prompt: list[int]) -> None:
    prompts = [prompt, prompt[:-3], prompt[2:]]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    assert [one.token_ids for one in found] == [real.greedy(tokens) for tokens in prompts]


def test_past_a_window(real: Real, llm: LLM, prompt: list[int]) -> None:
    window = real.config.get("sliding_window")
    if not window or window > 1024:
        pytest.skip("its layers have no window, or one that is long for a test")
    tokens = (prompt * (window // len(prompt) + 2))[: window + 30]
    assert tokens_of(llm, tokens, temperature=0, max_tokens=NEW) == real.greedy(tokens)


def test_after_a_restart_kv_is_read_from_the_disk(
    real: Real, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_blocks(monkeypatch, 8)
    disks = [Disk(tmp_path / f"{stage}", 1 << 30) for stage in range(2)]
    params, found = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True), []
    for _ in range(2):
        with pipeline(real.folder, real.halves, disks=disks) as running:
            found += running.generate([prompt * 3], params)
    assert found[1].num_cached_tokens >= 8
    assert [one.token_ids for one in found] == [real.greedy(prompt * 3)] * 2


def test_forms(llm: LLM, prompt: list[int]) -> None:
    cities = ["Paris", "London", "Rome"]
    schema = {"type": "object", "properties": {"city": {"enum": cities}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    for form, texts in ((Grammar.choice(cities), cities), (schema, [f'{{"city":"{city}"}}' for city in cities])):
        (found,) = llm.generate([prompt], SamplingParams(grammar=form, temperature=0, max_tokens=40))
        assert found.text == texts[0]


def test_a_call_that_must_be_made_is_one_or_the_model_is_said_to_have_none(llm: LLM) -> None:
    asked = {"messages": [{"role": "user", "content": "The weather in Oslo?"}], "tools": [TOOL], "max_tokens": 60}
    app = make_app(Service(llm, "real"))
    with httpx.Client(transport=InMemory(app), base_url="http://localhost", timeout=600) as client:
        said = client.post("/v1/chat/completions", json={**asked, "tool_choice": "required"})
    if said.status_code == 200:
        (call,) = said.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    else:
        assert (said.status_code, said.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(real: Real, llm: LLM, prompt: list[int], temperature: float) -> None:
    params: Any = {"temperature": temperature, "seed": 7, "max_tokens": 2 * NEW}
    with pipeline(real.folder, real.halves, draft="ngram") as running:
        assert tokens_of(running, prompt * 2, **params) == tokens_of(llm, prompt * 2, **params)


def test_log_probabilities_are_mlx_lms(real: Real, llm: LLM, prompt: list[int]) -> None:
    (found,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert [one.logprob for one in found.prompt_logprobs] == pytest.approx(real.logprobs(prompt), abs=1e-3)
