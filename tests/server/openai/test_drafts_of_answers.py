"""What became of an answer's own drafts: in its output, and in what a client is told. The sums are the engine's."""

import pytest
import stages
from asgi import told

from splitinfer import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.demo import TARGET
from splitinfer.llm import LLM
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

REPEATED = [70, 71, 72, 73] * 8  # n-grams of it are found at once


def counted(llm: LLM) -> tuple[int, int]:
    drafts = llm.stats()["speculation"]
    return sum(drafts["tried_at"]), sum(drafts["accepted_at"])


@pytest.mark.nightly
def test_each_answer_has_its_own_drafts():
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with stages.pipeline(TARGET, [6, 6], draft="ngram", flight=Flight(3, 1)) as llm:
        outs = llm.generate([REPEATED, REPEATED[1:], stages.prompt(9)], params)
        before = counted(llm)
        assert before == (sum(out.num_tried_drafts for out in outs), sum(out.num_right_drafts for out in outs))
        assert outs[0].num_tried_drafts > 0
        for out in outs:
            assert 0 <= out.num_right_drafts <= out.num_tried_drafts
            assert out.num_right_drafts < len(out.token_ids)
        body = {"prompt": REPEATED, "max_tokens": 24, "temperature": 0, "n": 2}
        usage = told(make_app(Service(llm, "demo")), "/v1/completions", body).json["usage"]["splitinfer"]
        after = counted(llm)
        assert (usage["drafts_tried"], usage["drafts_right"]) == (after[0] - before[0], after[1] - before[1])
        assert usage["drafts_tried"] > 0
