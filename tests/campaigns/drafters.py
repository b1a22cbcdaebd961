"""Drafters of one target beside each other: ``python -m tests.campaigns.drafters TEXT [DRAFTER ...]``.

The built-in target on an emulated machine: its tokens are really computed, and the machine file says when. Each drafter
continues the same passages of TEXT, greedily and at temperature 1, one stream and several. ``allowed``: what the
fastest fixed length of blocks would give by the shares of drafts that were right at each place and the run's own times.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from splitinfer.bench.shared.texts import passages
from splitinfer.core.costs.by_rows import MAX_ROWS, RowCosts
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM
from splitinfer.machine.selection import VARIABLE

_PASSAGE, _PROMPT = 1600, 96  # characters, tokens
_SETTLE = 40  # tokens, before anything is timed
_FEW = 5  # tries of a place, which say nothing


def main() -> None:
    """Print one line for each drafter, temperature and number of streams, and a last one of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("drafters", nargs="*", default=["none", "ngram", "demo-draft"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--machine", default="two-large")
    parser.add_argument("--layers", default="6-6")
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--trials", type=int, default=2, help="passages of one stream")
    args = parser.parse_args()
    os.environ[VARIABLE] = args.machine
    texts = passages(args.text, max(args.trials, 8), _PASSAGE)
    found = [row for name in args.drafters for row in _of_drafter(name, texts, args)]
    none = {(row["temperature"], row["streams"]): row for row in found if row["drafter"] == "none"}
    for row in found:
        base = none.get((row["temperature"], row["streams"]))
        row["gain"] = row["rate"] / base["rate"] if base else None
        row["same"] = row["tokens"] == base["tokens"] if base and row is not base else None
    for row in found:
        del row["tokens"]
    print(json.dumps(found))
    for row in found:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "places"}, flush=True)


def _of_drafter(name: str, texts: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    front, back = map(int, args.layers.split("-"))
    stages = [{"name": "front", "layers": front}, {"name": "back", "layers": back, "address": "local"}]
    layout = {"model": args.model, "stages": stages, **({} if name == "none" else {"draft": name})}
    with LLM(layout) as llm:
        prompts = [llm.encode(text)[:_PROMPT] for text in texts]
        _run(llm, [prompts[-1]], 1.0, _SETTLE)
        rows = []
        for temperature in map(float, args.temperatures.split(",")):
            for count in map(int, args.streams.split(",")):
                groups = [[one] for one in prompts[: args.trials]] if count == 1 else [prompts[:count]]
                rows.append({"drafter": name, "temperature": temperature, "streams": count}
                            | _measured(llm, groups, temperature, args.tokens))  # fmt: skip
                print(json.dumps({k: v for k, v in rows[-1].items() if k != "tokens"}), flush=True)
    return rows


def _measured(llm: LLM, groups: Sequence[Sequence[list[int]]], temperature: float, tokens: int) -> dict[str, Any]:
    before = llm.stats()["speculation"]
    answers = [_run(llm, prompts, temperature, tokens) for prompts in groups]
    after = llm.stats()["speculation"]
    rate = statistics.harmonic_mean([one for one, _ in answers])
    found = {"rate": rate, "tokens": [ids for _, ids in answers]}
    if not before or not after or after["sent"] == before["sent"]:
        return found
    places = [(after["tried_at"][i] - before["tried_at"][i], after["accepted_at"][i] - before["accepted_at"][i])
              for i in range(MAX_ROWS)]  # fmt: skip
    tried, right = (sum(each) for each in zip(*places, strict=True))
    costs = RowCosts.through(after["step_seconds_by_rows"], after["draft_seconds"] or 0.0, after["link_seconds"])
    allowed = _allowed(costs, places)
    sent = (after["sent"] - before["sent"]) / sum(len(ids) for _, each in answers for ids in each)
    return found | {
        "acceptance": right / max(1, tried), "sent_per_token": sent, "places": places, "flight": after["flight"],
        "draft_ms": 1000 * costs.draft, "step_ms": 1000 * costs.latency(1), "allowed": allowed,
        "share_of_allowed": rate / allowed if len(groups[0]) == 1 else None,
    }  # fmt: skip


def _allowed(costs: RowCosts, places: Sequence[tuple[int, int]]) -> float:
    """Tokens per second of the best fixed length of synchronous blocks."""
    shares = [right / tried for tried, right in places if tried >= _FEW]
    shares += [min(shares, default=0.0)] * (8 - len(shares))
    survive = [0.0, *accumulate(shares, mul)]
    rates: list[float] = [(1 + sum(survive[: k + 1])) / (k * costs.draft + costs.latency(k + 1)) for k in range(9)]
    return max(rates)


def _run(llm: LLM, prompts: Sequence[list[int]], temperature: float, tokens: int) -> tuple[float, list[list[int]]]:
    """All at once: tokens per second while all of them decode, and what they gave."""
    params = [SamplingParams(tokens, temperature, seed=i, ignore_eos=True) for i in range(len(prompts))]
    began = time.monotonic()
    requests = [llm.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    submitted = [time.monotonic() - began for _ in requests]
    outputs = [request.result() for request in requests]
    times = [[at + each for each in out.token_times] for at, out in zip(submitted, outputs, strict=True)]
    first, last = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(first < at <= last for each in times for at in each) / (last - first), [o.token_ids for o in outputs]


if __name__ == "__main__":
    main()
