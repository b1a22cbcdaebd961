"""What a wrong draft costs: ``python -m tests.campaigns.wrong_drafts``.

A dense and a gated-delta model of random weights on an emulated machine, with an EAGLE-3 drafter on the last stage of
which no draft is right. ``steps``: for each token; a draft that cost a step would make it two. ``of none``: a token's
time with so many wrong drafts by that without any, which is the rows' and the drafts' alone; the dense model, whose KV
is simply cut, says what that is.
"""

import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

import tiny
from stages import prompt
from trained import save_eagle3

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.llm import LLM
from splitinfer.machine.selection import VARIABLE

LAYERS, NEVER, TOKENS, DRAFTS = 12, 77, 40, (0, 1, 3, 7)
CUTS = ([12], [7, 5], [4, 4, 4])


def main() -> None:
    """Print a line for each model, cut and number of drafts."""
    os.environ[VARIABLE] = "each-layer"
    for name in ("llama", "qwen3_next"):
        with tempfile.TemporaryDirectory() as folder:
            model = tiny.save(Path(folder) / name, name, num_hidden_layers=LAYERS)
            drafter = save_eagle3(Path(folder) / "drafter", only=NEVER, leaving=(2, 6, 9))
            for cut in CUTS:
                stages = [
                    {"name": f"s{i}", "layers": n} | ({"address": "local"} if i else {}) for i, n in enumerate(cut)
                ]
                with LLM({"model": str(model), "draft": str(drafter), "stages": stages}) as llm:
                    _measure(llm, name, cut)


def _measure(llm: LLM, name: str, cut: list[int]) -> None:
    params = SamplingParams(TOKENS, ignore_eos=True, logit_bias=((NEVER, -100.0),))
    llm.submit(prompt(20), params, flight=Flight(3)).result()
    none, expected = 0.0, list[int]()
    for count in DRAFTS:
        before = llm.stats()["stages"][-1]["steps"]
        out = llm.submit(prompt(20), params, flight=Flight(count)).result()
        took = statistics.median(later - at for at, later in pairwise(out.token_times))
        none, expected = none or took, expected or out.token_ids
        steps = (llm.stats()["stages"][-1]["steps"] - before) / TOKENS
        row = {"model": name, "cut": cut, "wrong_drafts": count, "steps": steps, "ms": round(1000 * took, 2),
               "of none": round(took / none, 3), "same": out.token_ids == expected,
               "right": llm.stats()["speculation"]["accepted"]}  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
