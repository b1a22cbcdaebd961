"""The systems of a comparison: what each of them does for a part.

A system answers ``do(part, trial)`` with a cell. ``answers`` keeps, by part, the answers that are to be judged.
"""

import os
import signal
from collections.abc import Callable, Mapping
from itertools import pairwise

from splitinfer.bench.compare.work import Cell, Kind, Part, Tasks
from splitinfer.bench.shared import machine
from splitinfer.bench.shared.measure import Run, causes, prefill_share
from splitinfer.bench.shared.mlx_lm import MlxLmProcesses, PlainMlxLm
from splitinfer.bench.shared.systems import Stages, whole
from splitinfer.bench.shared.throughput import BatchRun, step_seconds
from splitinfer.bench.shared.workload import Batch, Task
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF
from splitinfer.llm import LLM, Request

PIPELINE, PLAIN = "splitinfer", "mlx-lm on one machine"
BY_LAYERS, PARALLEL = "mlx-lm's pipeline", "mlx-lm in tensor parallel"
_DRAFTS = 3  # of mlx-lm at a time
_SHARE = 3  # of an answer after which a worker is killed
_NOT_THERE = {
    Kind.DRAFTS: "no draft model there",
    Kind.TURN: "it keeps no KV between requests there",
    Kind.RESTART: "it keeps no KV on disk",
    Kind.KILLED: "it ends with any of its processes",
}

Does = Mapping[Kind, Callable[[Part, int], Cell]]
Answers = dict[str, tuple[int, ...]]


class System:
    """A column of the table."""

    name: str

    def __init__(self, tasks: Tasks, answers: Answers) -> None:
        self.tasks, self.answers = tasks, answers
        self.does: Does = {}

    def do(self, part: Part, trial: int) -> Cell:
        """Measure a part once.

        Raises:
            SplitinferError: it failed.
        """
        does = self.does.get(part.kind)
        return does(part, trial) if does else Cell(why_not=_NOT_THERE.get(part.kind, "not measured there"))

    def kept(self, part: Part, run: Run) -> Run:
        """Keep an answer, to be judged."""
        self.answers.setdefault(part.name, run.token_ids)
        return run


class Pipeline(System):
    """The pipeline of a layout."""

    name = PIPELINE

    def __init__(self, tasks: Tasks, answers: Answers, llm: LLM, chunk: int) -> None:
        super().__init__(tasks, answers)
        self._llm, self._chunk, self._stages = llm, chunk, Stages(PIPELINE, llm)
        self.does = {
            Kind.STREAM: self._stream, Kind.DRAFTS: self._drafts, Kind.STREAMS: self._streams,
            Kind.PROMPT: self._prompt, Kind.TURN: self._turn, Kind.RESTART: self._turn, Kind.KILLED: self._killed,
        }  # fmt: skip

    def _stream(self, part: Part, _: int) -> Cell:
        run = self.kept(part, self._stages.run(self.tasks.task(part), OFF))
        assert run.spent is not None
        computing = sum(causes(run.spent, run.counted_seconds_per_token).compute)
        return Cell([1 / run.seconds_per_token], 1 / computing)

    def _drafts(self, part: Part, _: int) -> Cell:
        if self._llm.layout.draft is None:
            return Cell(why_not="the layout has no draft")
        run = self.kept(part, self._stages.run(self.tasks.task(part)))
        return Cell([1 / run.seconds_per_token])

    def _streams(self, part: Part, trial: int) -> Cell:
        run = self._stages.run_batch(self.tasks.batch(part, trial))
        assert run.window is not None
        rows = part.sequences / self._stages.num_stages  # of a step, where as many groups as stages take turns
        return Cell([_rate(run)], rows / max(step_seconds(run.window)))

    def _prompt(self, part: Part, _: int) -> Cell:
        """The prompt is read for one token, and then answered from the KV that is kept of it: so what reading it alone
        computes is known, and it is read once."""
        task = self.tasks.task(part)
        reading = self._stages.run(Task("prefill", 0, task.prompt, 1), OFF)
        run = self.kept(part, self._stages.run(task, OFF))
        assert reading.spent is not None
        share = prefill_share(-(-part.prompt // self._chunk), self._stages.num_stages)
        return Cell([reading.ttft], share * sum(reading.spent.busy), said=self.needle(part, run))

    def needle(self, part: Part, run: Run) -> str:
        """Whether the answer has the needle."""
        if part.name not in self.tasks.needles:
            return ""
        said = self._llm.tokenizer.decode(run.token_ids)
        return "needle found" if self.tasks.needles[part.name] in said else "needle not found"

    def _turn(self, part: Part, _: int) -> Cell:
        """A second turn after the answer to the part's prompt, which was given before."""
        first = self.answers.get(_first_prompt(part))
        if first is None:
            return Cell(why_not="the prompt before it was not measured")
        turn = [*self.tasks.prompts[part.name], *first, *self.tasks.second(part.name)]
        output = whole(self._llm.generate([turn], SamplingParams(max_tokens=part.tokens, ignore_eos=True))[0])
        return Cell(
            [output.token_times[0]], said=f"{output.num_cached_tokens:,} of {len(turn):,} tokens of KV were kept"
        )

    def _killed(self, part: Part, _: int) -> Cell:
        """The longest gap of an answer in which the last worker is killed, once it is the undisturbed one."""
        workers = machine.local_workers()
        last = self._llm.layout.stages[-1].name
        if last not in workers:
            return Cell(why_not="the last stage's worker is not on this machine: pull its cable yourself")
        params = SamplingParams(max_tokens=part.tokens, ignore_eos=True)
        prompt = list(self.tasks.prompts[part.name])
        undisturbed = self._llm.generate([prompt], params)[0].token_ids
        request = self._llm.submit(prompt, params)
        self._kill_within(request, workers[last], part.tokens // _SHARE)
        output = whole(request.output)
        same = "the same tokens" if output.token_ids == undisturbed else "other tokens than undisturbed"
        return Cell([max(b - a for a, b in pairwise(output.token_times))], said=same)

    def _kill_within(self, request: Request, pid: int, after: int) -> None:
        for _ in request:
            if after and len(request.output.token_ids) >= after:
                os.kill(pid, signal.SIGKILL)
                after = 0


class Plain(System):
    """Plain mlx-lm in one process."""

    name = PLAIN

    def __init__(self, tasks: Tasks, answers: Answers, plain: PlainMlxLm, *, drafts: bool) -> None:
        super().__init__(tasks, answers)
        self._plain = plain
        self.does = {
            Kind.STREAM: lambda part, _: Cell([1 / self.kept(part, self._run(part)).seconds_per_token]),
            Kind.PROMPT: lambda part, _: Cell([self.kept(part, self._run(part)).ttft]),
            Kind.STREAMS: lambda part, trial: Cell([_rate(plain.run_batch(tasks.batch(part, trial)))]),
            Kind.TURN: self._turn,
            **({Kind.DRAFTS: self._drafts} if drafts else {}),
        }

    def _run(self, part: Part) -> Run:
        return self._plain.run(self.tasks.task(part))

    def _drafts(self, part: Part, _: int) -> Cell:
        run = self._plain.run(self.tasks.task(part), num_draft=_DRAFTS)
        return Cell([1 / self.kept(part, run).seconds_per_token], said=f"{_DRAFTS} drafts at a time")

    def _turn(self, part: Part, _: int) -> Cell:
        run = self._plain.run(self.tasks.task(part), then=self.tasks.second(part.name))
        return Cell([run.ttft], said="its prompt cache kept in its process")


class Peers(System):
    """mlx-lm in as many processes as the layout has stages."""

    def __init__(self, name: str, tasks: Tasks, answers: Answers, peers: MlxLmProcesses) -> None:
        super().__init__(tasks, answers)
        self.name, self._peers = name, peers
        self.does = {
            Kind.STREAM: lambda part, _: Cell([1 / self.kept(part, self._run(part)).seconds_per_token]),
            Kind.PROMPT: lambda part, _: Cell([self.kept(part, self._run(part)).ttft]),
            Kind.STREAMS: lambda part, trial: Cell([_rate(peers.run_batch(tasks.batch(part, trial)))]),
        }

    def _run(self, part: Part) -> Run:
        task = self.tasks.task(part)
        run = self._peers.run_batch(Batch(1, 0, (task.prompt,), task.max_tokens))
        return Run(run.token_ids[0], run.token_times[0])


def _rate(run: BatchRun) -> float:
    run.check()
    return run.tokens_per_second


def _first_prompt(part: Part) -> str:
    """The name of the part whose answer a second turn follows."""
    return Part(Kind.PROMPT, part.prompt, part.tokens).name
