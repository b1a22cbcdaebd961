"""What became of an answer's own drafts: in its output, and in what a client is told. The sums are the engine's."""

import asyncio
import json
from typing import Any

import stages
from asgi import answer
from mutating import Asked

from splitinfer import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.demo import TARGET
from splitinfer.llm import LLM, Settings
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

REPEATED = [70, 71, 72, 73] * 8  # n-grams of it are found at once
JSON = (("Content-Type", "application/json"),)


def completion(service: Service, **more: Any) -> Any:
    body = json.dumps({"prompt": REPEATED, "max_tokens": 24, "temperature": 0, **more}).encode()
    said = asyncio.run(answer(make_app(service), Asked("POST", "/v1/completions", JSON, body)))
    assert said.status == 200, said.body
    return json.loads(said.body)["usage"]


def counted(llm: LLM) -> tuple[int, int]:
    drafts = llm.stats()["speculation"]
    return sum(drafts["tried_at"]), sum(drafts["accepted_at"])


def test_each_answer_has_its_own_drafts():
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with stages.worker("inproc") as address:
        layout = stages.layout(TARGET, [6, 6], [address]) | {"draft": "ngram"}
        with LLM(layout, settings=Settings(flight=Flight(3, 1))) as llm:
            outs = llm.generate([REPEATED, REPEATED[1:], stages.prompt(9)], params)
            tried = [out.num_tried_drafts for out in outs]
            right = [out.num_right_drafts for out in outs]
            assert (sum(tried), sum(right)) == counted(llm)
            assert tried[0] > 0
            assert all(0 <= each <= of for each, of in zip(right, tried, strict=True))
            assert all(each < len(out.token_ids) for each, out in zip(right, outs, strict=True))
            before = counted(llm)
            usage = completion(Service(llm, "demo"), n=2)
            told = usage["splitinfer"]
            assert told["drafts_tried"] > 0
            assert (told["drafts_tried"], told["drafts_right"]) == tuple(
                after - each for after, each in zip(counted(llm), before, strict=True)
            )


def test_where_nobody_drafts_nothing_is_said():
    with stages.pipeline(TARGET, [12]) as llm:
        assert "splitinfer" not in completion(Service(llm, "demo"))
