"""Those who run the tasks, each in its own way: an ``LLM``, or plain mlx-lm in a child process."""

import json
import subprocess
import sys
import tempfile
from typing import Any, Protocol

from splitinfer.bench.measure import Counters, Run
from splitinfer.bench.workload import Kind, Task
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ModelError, WorkerLost
from splitinfer.llm import LLM

_GRACE = 5.0  # seconds for the child to end by itself


class Contender(Protocol):
    """One column of the table. ``does``: the kinds of task it takes part in."""

    name: str
    does: tuple[Kind, ...]

    def run(self, task: Task) -> Run:
        """Do one task; the machine is idle again when this returns."""
        ...


class Stages:
    """An ``LLM``, of any number of stages."""

    does: tuple[Kind, ...] = ("decode", "prefill")

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self.llm = name, llm

    def run(self, task: Task) -> Run:
        """One request, read as it comes."""
        params = SamplingParams(max_tokens=task.max_tokens, ignore_eos=True)
        readings = [Counters.of(self.llm.stats())]
        marks = [1] if task.max_tokens == 1 else [1, task.max_tokens - 1]  # tokens there when the counters are read
        request = self.llm.submit(task.prompt, params)
        for _ in request:
            if marks and len(request.output.token_ids) >= marks[0]:
                marks.pop(0)
                readings.append(Counters.of(self.llm.stats()))
        output = request.output
        if output.error is not None:
            raise WorkerLost(output.error)
        return Run(tuple(output.token_ids), tuple(output.token_times), readings[-1] - readings[-2])


class PlainMlxLm:
    """mlx-lm's own loop on the whole model, in a child process that sleeps between tasks."""

    def __init__(self, folder: str, dtype: str | None) -> None:
        self._log = tempfile.TemporaryFile("w+", prefix="splitinfer-baseline-")  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "splitinfer.bench.baseline"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True, text=True,
        )  # fmt: skip
        try:
            self.is_on: dict[str, Any] = self._ask({"folder": folder, "dtype": dtype})
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def run(self, task: Task, step_size: int) -> Run:
        """One task, with so many prompt tokens at once."""
        order = {"prompt": task.prompt, "max_tokens": task.max_tokens, "step_size": step_size}
        answer = self._ask(order)
        return Run(tuple(answer["token_ids"]), tuple(answer["token_times"]))

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer
        except (OSError, ValueError):
            raise ModelError(
                f"plain mlx-lm cannot run this model here ({self._last_words()}); --no-baseline leaves it out"
            ) from None

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=_GRACE)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


class Baseline:
    """Plain mlx-lm at one step size."""

    def __init__(self, name: str, plain: PlainMlxLm, step_size: int, does: tuple[Kind, ...]) -> None:
        self.name, self.plain, self.step_size, self.does = name, plain, step_size, does

    def run(self, task: Task) -> Run:
        """One task, in the child process."""
        return self.plain.run(task, self.step_size)
