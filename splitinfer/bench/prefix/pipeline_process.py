"""One run of a pipeline, from start to end of all its processes: ``python -m
splitinfer.bench.prefix.pipeline_process``.

One JSON line in, one out. The first line says what to open, each further one is a task; the end of standard input ends
the pipeline.

    {"layout": ..., "model": ..., "kv_dir": ..., "context": ..., "token_budget": ...} -> {"pinned": ...}
    {"prompts": [[...], ...], "max_tokens": 8}
        -> {"token_ids": [[...], ...], "token_times": [[...], ...], "cached": [...], "stats": ...}
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import own_output, serve_commands
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM, Settings


def main() -> None:
    """Serve tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    answers = own_output()
    options = json.loads(sys.stdin.readline())
    processors = machine.free_processors()
    settings = Settings(
        context=options["context"],
        token_budget=options["token_budget"],
        kv_dir=None if options["kv_dir"] is None else Path(options["kv_dir"]),
        rejoin_timeout=0.0,
    )
    with LLM(options["layout"], model=options["model"], settings=settings) as llm:
        here = {llm.layout.stages[0].name: os.getpid(), **machine.local_workers()}
        pinned = machine.assign(llm.layout.stages, processors)
        machine.pin_all(here, pinned)
        answers.write(json.dumps({"pinned": pinned}) + "\n")
        answers.flush()
        serve_commands(answers, lambda task: run(llm, task))


def run(llm: LLM, task: Mapping[str, Any]) -> dict[str, Any]:
    """Generate greedy answers to all prompts of a task at once."""
    params = SamplingParams(max_tokens=task["max_tokens"], ignore_eos=True)
    outs = llm.generate(task["prompts"], params)
    return {
        "token_ids": [out.token_ids for out in outs],
        "token_times": [out.token_times for out in outs],
        "cached": [out.num_cached_tokens for out in outs],
        "stats": llm.stats(),
    }


if __name__ == "__main__":
    main()
