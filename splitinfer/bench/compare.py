"""``splitinfer bench --mode compare``: opens one system after the other, and lets each do all parts.

One after the other and not in turns, because a machine may hold no two of them at once. The pipeline is first: a short
trial of it gives the pace by which parts are chosen. Plain mlx-lm is last, because it also judges all answers. Where
the model does not fit into this machine, ``unreferenced`` says what can still be known.

Prompts are text if the model has a tokenizer: drafts are worth nothing on random tokens. A long prompt has a *needle*
in it, a number that it asks for at its end.
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitinfer import cleanup
from splitinfer.bench.figures import summarize
from splitinfer.bench.judge import verdict
from splitinfer.bench.mlx_lm import MlxLmProcesses, PlainMlxLm, fetched, plain_mlx_lm
from splitinfer.bench.options import Options
from splitinfer.bench.page import tables, write_page
from splitinfer.bench.parts import (
    ANSWER,
    NEW_TOKENS,
    STREAMS,
    Cell,
    Kind,
    Pace,
    Part,
    Tasks,
    made_up,
    parts,
    tasks_of,
    with_fewer_trials,
)
from splitinfer.bench.printing import say
from splitinfer.bench.systems import (
    AS_ONE_STAGE,
    BY_LAYERS,
    EMULATED,
    PARALLEL,
    PIPELINE,
    PLAIN,
    Answers,
    OneStage,
    Peers,
    Pipeline,
    Plain,
    System,
    open_stages,
    vocabulary,
)
from splitinfer.bench.table import figures_of
from splitinfer.bench.unreferenced import first_layers, read_again
from splitinfer.core.layout import LOCAL, Layout, Rank, lay_out
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import LayoutError, ModelError, SplitinferError
from splitinfer.llm import LLM, Settings
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from splitinfer.probes.machine import describe
from splitinfer.probes.tokens import tolerance
from transports.address import parse_host_port

__all__ = ["measure", "tables"]

PROMPTS = (2048, 8192, 32768)  # tokens
_MORE = 2 * ANSWER + NEW_TOKENS  # tokens after the longest prompt
_TRIAL, _TRIAL_TOKENS = 128, 12  # of the pace
_PATIENCE = 60.0  # seconds for a killed worker to come back
_ITSELF = "the pipeline itself in other chunks and another cut, and plain mlx-lm for the first layers"
_PRIVATE = re.compile(r"\w[\w+.-]*://[^\s,;)]+|(?<![\w.])~?/[^\s,;:'\")]+|\b\d{1,3}(?:\.\d{1,3}){3}\b")
_MEASURED_ON = ("processor", "processors", "memory_bytes", "python", "versions", "device", "load_average")


class _Comparison:
    """What is known so far, by system: cells by part, answers to be judged. ``closes_at``: on the monotonic clock."""

    def __init__(self, options: Options) -> None:
        self.options, self.start = options, time.monotonic()
        self.closes_at = self.start + 60.0 * options.minutes
        self.parts = list[Part]()
        self.trials = options.trials
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
        """Let a system do its parts: those of one run, or those after a restart."""
        cells = self.cells.setdefault(system.name, {})
        for part in self.parts:
            if system.name != PIPELINE or (part.kind is Kind.RESTART) is restarted:
                cells[part.name] = cell = self._measured(system, part)
                figure = f"{summarize(cell.values)['median']:.3g} {part.kind.unit}" if cell.values else cell.why_not
                say(f"{system.name}: {part.label}: {figure}")

    def _measured(self, system: System, part: Part) -> Cell:
        values = list[float]()
        cell = Cell()
        for trial in range(self.trials if part.kind.unit == "tokens/s" else 1):
            if time.monotonic() > self.closes_at:
                break
            try:
                cell = system.do(part, trial)
            except SplitinferError as error:
                return Cell(why_not=str(error))
            values += cell.values
        cell.values = values
        if not values and not cell.why_not:
            cell.why_not = "no time was left"
        return cell

    def give_up(self, name: str, why_not: str) -> None:
        """No system of that name could be opened."""
        say(f"{name}: {why_not}")
        self.cells[name] = {part.name: Cell(why_not=why_not) for part in self.parts}


def measure(options: Options) -> dict[str, Any]:
    """Measure, write the page if one is asked for, and return the document.

    Raises:
        SplitinferError: the pipeline cannot be opened.
    """
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


# -- systems -----------------------------------------------------------------------------------------------------------


def _settings(work: _Comparison, **more: Any) -> Settings:
    return work.options.settings(work.context, **{"rejoin_timeout": _PATIENCE, **more})


def _pipeline(work: _Comparison, folder: Path) -> Layout:
    """The pipeline's figures, also those after a restart; its layout."""
    answers = work.answers_of(PIPELINE)
    with ExitStack() as stack:
        llm = open_stages(stack, work.options, _settings(work, kv_dir=folder))
        layout = llm.layout
        _choose(work, llm)
        work.do(Pipeline(work.tasks, answers, llm))
    if any(part.kind is Kind.RESTART for part in work.parts):
        with ExitStack() as stack:
            llm = open_stages(stack, work.options, _settings(work, kv_dir=folder), ", again")
            _pace_alone(llm, work.tasks.vocab_size)  # warms it up
            work.do(Pipeline(work.tasks, answers, llm), restarted=True)
    return layout


def _choose(work: _Comparison, llm: LLM) -> None:
    """Choose the parts by the pace of a short trial, and make their prompts."""
    options, vocab_size = work.options, vocabulary(llm, work.options.checkpoint)
    lengths = [length for length in PROMPTS if length + _MORE <= work.context] or [work.context // 2]
    wanted = parts(options.decode_tokens, lengths)
    possible = [part for part in wanted if part.kind is not Kind.DRAFTS or llm.layout.draft is not None]
    _pace(llm, vocab_size)  # warms it up
    pace, readers = _pace(llm, vocab_size), _num_readers(work, llm.layout)
    left, context = work.closes_at - time.monotonic(), min(work.context, llm.context_length)
    work.trials, kept, work.left_out = with_fewer_trials(possible, pace, readers, options.trials, left, context)
    work.parts = [part for part in wanted if part in kept or part not in possible]  # the row of such a part says why
    work.tasks = tasks_of(work.parts, vocab_size, llm.tokenizer if llm.has_tokenizer else None, 0)


def _num_readers(work: _Comparison, layout: Layout) -> int:
    """How many read each prompt: the systems that are likely to run, and the judge of their answers."""
    if work.is_emulated:
        return 3
    return 4 if _why_no_peers(work, layout) else 6


def _pace(llm: LLM, vocab_size: int) -> Pace:
    """The pace of one answer and of answers at once, by short trials."""
    prompts = [made_up(f"trial {time.monotonic()} {i}", _TRIAL_TOKENS, vocab_size) for i in range(STREAMS)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=_TRIAL_TOKENS, ignore_eos=True))
    many = max((each.token_times[-1] - each.token_times[0]) / (_TRIAL_TOKENS - 1) for each in outputs)
    return Pace(*_pace_alone(llm, vocab_size), many)


def _pace_alone(llm: LLM, vocab_size: int) -> tuple[float, float]:
    """Seconds for a token of a prompt, and for one of an answer."""
    prompt = made_up(f"trial {time.monotonic()}", _TRIAL, vocab_size)
    times = llm.generate([prompt], SamplingParams(max_tokens=_TRIAL_TOKENS, ignore_eos=True))[0].token_times
    return times[0] / _TRIAL, (times[-1] - times[0]) / (_TRIAL_TOKENS - 1)


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
    ranks = (Rank(LOCAL), Rank(workers[0].address, workers[0].key))
    return replace(layout, stages=lay_out([("both", layout.num_layers, None, {"across": ranks})]))


def _peers(work: _Comparison, name: str, layout: Layout, *, by_layers: bool) -> None:
    try:
        if why := _why_no_peers(work, layout):
            raise ModelError(why)
        machines = _machines(layout)
        say(f"loading {name}")
        layers = [stage.num_layers for stage in layout.stages]
        with MlxLmProcesses(*fetched(layout), layers, by_layers, machines) as peers:
            work.do(Peers(name, work.tasks, work.answers_of(name), peers))
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
        with plain_mlx_lm(layout, work.options.checkpoint) as plain:
            if work.is_emulated:
                work.give_up(PLAIN, EMULATED)
            else:
                work.do(Plain(work.tasks, work.answers_of(PLAIN), plain))
            return _judged(work, plain)
    except ModelError as error:
        work.give_up(PLAIN, str(error))
        return None


def _judged(work: _Comparison, plain: PlainMlxLm) -> dict[str, list[dict[str, Any]]]:
    """The verdicts on all systems' answers, the shortest prompts first, as long as there is time. The same answer of
    several systems is judged once."""
    say("judging the answers")
    prompts, verdicts = work.tasks.prompts, {name: list[dict[str, Any]]() for name in work.answers}
    distinct = {answer for answers in work.answers.values() for answer in answers.items()}
    allowed = None  # logits
    for part, tokens in sorted(distinct, key=lambda answer: (len(prompts[answer[0]]), answer)):
        if allowed is None:
            allowed = tolerance(plain.rounding([*prompts[part], *tokens]))
        gave = [name for name, answers in work.answers.items() if answers.get(part) == tokens]
        needed, left = _to_judge(work, part), max(0.0, work.closes_at - time.monotonic())
        if needed > left:
            what = f"judging the answer of {' and '.join(gave)} to {len(prompts[part]):,} tokens"
            is_known = needed < math.inf
            why = f"it would take {needed:,.0f} s, and {left:,.0f} s are left" if is_known else "no time was left"
            work.left_out.append({"what": what, "why": why})
            continue
        gaps = plain.judge(prompts[part], tokens)
        found = {"part": part, "prompt_tokens": len(prompts[part]), **verdict(gaps, allowed)}
        for name in gave:
            verdicts[name].append(found)
    return {name: each for name, each in verdicts.items() if each}


def _to_judge(work: _Comparison, part: str) -> float:
    """Seconds that plain mlx-lm takes to judge an answer: those of its long prompt, which it has read before; infinite
    if it had no time for that."""
    if not any(each.name == part and each.kind is Kind.PROMPT for each in work.parts):
        return 0.0
    return max(work.cells[PIPELINE if work.is_emulated else PLAIN][part].values, default=math.inf)


def _own_again(work: _Comparison, layout: Layout) -> list[dict[str, Any]]:
    """Verdicts without plain mlx-lm on the whole model."""
    prompts = {name: work.tasks.prompts[name] for name in work.answers_of(PIPELINE)}
    settings = _settings(work, prefix_cache=False, draft="none")
    with ExitStack() as stack:
        llm = open_stages(stack, work.options, settings, ", to read its prompts again")
        found, left_out = read_again(llm, prompts)
    work.left_out += left_out
    count = layout.stages[0].num_layers
    try:
        with cleanup.temporary_folder("splitinfer-first-") as folder:
            dtype = resolve_dtype(layout.dtype, gpu=on_gpu())
            found += first_layers(work.options.checkpoint, count, dtype, settings, prompts, Path(folder))
    except SplitinferError as error:
        work.left_out.append({"what": f"the first {count} layers beside mlx-lm's", "why": str(error)})
    return found


# -- the document ------------------------------------------------------------------------------------------------------


def _document(
    work: _Comparison, on: Mapping[str, Any], layout: Layout, verdicts: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """The document. It has no names of machines, people or files, no addresses and no texts."""
    return {
        "tool": "splitinfer bench --mode compare",
        "format": 1,
        "measured_on": {name: on[name] for name in _MEASURED_ON},
        "model": {"model_type": work.options.checkpoint.config["model_type"], "layers": layout.num_layers},
        "cut": [stage.num_layers for stage in layout.stages],
        "workers_here": all(stage.is_local for stage in layout.stages[1:]),
        "minutes": work.options.minutes,
        "trials": work.trials,
        "took_seconds": round(time.monotonic() - work.start, 1),
        "parts": [{"name": part.name, "label": part.label, "unit": part.kind.unit} for part in work.parts],
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
