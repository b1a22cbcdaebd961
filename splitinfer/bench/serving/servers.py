"""Serves requests that arrive over time: by the live pipeline or by mlx-lm's batch generator.

Each server returns a ``Served`` for each request, on a clock that starts with the run, as the simulation does: the same
figures can be computed for all.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from splitinfer.bench.shared.mlx_lm import PlainMlxLm
from splitinfer.bench.shared.workload import made_up
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import WorkerLost
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


class Server(Protocol):
    """A system that serves requests."""

    def serve(self, jobs: Sequence[Job], until: int | None = None) -> list[Served]:
        """Run all jobs, each from its arrival. ``until``: the index of the job after whose end every other one gets one
        more token and is ended."""
        ...


class LiveServer:
    """The pipeline with some serving options changed; they stay changed."""

    def __init__(self, llm: LLM, **serving_options: object) -> None:
        self._llm, self._serving_options = llm, serving_options

    def serve(self, jobs: Sequence[Job], until: int | None = None) -> list[Served]:
        """Submit each job at its arrival; token times are the engine's."""
        self._llm.tune(**self._serving_options)
        start, requests = time.monotonic(), list[Request]()
        try:
            for job in jobs:
                time.sleep(max(0.0, start + job.at - time.monotonic()))
                params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
                requests.append(self._llm.submit(job.prompt, params))
            if until is not None:
                self._end_after(requests, jobs, until)
            outputs = [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.abort()
            raise
        lost = next((output.error for output in outputs if output.error is not None), None)
        if lost is not None:
            raise WorkerLost(lost)
        return [
            Served(job.at, len(job.prompt), [job.at + t for t in output.token_times], output.queue_seconds)
            for job, output in zip(jobs, outputs, strict=True)
        ]

    def _end_after(self, requests: Sequence[Request], jobs: Sequence[Job], until: int) -> None:
        over = jobs[until].at + requests[until].result().token_times[-1]
        for request, job in zip(requests, jobs, strict=True):
            for _ in request:  # leaving early aborts it
                if job.at + request.output.token_times[-1] > over:
                    break


class BatchServer:
    """mlx-lm's batch generator in one process, which gets each prompt at its arrival."""

    def __init__(self, plain: PlainMlxLm) -> None:
        self._plain = plain

    def serve(self, jobs: Sequence[Job], until: int | None = None) -> list[Served]:
        """Run the jobs in the child process; token times are the child's."""
        times = self._plain.serve([(job.at, job.prompt, job.max_tokens) for job in jobs], until)
        return [Served(job.at, len(job.prompt), each) for job, each in zip(jobs, times, strict=True)]
