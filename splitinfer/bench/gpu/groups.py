"""Two groups of sequences on two stages: each stage computes for one group while the other computes for the other.

The stages are processes of this machine. On one card they share it, so a stage's step contains waiting for the other's,
and two stages are no faster than one: what can be compared is launching ahead with not doing so, and how long results
wait. On the emulated accelerator each stage has a device of its own.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from splitinfer.bench.gpu.models import distribution, halves, model_folder
from splitinfer.bench.shared.measure import Run
from splitinfer.bench.shared.systems import Stages
from splitinfer.bench.shared.throughput import BatchRun, step_seconds
from splitinfer.bench.shared.workload import Workload
from splitinfer.engine.device.late_steps import LATE_STEPS
from splitinfer.jobs.process import Report
from splitinfer.llm import LLM, Settings
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu

_PROMPT = 32  # tokens
_NOTE = "both stages share one device: a step's time contains waiting for the other stage's"


def measure(options: Mapping[str, Any], report: Report) -> None:
    """One stream and two groups of ``streams`` sequences, on the model's halves."""
    shape, streams, tokens = options["shape"], options["streams"], options["tokens"]
    layout = halves(model_folder(options["folder"], shape), shape["layers"])
    work = Workload(1, 1, tokens, shape["vocab"], 1, (streams,), _PROMPT, tokens)
    settings = Settings(context=2 * _PROMPT + tokens, draft="none", prefix_cache=False, rejoin_timeout=0.0)
    with LLM(layout, settings=settings) as llm:
        stages = Stages("two stages", llm)
        stages.run(work.warm_up("decode"))
        report("one stream", _one_stream(stages.run(work.task("decode", 0))))
        stages.run_batch(work.batch(streams, -1, 2))
        report(f"2 x {streams}", _groups(stages.run_batch(work.batch(streams, 0, 2)), streams))
    if emulated_machine() is not None:
        report("late_steps", {"late": LATE_STEPS.late, "of": LATE_STEPS.steps})
    if on_gpu():
        report("note", _NOTE)


def _one_stream(run: Run) -> dict[str, Any]:
    gaps = [later - earlier for earlier, later in itertools.pairwise(run.token_times[1:])]
    return {"token_ms": distribution([gap * 1e3 for gap in gaps])}


def _groups(run: BatchRun, streams: int) -> dict[str, Any]:
    """``ideal_tokens_per_second``: if the slower stage never waited."""
    run.check()
    assert run.window is not None
    seconds = step_seconds(run.window)
    ideal = streams / max(seconds)
    return {
        "tokens_per_second": run.tokens_per_second,
        "ideal_tokens_per_second": ideal,
        "share_of_ideal": run.tokens_per_second / ideal,
        "token_ms": distribution([gap * 1e3 for gap in run.itl]),
        "step_ms": [1e3 * one for one in seconds],
    }
