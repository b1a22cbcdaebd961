"""The measured systems, and how each of them does a part.

A system answers ``do(part, trial)`` with a cell, and the machine is idle again when it returns. ``answers`` keeps, by
part, the answers for judging.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from splitinfer.bench.figures import BEGINS_AT, Run, prefill_share, throughput
from splitinfer.bench.mlx_lm import MlxLm
from splitinfer.bench.options import Options
from splitinfer.bench.parts import DRAFTS, PROMPT, STREAM, STREAMS, TURN, Cell, Part, Tasks, prompt_part
from splitinfer.console import say
from splitinfer.core.layout import Layout
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.engine.loop.requests import RequestOutput
from splitinfer.errors import WorkerLost
from splitinfer.llm import LLM, Request, Settings
from splitinfer.models.folder.checkpoint import Checkpoint

PIPELINE, PLAIN = "splitinfer", "mlx-lm on one machine"
NO_DRAFT, EMULATED = "the layout has no draft", "the accelerator is emulated for splitinfer only"
_DRAFTS = 3  # mlx-lm's drafts at a time

Does = Mapping[str, Callable[[Part, int], Cell]]
Answers = dict[str, tuple[int, ...]]


def open_stages(
    stack: ExitStack, options: Options, settings: Settings, what: str = "", layout: Layout | None = None
) -> LLM:
    """Open the stages of ``layout``, or of the options' layout, until the stack ends."""
    say(f"loading the stages{what}")
    return stack.enter_context(LLM(layout or options.layout, model=options.model, settings=settings))


def whole(output: RequestOutput) -> RequestOutput:
    """Check that an output is complete, and return it.

    Raises:
        WorkerLost: a part of the answer is missing.
    """
    if output.error is not None:
        raise WorkerLost(output.error)
    return output


def together(requests: Sequence[Request]) -> list[Run]:
    """Wait for requests that were submitted one after the other. Their times count from the first submission."""
    return [_run(request, request.submitted - requests[0].submitted) for request in requests]


def vocabulary(llm: LLM, checkpoint: Checkpoint) -> int:
    """Return the number of token ids that both the model and its tokenizer have, for random prompts."""
    sizes = [checkpoint.vocab_size, llm.tokenizer.vocab_size if llm.has_tokenizer else None]
    return min((size for size in sizes if size is not None), default=2)


class System:
    """A measured system: a column of the table."""

    name: str
    not_there: ClassVar = {DRAFTS: "no draft model there", TURN: "it keeps no KV between requests there"}
    """Why a system without a kind of part has none."""

    def __init__(self, tasks: Tasks, answers: Answers) -> None:
        self.tasks, self.answers = tasks, answers
        self.does: Does = {}

    def do(self, part: Part, trial: int) -> Cell:
        """Measure a part once.

        Raises:
            SplitinferError: it failed.
        """
        does = self.does.get(part.kind)
        return does(part, trial) if does else Cell(why_not=self.not_there.get(part.kind, "not measured there"))

    def kept(self, part: Part, run: Run) -> Run:
        """Keep an answer for judging, and return it."""
        self.answers.setdefault(part.name, run.token_ids)
        return run


class PipelineSystem(System):
    """The pipeline of a layout. Its limits follow from its stages' computing alone."""

    name = PIPELINE

    def __init__(self, tasks: Tasks, answers: Answers, llm: LLM) -> None:
        super().__init__(tasks, answers)
        self.llm, self._num_stages = llm, llm.layout.num_stages
        self.does = {
            STREAM: self._stream, DRAFTS: self._drafts, STREAMS: self._streams,
            PROMPT: self._prompt, TURN: self.turn,
        }  # fmt: skip

    def submit(self, prompt: Sequence[int], tokens: int, flight: Flight | None = OFF) -> Request:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return self.llm.submit(list(prompt), params, flight=flight, raw=True)

    def _answer(self, part: Part, flight: Flight | None = OFF) -> Run:
        return self.kept(part, _run(self.submit(self.tasks.prompts[part.name], part.tokens, flight)))

    def _stream(self, part: Part, _: int) -> Cell:
        request = self.submit(self.tasks.prompts[part.name], part.tokens)
        steps = self._step_seconds(request, part.tokens)
        return Cell([self.kept(part, _run(request)).tokens_per_second], 1 / sum(steps) if any(steps) else None)

    def _drafts(self, part: Part, _: int) -> Cell:
        if self.llm.layout.draft is None:
            return Cell(why_not=NO_DRAFT)
        return Cell([self._answer(part, None).tokens_per_second])

    def _streams(self, part: Part, trial: int) -> Cell:
        requests = [self.submit(prompt, part.tokens) for prompt in self.tasks.batch(part, trial)]
        steps = self._step_seconds(requests[-1], part.tokens)
        rows = part.sequences / self._num_stages  # of a step, if as many groups as stages take turns
        return Cell([throughput(together(requests))], rows / max(steps) if any(steps) else None)

    def _step_seconds(self, request: Request, tokens: int) -> list[float]:
        """Read a request to its end. Return each stage's computing seconds for one step, between an early token and the
        middle of the answer, when no prompt is left to read."""
        marks, readings = (BEGINS_AT, tokens // 2), list[Sequence[Mapping[str, Any]]]()
        for _ in request:
            if len(readings) < len(marks) and len(request.output.token_ids) >= marks[len(readings)]:
                readings.append(self.llm.stats()["stages"])
        return [
            (there["busy_seconds"] - here["busy_seconds"]) / max(1, there["steps"] - here["steps"])
            for here, there in zip(readings[0], readings[-1], strict=True)
        ]

    def _prompt(self, part: Part, _: int) -> Cell:
        """Measure the time to the first token. The prompt is read for one token, and then answered from its kept KV: so
        the cost of reading alone is known, and it is read only once."""
        before = self._busy()
        reading = _run(self.submit(self.tasks.prompts[part.name], 1))
        computed = self._busy() - before
        share = prefill_share(-(-part.prompt // self.llm.token_budget), self._num_stages)
        return Cell([reading.ttft], share * computed, said=self.needle(part, self._answer(part)))

    def _busy(self) -> float:
        return sum(float(stage["busy_seconds"]) for stage in self.llm.stats()["stages"])

    def needle(self, part: Part, run: Run) -> str:
        """Return a remark that says whether the answer has the needle; empty if the prompt has none."""
        if part.name not in self.tasks.needles:
            return ""
        said = self.llm.tokenizer.decode(run.token_ids)
        return "needle found" if self.tasks.needles[part.name] in said else "needle not found"

    def turn(self, part: Part, _: int) -> Cell:
        """Measure a second turn after the earlier answer to the part's prompt."""
        first = self.answers.get(prompt_part(part.prompt).name)
        if first is None:
            return Cell(why_not="the prompt before it was not measured")
        turn = [*self.tasks.prompts[part.name], *first, *self.tasks.second(part.name)]
        output = whole(self.submit(turn, part.tokens).result())
        return Cell(
            [output.token_times[0]], said=f"{output.num_cached_tokens:,} of {len(turn):,} tokens of KV were kept"
        )


class PlainSystem(System):
    """Plain mlx-lm in one process."""

    name = PLAIN

    def __init__(self, tasks: Tasks, answers: Answers, mlx_lm: MlxLm) -> None:
        super().__init__(tasks, answers)
        self._mlx_lm = mlx_lm
        self.does = {
            STREAM: lambda part, _: Cell([self.kept(part, self._run(part)).tokens_per_second]),
            PROMPT: lambda part, _: Cell([self.kept(part, self._run(part)).ttft]),
            STREAMS: lambda part, trial: Cell([throughput(mlx_lm.run_batch(tasks.batch(part, trial), part.tokens))]),
            TURN: self._turn,
            **({DRAFTS: self._drafts} if mlx_lm.has_draft else {}),
        }

    def _run(self, part: Part, **how: Any) -> Run:
        return self._mlx_lm.run(self.tasks.prompts[part.name], part.tokens, **how)

    def _drafts(self, part: Part, _: int) -> Cell:
        run = self.kept(part, self._run(part, num_draft=_DRAFTS))
        return Cell([run.tokens_per_second], said=f"{_DRAFTS} drafts at a time")

    def _turn(self, part: Part, _: int) -> Cell:
        run = self._run(part, then=self.tasks.second(part.name))
        return Cell([run.ttft], said="its prompt cache kept in its process")


def _run(request: Request, asked: float = 0.0) -> Run:
    output = whole(request.result())
    return Run(tuple(output.token_ids), tuple(asked + each for each in output.token_times))
