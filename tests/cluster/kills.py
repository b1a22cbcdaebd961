"""Kill and freeze workers at random moments and compare every token with the undisturbed run.

python tests/cluster/kills.py --kills 100 --freezes 25
python tests/cluster/kills.py --kills 100 --freezes 0 --streams 8        # eight requests at a time
python tests/cluster/kills.py --kills 50 --freezes 0 --drafts            # blocks of drafts in flight
"""

import argparse
import json
import logging
import math
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import psutil

import splitinfer
from splitinfer import Flight
from splitinfer.llm import LLM, Settings

SHAPES = {2: [6, 6], 3: [4, 4, 4]}
NUM_TOKENS = 120
PROMPTS = ["The king", "Once upon a time there was a poor woodcutter who lived with his wife in the forest. " * 8]


@dataclass(frozen=True)
class Trial:
    """One disturbance: what was done, whether the tokens were the same, seconds to notice and to go on."""

    kind: str
    num_stages: int
    num_streams: int
    seed: int
    same: bool
    to_notice: float
    to_resume: float


class _Ear(logging.Handler):
    """Hears when the engine notices a loss."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting up to" in record.getMessage():
            self.heard.append(time.monotonic())


@contextmanager
def _listening() -> Iterator[_Ear]:
    ear, log = _Ear(), logging.getLogger("splitinfer.engine.engine")
    log.addHandler(ear)
    try:
        yield ear
    finally:
        log.removeHandler(ear)


def layout(num_stages: int) -> dict[str, object]:
    """The demo model over local workers."""
    stages = [{"name": f"s{i}", "layers": n, "address": "local"} for i, n in enumerate(SHAPES[num_stages])]
    del stages[0]["address"]
    return {"model": "demo", "stages": stages}


def disturb(
    num_stages: int, kinds: Sequence[str], first_seed: int, num_streams: int = 1, *, drafts: bool = False
) -> list[Trial]:
    """One pipeline, so many requests at a time, one disturbance for each lot of them."""
    settings = Settings(rejoin_timeout=60.0, token_budget=32)
    if drafts:
        settings = replace(settings, draft="demo-draft", flight=Flight(3, 4, num_stages))
    with LLM(layout(num_stages), settings=settings) as llm, _listening() as ear:
        expected = [_run(llm, index) for index in range(max(len(PROMPTS) * 2, num_streams))]
        trials = []
        for i, kind in enumerate(kinds):
            trial = _trial(llm, ear, kind, num_stages, first_seed + i, expected, num_streams)
            while math.isnan(trial.to_resume):  # it struck when all was said already
                trial = _trial(llm, ear, kind, num_stages, trial.seed + 500, expected, num_streams)
            trials.append(trial)
            print(json.dumps(asdict(trial)), flush=True)
        return trials


def _prompt(index: int) -> str:
    return PROMPTS[index // 2 % len(PROMPTS)]


def _params(index: int) -> splitinfer.SamplingParams:
    temperature = 0.8 if index % 2 else 0.0
    return splitinfer.SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=index, ignore_eos=True)


def _run(llm: LLM, index: int) -> tuple[list[int], float]:
    out = llm.generate(_prompt(index), _params(index))[0]
    return out.token_ids, out.token_times[-1]


def _trial(
    llm: LLM,
    ear: _Ear,
    kind: str,
    num_stages: int,
    seed: int,
    expected: list[tuple[list[int], float]],
    num_streams: int,
) -> Trial:
    chance = random.Random(seed)
    indices = chance.sample(range(len(expected)), num_streams)
    usual = max(expected[index][1] for index in indices)
    ear.heard.clear()
    struck: list[float] = []

    def strike() -> None:
        victim = chance.choice(psutil.Process().children())
        struck.append(time.monotonic())
        victim.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    timer = threading.Timer(chance.uniform(0, 0.8 * usual), strike)
    began = time.monotonic()
    requests = [llm.submit(_prompt(index), _params(index)) for index in indices]
    timer.start()
    outputs = [request.result() for request in requests]
    timer.join()
    arrivals = sorted(began + t for output in outputs for t in output.token_times)
    after = [t for t in arrivals if ear.heard and t > ear.heard[0]]
    return Trial(
        kind,
        num_stages,
        num_streams,
        seed,
        all(
            o.token_ids == expected[i][0] and o.finish_reason == "length" for o, i in zip(outputs, indices, strict=True)
        ),
        (ear.heard[0] if ear.heard else float("nan")) - struck[0],
        (after[0] if after else float("nan")) - struck[0],
    )


def summary(trials: Sequence[Trial]) -> dict[str, object]:
    """Counts, and p50 and maximum of the times, by kind."""
    found: dict[str, object] = {}
    for kind in sorted({t.kind for t in trials}):
        own = [t for t in trials if t.kind == kind]
        found[kind] = {
            "trials": len(own),
            "same_tokens": sum(t.same for t in own),
            "notice_p50": statistics.median(t.to_notice for t in own),
            "notice_max": max(t.to_notice for t in own),
            "resume_p50": statistics.median(t.to_resume for t in own),
            "resume_max": max(t.to_resume for t in own),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--freezes", type=int, default=25)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trials: list[Trial] = []
    for i, num_stages in enumerate(SHAPES):
        share = lambda n, i=i: n // 2 + (n % 2 if i == 0 else 0)  # noqa: E731
        kinds = ["kill"] * share(args.kills) + ["freeze"] * share(args.freezes)
        trials += disturb(num_stages, kinds, args.seed + 1000 * num_stages, args.streams, drafts=args.drafts)
        print(json.dumps(summary(trials), indent=1), flush=True)
    bad = [asdict(t) for t in trials if not t.same]
    print(json.dumps({"summary": summary(trials), "wrong": bad}))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
