"""One table to share: opens one system after the other, and lets each do all parts.

One after the other and not in turns, because a machine may hold no two of them at once. Each has an equal share of the
time that is left, and does no part that took longer before than what is left of its share. Plain mlx-lm is last,
because it also judges all answers.
"""

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.comparing.judge import read_again
from scripts.comparing.machine import local_workers
from scripts.comparing.options import Wanted
from scripts.comparing.page import write_page
from scripts.comparing.peers import PROCESS, Peers, judge, processes, rounding
from splitinfer import cleanup
from splitinfer.bench.figures import Run, summarize, throughput
from splitinfer.bench.mlx_lm import MlxLm, fetched, plain_mlx_lm
from splitinfer.bench.parts import (
    ANSWER,
    NEW_TOKENS,
    PROMPT,
    SHORT,
    STREAM,
    STREAMS,
    Cell,
    Part,
    Tasks,
    made_up,
    prompt_part,
    speed_parts,
    tasks_of,
)
from splitinfer.bench.report import figures_of
from splitinfer.bench.systems import (
    EMULATED,
    PIPELINE,
    PLAIN,
    Answers,
    PipelineSystem,
    PlainSystem,
    System,
    open_stages,
    vocabulary,
    whole,
)
from splitinfer.console import say
from splitinfer.core.layout import LOCAL, Layout, lay_out, written
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import LayoutError, ModelError, SplitinferError
from splitinfer.llm import LLM, Request, Settings
from splitinfer.machine.selection import emulated_machine
from splitinfer.places import write
from splitinfer.probes.machine import describe
from splitinfer.probes.plain import tolerance, verdict
from transports.address import parse_host_port

BY_LAYERS, PARALLEL = "mlx-lm's pipeline", "mlx-lm in tensor parallel"
AS_ONE_STAGE = "splitinfer in tensor parallel"
RESTART = "restart"  # a part: a second turn after a restart of all processes
KILLED = "killed"  # a part: a worker is killed during an answer; the longest gap in seconds
System.not_there |= {RESTART: "it keeps no KV on disk", KILLED: "it ends with any of its processes"}
PROMPTS = (2048, 8192, 32768)  # tokens
_AT_ONCE = 16  # streams
_SHARE = 3  # of an answer after which a worker is killed
_MORE = 2 * ANSWER + NEW_TOKENS  # tokens after the longest prompt
_WARM_UP = 12  # tokens
_GROWS = 1.5  # what a prompt takes for each token more than for one of a shorter prompt: attention grows
_PATIENCE = 60.0  # seconds for a killed worker to come back
_ITSELF = "the pipeline itself in other chunks and another cut"
_PRIVATE = re.compile(r"\w[\w+.-]*://[^\s,;)]+|(?<![\w.])~?/[^\s,;:'\")]+|\b\d{1,3}(?:\.\d{1,3}){3}\b")
_MEASURED_ON = ("processor", "processors", "memory_bytes", "python", "versions", "device", "load_average")


class _Comparison:
    """What is known so far, by system: cells by part, answers to be judged. ``closes_at``: on the monotonic clock;
    ``turns``: systems that are to come, and the judge; ``took``: seconds of each part, at most."""

    def __init__(self, options: Wanted) -> None:
        self.options, self.start = options, time.monotonic()
        self.closes_at = self.start + 60.0 * options.minutes
        self.turns = 3  # the pipeline, plain mlx-lm, the judge
        self.took = dict[str, float]()
        self.parts = list[Part]()
        self.is_emulated = emulated_machine() is not None
        self.judged_by = "plain mlx-lm"
        self.left_out = list[dict[str, str]]()
        self.cells: dict[str, dict[str, Cell]] = {}
        self.answers: dict[str, Answers] = {}
        self.tasks = Tasks(0, 2, {}, {})
        self.context = min(options.checkpoint.context_length, PROMPTS[-1] + _MORE)

    def answers_of(self, name: str) -> Answers:
        """The answers of a system, to be judged."""
        return self.answers.setdefault(name, {})

    def do(self, system: System, *, restarted: bool = False) -> None:
        """Let a system do its parts: those of one run, or those after a restart. What has a rate is tried again as
        often as there is time."""
        now, cells = time.monotonic(), self.cells.setdefault(system.name, {})
        ends = now + max(0.0, self.closes_at - now) / max(1, self.turns)
        self.turns -= 1
        own = [each for each in self.parts if system.name != PIPELINE or (each.kind == RESTART) is restarted]
        for trial in range(self.options.trials):
            for part in own:
                if trial == 0 or (part.unit == "tokens/s" and cells[part.name].values):
                    self._try(system, part, trial, cells.setdefault(part.name, Cell()), ends - time.monotonic())
        for part in own:
            cell = cells[part.name]
            figure = f"{summarize(cell.values)['median']:.3g} {part.unit}" if cell.values else cell.why_not
            say(f"{system.name}: {part.label}: {figure}")

    def _try(self, system: System, part: Part, trial: int, cell: Cell, left: float) -> None:
        """Add what a system comes to once."""
        began = time.monotonic()
        if self.expected(part) > left:
            cell.why_not = cell.why_not or ("" if cell.values else "no time was left")
            return
        try:
            found = system.do(part, trial)
        except SplitinferError as error:
            found = Cell(why_not=str(error))
        cell.add(found)
        if not found.why_not:
            self.took[part.name] = max(self.took.get(part.name, 0.0), time.monotonic() - began)

    def expected(self, part: Part) -> float:
        """Seconds that a part takes: as long as before, or, if it is a prompt, by the shorter one before it."""
        if part.name in self.took or part.kind != PROMPT:
            return self.took.get(part.name, 0.0)
        shorter = [each for each in self.parts if each.kind == PROMPT and each.name in self.took]
        rates = [self.took[each.name] / each.prompt for each in shorter]
        return _GROWS * part.prompt * max(rates, default=0.0)

    def give_up(self, name: str, why_not: str) -> None:
        """No system of that name could be opened."""
        say(f"{name}: {why_not}")
        self.cells[name] = {part.name: Cell(why_not=why_not) for part in self.parts}


def measure(options: Wanted) -> dict[str, Any]:
    """Measure, write the page if one is asked for, and return the document.

    Raises:
        SplitinferError: the pipeline cannot be opened, or the page not be written.
    """
    if options.report is not None:
        write(options.report, "")  # that it cannot be is told before anything is measured
    on, work = describe(), _Comparison(options)
    with cleanup.temporary_folder("splitinfer-compare-") as folder:
        layout = _pipeline(work, Path(folder))
    _one_stage(work, layout)
    for name, by_layers in ((BY_LAYERS, True), (PARALLEL, False)):
        _peers(work, name, layout, by_layers=by_layers)
    verdicts = _plain(work, layout)
    if verdicts is None:
        work.judged_by, verdicts = _ITSELF, {PIPELINE: _own_again(work, layout)}
    found = _document(work, on, layout, verdicts)
    if options.report is not None:
        write_page(found, options.report)
    return found


def parts(decode_tokens: int, prompts: Sequence[int]) -> list[Part]:
    """All parts of a comparison, the most important first. ``prompts``: lengths of the long prompts, the shortest
    first."""
    first = prompts[0]
    stream, drafts, streams, prompt, turn = speed_parts(decode_tokens, first, (_AT_ONCE,))
    return [
        stream,
        prompt,
        drafts,
        streams,
        turn,
        Part(KILLED, "a worker killed within an answer: longest gap", SHORT, 2 * decode_tokens),
        Part(RESTART, "the same turn after a restart", first, ANSWER, is_turn=True),
        *map(prompt_part, prompts[1:]),
    ]


# -- systems -----------------------------------------------------------------------------------------------------------


class Hardened(PipelineSystem):
    """The pipeline, also through a restart and the loss of a worker."""

    def __init__(self, tasks: Tasks, answers: Answers, llm: LLM) -> None:
        super().__init__(tasks, answers, llm)
        self.does = {**self.does, RESTART: self.turn, KILLED: self._killed}

    def _killed(self, part: Part, _: int) -> Cell:
        """The longest gap of an answer in which the last worker is killed, once it is the undisturbed one."""
        workers = local_workers()
        last = self.llm.layout.workers[-1].name if self.llm.layout.workers else ""
        if last not in workers:
            return Cell(why_not="the last stage's worker is not on this machine: pull its cable yourself")
        prompt = self.tasks.prompts[part.name]
        undisturbed = self.submit(prompt, part.tokens, None).result().token_ids
        request = self.submit(prompt, part.tokens, None)
        self._kill_within(request, workers[last], part.tokens // _SHARE)
        output = whole(request.output)
        same = "the same tokens" if output.token_ids == undisturbed else "other tokens than undisturbed"
        return Cell([max(b - a for a, b in pairwise(output.token_times))], said=same)

    def _kill_within(self, request: Request, pid: int, after: int) -> None:
        for _ in request:
            if after and len(request.output.token_ids) >= after:
                os.kill(pid, signal.SIGKILL)
                after = 0


class OneStage(Hardened):
    """The pipeline's two machines as one stage."""

    name = AS_ONE_STAGE

    def __init__(self, tasks: Tasks, answers: Answers, llm: LLM) -> None:
        super().__init__(tasks, answers, llm)
        self.does = {**self.does, RESTART: lambda *_: Cell(why_not="measured of the pipeline only")}


class Cut(System):
    """mlx-lm in as many processes as the layout has stages, under a ``name``."""

    def __init__(self, tasks: Tasks, answers: Answers, peers: Peers, name: str) -> None:
        super().__init__(tasks, answers)
        self.name, self._peers = name, peers
        self.does = {
            STREAM: lambda part, _: Cell([self._run(part).tokens_per_second]),
            PROMPT: lambda part, _: Cell([self._run(part).ttft]),
            STREAMS: lambda part, trial: Cell([throughput(peers.run_batch(tasks.batch(part, trial), part.tokens))]),
        }

    def _run(self, part: Part) -> Run:
        return self.kept(part, self._peers.run(self.tasks.prompts[part.name], part.tokens))


def _settings(work: _Comparison, **more: Any) -> Settings:
    return work.options.settings(work.context, **{"rejoin_timeout": _PATIENCE, **more})


def _pipeline(work: _Comparison, folder: Path) -> Layout:
    """The pipeline's figures, also those after a restart; its layout."""
    answers = work.answers_of(PIPELINE)
    with ExitStack() as stack:
        llm = open_stages(stack, work.options, _settings(work, kv_dir=folder))
        layout = llm.layout
        _prepare(work, llm)
        work.do(Hardened(work.tasks, answers, llm))
    with ExitStack() as stack:
        llm = open_stages(stack, work.options, _settings(work, kv_dir=folder), ", again")
        _warm_up(llm, work.tasks.vocab_size)
        work.do(Hardened(work.tasks, answers, llm), restarted=True)
    return layout


def _prepare(work: _Comparison, llm: LLM) -> None:
    """Choose the parts, make their prompts, and count the systems that are likely to run."""
    options, vocab_size = work.options, vocabulary(llm, work.options.checkpoint)
    context = min(work.context, llm.context_length)
    lengths = [length for length in PROMPTS if length + _MORE <= work.context] or [work.context // 2]
    wanted = parts(options.decode_tokens, lengths)
    work.parts = [part for part in wanted if part.context <= context]
    work.left_out = [
        {"what": part.label, "why": f"it needs {part.context:,} tokens, and the context is {context:,}"}
        for part in wanted
        if part.context > context
    ]
    work.tasks = tasks_of(work.parts, vocab_size, llm.tokenizer if llm.has_tokenizer else None, 0)
    work.turns += 1 + (0 if _why_no_peers(work, llm.layout) else 3)  # the restart; one stage, and mlx-lm's two ways
    _warm_up(llm, vocab_size)


def _warm_up(llm: LLM, vocab_size: int) -> None:
    prompts = [made_up(f"warm up {i}", _WARM_UP, vocab_size) for i in range(_AT_ONCE)]
    llm.generate(prompts, SamplingParams(max_tokens=_WARM_UP, ignore_eos=True))


def _one_stage(work: _Comparison, layout: Layout) -> None:
    """The figures of the pipeline's two machines as one stage."""
    try:
        with ExitStack() as stack:
            llm = open_stages(stack, work.options, _settings(work), " across two machines", as_one_stage(layout))
            work.do(OneStage(work.tasks, work.answers_of(AS_ONE_STAGE), llm))
    except SplitinferError as error:
        work.give_up(AS_ONE_STAGE, str(error))


def as_one_stage(layout: Layout) -> Layout:
    """The layout in which a layout's two machines halve every layer.

    Raises:
        LayoutError: it does not cut the layers between two machines.
    """
    workers = layout.stages[1:]
    if len(workers) != 1 or not layout.has_own_stage or workers[0].address is None:
        raise LayoutError("the layout does not cut the layers between this machine and one worker with an address")
    ranks = (LOCAL, written(workers[0].address, workers[0].key))
    return replace(layout, stages=lay_out([("both", layout.num_layers, None, {"across": ranks})]))


def _peers(work: _Comparison, name: str, layout: Layout, *, by_layers: bool) -> None:
    try:
        if why := _why_no_peers(work, layout):
            raise ModelError(why)
        machines = _machines(layout)
        say(f"loading {name}")
        layers = [stage.num_layers for stage in layout.stages]
        with processes(*fetched(layout), layers, by_layers, machines) as peers:
            work.do(Cut(work.tasks, work.answers_of(name), peers, name))
    except ModelError as error:
        work.give_up(name, str(error))


def _why_no_peers(work: _Comparison, layout: Layout) -> str:
    """Why mlx-lm cannot be cut over the layout's machines; "" if it may be possible."""
    if work.is_emulated:
        return EMULATED
    if layout.num_stages == 1:
        return "the layout has 1 stage"
    if any(_machines(layout)) and not work.options.ssh:
        return "the workers are on other machines: --ssh starts it there"
    return ""


def _machines(layout: Layout) -> list[str | None]:
    """The host of each stage; ``None``: this machine. A worker that announces itself has no address in the layout."""
    return [
        None if number == 0 or stage.is_local else parse_host_port(stage.address or f"tcp://{stage.name}.local:0").host
        for number, stage in enumerate(layout.stages)
    ]


def _plain(work: _Comparison, layout: Layout) -> dict[str, list[dict[str, Any]]] | None:
    """Plain mlx-lm's figures, and its verdicts on all answers; ``None`` if it cannot run here."""
    try:
        with closing(plain_mlx_lm(layout, work.options.checkpoint, PROCESS)) as plain:
            if work.is_emulated:
                work.give_up(PLAIN, EMULATED)
            else:
                work.do(PlainSystem(work.tasks, work.answers_of(PLAIN), plain))
            return _judged(work, plain)
    except ModelError as error:
        work.give_up(PLAIN, str(error))
        return None


def _judged(work: _Comparison, plain: MlxLm) -> dict[str, list[dict[str, Any]]]:
    """The verdicts on all systems' answers, the shortest prompts first, as long as there is time. The same answer of
    several systems is judged once."""
    say("judging the answers")
    prompts, verdicts = work.tasks.prompts, {name: list[dict[str, Any]]() for name in work.answers}
    distinct = {answer for answers in work.answers.values() for answer in answers.items()}
    allowed = None  # logits
    for part, tokens in sorted(distinct, key=lambda answer: (len(prompts[answer[0]]), answer)):
        if allowed is None:
            allowed = tolerance(rounding(plain, [*prompts[part], *tokens]))
        gave = [name for name, answers in work.answers.items() if answers.get(part) == tokens]
        needed, left = work.took.get(part, 0.0), max(0.0, work.closes_at - time.monotonic())
        if needed > left:
            what = f"judging the answer of {' and '.join(gave)} to {len(prompts[part]):,} tokens"
            work.left_out.append({"what": what, "why": f"it would take {needed:,.0f} s, and {left:,.0f} s are left"})
            continue
        gaps = judge(plain, prompts[part], tokens)
        found = {"part": part, "prompt_tokens": len(prompts[part]), **verdict(gaps, allowed)}
        for name in gave:
            verdicts[name].append(found)
    return {name: each for name, each in verdicts.items() if each}


def _own_again(work: _Comparison, layout: Layout) -> list[dict[str, Any]]:
    """Verdicts without plain mlx-lm on the whole model."""
    prompts = {name: work.tasks.prompts[name] for name in work.answers_of(PIPELINE)}
    settings = _settings(work, prefix_cache=False, draft="none")
    with ExitStack() as stack:
        llm = open_stages(stack, work.options, settings, ", to read its prompts again")
        found, left_out = read_again(llm, prompts)
    work.left_out += left_out
    return found


# -- the document ------------------------------------------------------------------------------------------------------


def _document(
    work: _Comparison, on: Mapping[str, Any], layout: Layout, verdicts: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """The document. It has no names of machines, people or files, no addresses and no texts."""
    return {
        "tool": "scripts/compare",
        "format": 1,
        "measured_on": {name: on[name] for name in _MEASURED_ON},
        "model": {"model_type": work.options.checkpoint.config["model_type"], "layers": layout.num_layers},
        "cut": [stage.num_layers for stage in layout.stages],
        "workers_here": all(stage.is_local for stage in layout.stages[1:]),
        "minutes": work.options.minutes,
        "trials": work.options.trials,
        "took_seconds": round(time.monotonic() - work.start, 1),
        "parts": [{"name": part.name, "label": part.label, "unit": part.unit} for part in work.parts],
        "systems": {
            name: {part: _without_names(figures_of(cell), layout) for part, cell in cells.items()}
            for name, cells in work.cells.items()
        },
        "judged_by": work.judged_by,
        "verdicts": {name: list(each) for name, each in verdicts.items()},
        "left_out": [_without_names(each, layout) for each in work.left_out],
    }


def without_names(text: str, layout: Layout) -> str:
    """An error's words without names of machines, addresses and paths: the stages are called by their numbers."""
    machines, text = _machines(layout), _PRIVATE.sub("…", text)
    for number, stage in enumerate(layout.stages):
        for name in filter(None, (machines[number], stage.name)):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", f"stage {number + 1}", text)
    return text.replace("stage stage", "stage")


def _without_names(told: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    return {key: without_names(each, layout) if key.startswith("why") else each for key, each in told.items()}
