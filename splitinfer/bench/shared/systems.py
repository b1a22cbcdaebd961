"""The systems that run the tasks: an ``LLM``, plain mlx-lm in a child process, and mlx-lm's own pipeline."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from splitinfer.bench.shared.measure import Counters, Run
from splitinfer.bench.shared.mlx_lm import MlxLmProcesses, PlainMlxLm
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import say
from splitinfer.bench.shared.throughput import BEGINS_AT, BatchRun
from splitinfer.bench.shared.workload import Batch, Kind, Task
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.engine.coordinator.requests import RequestOutput
from splitinfer.errors import WorkerLost
from splitinfer.llm import LLM, Request, Settings
from splitinfer.models.checkpoint import Checkpoint


def open_stages(stack: ExitStack, options: Options, settings: Settings, what: str = "", **more: Any) -> LLM:
    """The layout's stages, until the stack ends."""
    say(f"loading the stages{what}")
    return stack.enter_context(LLM(options.layout, model=options.model, settings=settings, **more))


def whole(output: RequestOutput) -> RequestOutput:
    """An output that has ended.

    Raises:
        WorkerLost: it lacks a part of its answer.
    """
    if output.error is not None:
        raise WorkerLost(output.error)
    return output


def together(requests: Sequence[tuple[float, Request]]) -> BatchRun:
    """Wait for requests, each with the seconds at which it was submitted; times are the engine's."""
    outputs = [(at, whole(request.result())) for at, request in requests]
    return BatchRun(
        tuple(tuple(output.token_ids) for _, output in outputs),
        tuple(tuple(at + each for each in output.token_times) for at, output in outputs),
    )


def plain_layout(llm: LLM) -> dict[str, Any]:
    """A pipeline's cut, for a document."""
    return {"name": llm.layout.name, "layers": [stage.num_layers for stage in llm.layout.stages]}


class Stages:
    """An ``LLM`` of any number of stages."""

    does: tuple[Kind, ...] = ("decode", "prefill")

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self.llm, self.num_stages = name, llm, llm.layout.num_stages

    def run(self, task: Task, flight: Flight | None = None) -> Run:
        """Run one request, and read the counters around it. ``flight``: of its drafts."""
        params = SamplingParams(max_tokens=task.max_tokens, ignore_eos=True)
        readings = [Counters.of(self.llm.stats())]
        marks = [1] if task.max_tokens == 1 else [1, task.max_tokens - 1]  # numbers of tokens at which to read
        request = self.llm.submit(task.prompt, params, flight=flight)
        for _ in request:
            if marks and len(request.output.token_ids) >= marks[0]:
                marks.pop(0)
                readings.append(Counters.of(self.llm.stats()))
        output = whole(request.output)
        spent, before = readings[-1] - readings[-2], (readings[-2] - readings[0]).tokens
        return Run(tuple(output.token_ids), tuple(output.token_times), spent, before)

    def run_batch(self, batch: Batch) -> BatchRun:
        """Run a request for each prompt, each with a reader of its own, as a server has."""
        params = SamplingParams(max_tokens=batch.max_tokens, ignore_eos=True)
        window = _WindowReader(self.llm, len(batch.prompts))
        start = time.monotonic()
        requests = [self.llm.submit(prompt, params) for prompt in batch.prompts]
        with ThreadPoolExecutor(len(requests)) as readers:
            try:
                token_times = list(readers.map(window.read, requests))
            except BaseException:  # usually Ctrl-C: the readers would wait for the rest of the answers
                for request in requests:
                    request.abort()
                raise
        return BatchRun(
            tuple(tuple(request.output.token_ids) for request in requests),
            tuple(tuple(at - start for at in times) for times in token_times),
            window.stats,
        )


class _WindowReader:
    """Reads many requests, and the statistics of the window in which all of them decode."""

    def __init__(self, llm: LLM, num_requests: int) -> None:
        self._llm, self._to_begin = llm, num_requests
        self._lock = threading.Lock()
        self.stats: Mapping[str, Any] | None = None

    def read(self, request: Request) -> list[float]:
        """Read one request to its end; the monotonic time at which each of its tokens was read."""
        times: list[float] = []
        for _ in request:
            now, before = time.monotonic(), len(times)
            times += [now] * (len(request.output.token_ids) - before)
            if before < BEGINS_AT <= len(times):
                self._begins()
        whole(request.output)
        self._ends()
        return times

    def _begins(self) -> None:
        with self._lock:
            self._to_begin -= 1
            if self._to_begin == 0:
                self._llm.stats(reset=True)

    def _ends(self) -> None:
        with self._lock:
            if self.stats is None:
                self.stats = self._llm.stats()["window"]


@dataclass(frozen=True, slots=True)
class Baseline:
    """mlx-lm. ``does``: the kinds of task of one stream that it runs. ``num_stages``: its stages in a throughput; 0:
    it runs none."""

    name: str
    mlx_lm: PlainMlxLm | MlxLmProcesses
    step_size: int
    does: tuple[Kind, ...]
    num_stages: int

    def run(self, task: Task) -> Run:
        """Run one task in the child process."""
        assert isinstance(self.mlx_lm, PlainMlxLm)
        return self.mlx_lm.run(task, self.step_size)

    def run_batch(self, batch: Batch) -> BatchRun:
        """Run many sequences at once."""
        return self.mlx_lm.run_batch(batch)


System = Stages | Baseline
"""A system under measurement: one column of the table. The machine is idle again when its ``run`` returns."""


def vocabulary(llm: LLM, checkpoint: Checkpoint) -> int:
    """The number of token ids that both the model and its tokenizer have, for random prompts."""
    sizes = [checkpoint.vocab_size, llm.tokenizer.vocab_size if llm.has_tokenizer else None]
    return min((size for size in sizes if size is not None), default=2)
