"""KV on disk, with real processes: what is killed leaves nothing wrong behind, and what comes back finds its KV."""

import json
import random
import threading
from pathlib import Path

import kv_kills
import psutil
from effort import thorough
from processes import coordinator

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM, Settings


def test_whoever_is_killed_while_writing_leaves_nothing_wrong_behind():
    found = kv_kills.trials(range(thorough(1, 5)))
    assert all(each.same for each in found), found


def test_a_replay_after_a_workers_death_reads_its_kv_back(tmp_path: Path):
    tokens = [random.Random(5).randrange(10, 2000) for _ in range(520)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, seed=1)
    with LLM(kv_kills.LAYOUT, settings=Settings(kv_dir=tmp_path)) as llm:
        expected = llm.generate([tokens], params)[0].token_ids
        (worker,) = psutil.Process().children()
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


def test_the_next_run_of_the_command_finds_what_the_last_one_kept(tmp_path: Path):
    layout = tmp_path / "two.yaml"
    layout.write_text(json.dumps(kv_kills.LAYOUT))
    story = "Once upon a time there was a poor woodcutter who lived with his wife in the forest. " * 4
    answers = []
    for _ in range(2):
        args = ("--prompt", story, "--json", "--max-tokens", "8", "--temp", "0", "--kv-dir", str(tmp_path / "kv"))
        with coordinator(layout, *args) as running:
            assert running.wait(60) == 0, running.err
            answers.append(json.loads(running.out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["num_cached_tokens"] == 0
    assert answers[1]["num_cached_tokens"] == answers[1]["num_prompt_tokens"] - 1
