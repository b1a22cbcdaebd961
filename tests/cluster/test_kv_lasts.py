"""KV on disk, with a real process that is killed while its answer is half said.

That a new coordinator finds the KV of the last one is in ``test_recovery.py``.
"""

import random
import threading
from pathlib import Path

import pytest
from processes import local_workers

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM, Settings

pytestmark = pytest.mark.nightly

TWO = {"model": "demo", "stages": [{"name": "a", "layers": 6}, {"name": "b", "layers": 6, "address": "local"}]}


def test_a_replay_after_a_workers_death_reads_its_kv_back(tmp_path: Path):
    tokens = [random.Random(5).randrange(10, 2000) for _ in range(520)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, seed=1)
    with LLM(TWO, settings=Settings(kv_dir=tmp_path)) as llm:
        expected = llm.generate([tokens], params)[0].token_ids
        (worker,) = local_workers().values()
        request = llm.submit(tokens, params)
        before = llm.stats()["computed_tokens"]
        for _ in request:
            if len(request.output.token_ids) == 30:
                threading.Thread(target=worker.kill).start()
        stats = llm.stats()
    assert request.output.finish_reason == "length"
    assert request.output.token_ids == expected
    assert stats["rejoins"] == 1
    assert stats["fetched_tokens"] >= 512
    # The answer, what was in flight, and the tokens since the last block that had been written.
    assert stats["computed_tokens"] - before < 60 + 256 + 50
