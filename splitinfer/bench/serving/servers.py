"""Serves requests that arrive over time: by the live pipeline or by mlx-lm's batch generator.

Both return a ``Served`` for each request, on a clock that starts with the run, as the simulation does: the same
figures can be computed for all.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitinfer.bench.shared.mlx_lm import PlainMlxLm
from splitinfer.bench.shared.systems import whole
from splitinfer.bench.shared.workload import made_up
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM, Request
from splitinfer.sim.simulator import Served
from splitinfer.sim.workload import Arrival


@dataclass(frozen=True, slots=True)
class Job:
    """One request. ``at``: seconds from the start of the run to its arrival."""

    at: float
    prompt: tuple[int, ...]
    max_tokens: int


def jobs_of(arrivals: Sequence[Arrival], vocab_size: int, seed: int) -> tuple[Job, ...]:
    """Prompts of made-up tokens for some arrivals; the same for every system."""
    return tuple(
        Job(one.at, made_up(f"{seed} serve {i}", one.num_prompt_tokens, vocab_size), one.num_output_tokens)
        for i, one in enumerate(arrivals)
    )


def serve_live(
    llm: LLM, serving_options: Mapping[str, object], jobs: Sequence[Job], until: int | None = None
) -> list[Served]:
    """Run all jobs on the pipeline, each from its arrival; token times are the engine's.

    ``serving_options``: those to change before; they stay changed. ``until``: the index of the job after whose end
    every other one gets one more token and is ended.
    """
    llm.tune(**serving_options)
    start, requests = time.monotonic(), list[Request]()
    try:
        for job in jobs:
            time.sleep(max(0.0, start + job.at - time.monotonic()))
            params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
            requests.append(llm.submit(job.prompt, params))
        if until is not None:
            _end_after(requests, jobs, until)
        outputs = [whole(request.result()) for request in requests]
    except BaseException:
        for request in requests:
            request.abort()
        raise
    return [
        Served(job.at, [job.at + t for t in output.token_times], output.queue_seconds)
        for job, output in zip(jobs, outputs, strict=True)
    ]


def _end_after(requests: Sequence[Request], jobs: Sequence[Job], until: int) -> None:
    over = jobs[until].at + requests[until].result().token_times[-1]
    for request, job in zip(requests, jobs, strict=True):
        for _ in request:  # leaving early aborts it
            if job.at + request.output.token_times[-1] > over:
                break


def serve_batch(plain: PlainMlxLm, jobs: Sequence[Job], until: int | None = None) -> list[Served]:
    """Run all jobs in mlx-lm's batch generator, each from its arrival; token times are the process's."""
    times = plain.serve([(job.at, job.prompt, job.max_tokens) for job in jobs], until)
    return [Served(job.at, each) for job, each in zip(jobs, times, strict=True)]
