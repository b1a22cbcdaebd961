"""The systems that run the tasks: an ``LLM``, plain mlx-lm in a child process, and mlx-lm's own pipeline."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.graph_size import GraphSize, counted, usual
from splitinfer.bench.shared.measure import Counters, Run
from splitinfer.bench.shared.mlx_lm_pipeline import MlxLmProcesses
from splitinfer.bench.shared.throughput import BEGINS_AT, BatchRun
from splitinfer.bench.shared.workload import Batch, Kind, Task
from splitinfer.console import errors
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ModelError, WorkerLost
from splitinfer.llm import LLM, Request
from splitinfer.models.checkpoint import Checkpoint


class System(Protocol):
    """A system under measurement: one column of the table.

    does: the kinds of single-stream task that it runs.
    num_stages: its stages in a throughput; 0 if it runs none.
    """

    name: str
    does: tuple[Kind, ...]
    num_stages: int

    def run(self, task: Task) -> Run:
        """Run one task; the machine is idle again when this returns."""
        ...

    def run_batch(self, batch: Batch) -> BatchRun:
        """Run many sequences at once."""
        ...

    def count_nodes(self, batch: Batch) -> GraphSize | None:
        """The graph size of one step of ``batch.streams`` sequences, where it can be counted."""
        ...


class Stages:
    """An ``LLM`` of any number of stages."""

    does: tuple[Kind, ...] = ("decode", "prefill")

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self.llm, self.num_stages = name, llm, llm.layout.num_stages

    def run(self, task: Task) -> Run:
        """Run one request, and read the counters around it."""
        params = SamplingParams(max_tokens=task.max_tokens, ignore_eos=True)
        readings = [Counters.of(self.llm.stats())]
        marks = (
            [1] if task.max_tokens == 1 else [1, task.max_tokens - 1]
        )  # numbers of tokens at which the counters are read
        request = self.llm.submit(task.prompt, params)
        for _ in request:
            if marks and len(request.output.token_ids) >= marks[0]:
                marks.pop(0)
                readings.append(Counters.of(self.llm.stats()))
        output = request.output
        if output.error is not None:
            raise WorkerLost(output.error)
        return Run(tuple(output.token_ids), tuple(output.token_times), readings[-1] - readings[-2])

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

    def count_nodes(self, batch: Batch) -> GraphSize | None:
        """The graph size on the first stage, which is in this process."""
        with counted(batch.streams) as found:
            self.run_batch(batch)
        return usual(found)


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
        if request.output.error is not None:
            raise WorkerLost(request.output.error)
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


class PlainMlxLm:
    """mlx-lm's own loops on the whole model, in a child process that sleeps between tasks."""

    def __init__(
        self,
        folder: str,
        dtype: str | None,
        environment: Mapping[str, str] | None = None,
        draft: str | None = None,
    ) -> None:
        self._child = ChildProcess("splitinfer.bench.shared.mlx_lm_process", environment)
        try:
            self.is_on: dict[str, Any] = self._ask({"folder": folder, "dtype": dtype, "draft": draft})
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def run(self, task: Task, step_size: int) -> Run:
        """Run one task, with ``step_size`` prompt tokens at once."""
        options = {"prompt": task.prompt, "max_tokens": task.max_tokens, "step_size": step_size}
        answer = self._ask(options)
        return Run(tuple(answer["token_ids"]), tuple(answer["token_times"]))

    def run_with_drafts(self, task: Task, num_drafts: int) -> Run:
        """Run one task by mlx-lm's own speculative decoding, with ``num_drafts`` drafts at a time."""
        answer = self._ask({"prompt": task.prompt, "max_tokens": task.max_tokens, "num_draft": num_drafts})
        return Run(tuple(answer["token_ids"]), tuple(answer["token_times"]))

    def run_batch(self, batch: Batch) -> BatchRun:
        """Run many sequences at once in the batch generator."""
        answer = self._ask({"prompts": batch.prompts, "max_tokens": batch.max_tokens})
        return BatchRun(_rows(answer["token_ids"]), _rows(answer["token_times"]))

    def serve(self, jobs: Sequence[tuple[float, Sequence[int], int]], until: int | None) -> list[list[float]]:
        """Serve requests that arrive over time, in the batch generator.

        ``jobs``: arrival in seconds, prompt, and number of tokens. ``until``: the index of the job after whose end
        every other one gets one more token and is ended. Returns the seconds of each token from the start.
        """
        times: list[list[float]] = self._ask({"jobs": jobs, "until": until})["token_times"]
        return times

    def count_nodes(self, batch: Batch) -> GraphSize | None:
        """The graph size of the batch generator's call of the model."""
        answer = self._ask({"prompts": batch.prompts, "max_tokens": batch.max_tokens, "count": True})
        return GraphSize(**answer) if answer else None

    def _ask(self, options: dict[str, Any]) -> dict[str, Any]:
        self._child.send(options)
        try:
            return self._child.receive()
        except ModelError as error:
            raise ModelError(
                f"plain mlx-lm cannot run this model here ({error}); --no-baseline leaves it out"
            ) from None

    def close(self) -> None:
        """End the child process."""
        self._child.close()


@contextmanager
def plain_mlx_lm(folder: str, dtype: str | None, environment: Mapping[str, str] | None = None) -> Iterator[PlainMlxLm]:
    """The whole model in a process of its own, which ends with the context."""
    errors.print("loading the whole model in plain mlx-lm", soft_wrap=True)
    plain = PlainMlxLm(folder, dtype, environment)
    try:
        yield plain
    finally:
        plain.close()


class Baseline:
    """Plain mlx-lm at one step size. ``num_stages``: 1 if it runs throughputs, else 0."""

    def __init__(self, name: str, plain: PlainMlxLm, step_size: int, does: tuple[Kind, ...], num_stages: int) -> None:
        self.name, self.plain, self.step_size, self.does, self.num_stages = name, plain, step_size, does, num_stages

    def run(self, task: Task) -> Run:
        """Run one task in the child process."""
        return self.plain.run(task, self.step_size)

    def run_batch(self, batch: Batch) -> BatchRun:
        """Run many sequences at once in the child process."""
        return self.plain.run_batch(batch)

    def count_nodes(self, batch: Batch) -> GraphSize | None:
        """The graph size of its call of the model."""
        return self.plain.count_nodes(batch)


class MlxLmPipeline:
    """mlx-lm's own pipeline, which only runs throughputs."""

    does: tuple[Kind, ...] = ()

    def __init__(self, name: str, peers: MlxLmProcesses, num_stages: int) -> None:
        self.name, self.peers, self.num_stages = name, peers, num_stages

    def run(self, task: Task) -> Run:
        """Not supported."""
        raise NotImplementedError(task.kind)

    def run_batch(self, batch: Batch) -> BatchRun:
        """Run many sequences at once in all its processes."""
        return self.peers.run(batch)

    def count_nodes(self, batch: Batch) -> GraphSize | None:
        """Not counted."""
        return None


def vocabulary(llm: LLM, checkpoint: Checkpoint) -> int:
    """The number of token ids that both the model and its tokenizer have, for random prompts."""
    text = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    sizes = [text.get("vocab_size"), llm.tokenizer.vocab_size if llm.tokenizer else None]
    return min((size for size in sizes if size is not None), default=2)


def _rows(lists: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(each) for each in lists)
