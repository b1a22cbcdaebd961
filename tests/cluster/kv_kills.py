"""Kill processes while they write KV, and look what is found of it afterwards.

A process answers one long prompt after another on two stages that keep KV on disk. At a random moment the coordinator
or its worker is killed (-9): before a block is saved, while it is written, before or after the coordinator hears of
it. Then a new pipeline answers the same prompts with what it finds.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM, Settings

LAYOUT = {
    "model": "demo",
    "stages": [{"name": "front", "layers": 6}, {"name": "back", "layers": 6, "address": "local"}],
}
HERE = Path(__file__).resolve().parent
NUM_PROMPTS = 4
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=1)
_ANSWER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from kv_kills import LAYOUT, PARAMS, prompts
from splitinfer.llm import LLM, Settings
with LLM(LAYOUT, settings=Settings(kv_dir=Path({folder!r}))) as llm:
    print("ready", flush=True)
    for tokens in prompts():
        llm.generate([tokens], PARAMS)
        print("answered", flush=True)
"""


@dataclass(frozen=True)
class Trial:
    """Who was killed, after how many answers; how many files were left, and what was made of them."""

    victim: str
    answered: int
    num_files: int
    cached_tokens: int
    same: bool


def prompts() -> list[list[int]]:
    """Long enough for a full block and a part of another."""
    return [[random.Random(seed).randrange(10, 2000) for _ in range(300)] for seed in range(NUM_PROMPTS)]


def answers(folder: Path | None) -> tuple[list[list[int]], int]:
    """What a pipeline answers with what is in ``folder``; and how many tokens of KV it found there."""
    with LLM(LAYOUT, settings=Settings(kv_dir=folder)) as llm:
        outs = llm.generate(prompts(), PARAMS)
    return [out.token_ids for out in outs], sum(out.num_cached_tokens for out in outs)


def trial(folder: Path, seed: int, expected: Sequence[list[int]]) -> Trial:
    """One killing."""
    chance = random.Random(seed)
    code = _ANSWER.format(paths=[str(HERE), str(HERE.parents[1])], folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        answered = chance.randrange(NUM_PROMPTS - 1)
        for _ in range(answered):
            assert process.stdout.readline() == "answered\n"
        time.sleep(chance.random() * 0.4)
        victim = chance.choice(["coordinator", "worker"])
        if victim == "worker":
            for child in psutil.Process(process.pid).children():
                child.send_signal(signal.SIGKILL)
            time.sleep(chance.random() * 0.2)  # what the other stage does now, it does alone
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    num_files = len(list(folder.rglob("*.kv")))
    tokens, cached = answers(folder)
    return Trial(victim, answered, num_files, cached, tokens == list(expected))


def trials(seeds: Sequence[int]) -> list[Trial]:
    """So many killings, each on a folder of its own."""
    expected, _ = answers(None)
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(trial(Path(folder), seed, expected))
    return found
