"""``splitinfer bench``: a layout beside plain mlx-lm on this machine, in turns.

Every trial has prompts of its own. The two systems do the same part one after the other, every second time in reverse
order, because machines drift. An uncounted round warms both up.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from rich.console import RenderableType

from splitinfer.bench.figures import ratios
from splitinfer.bench.mlx_lm import MlxLm, plain_mlx_lm
from splitinfer.bench.options import Options
from splitinfer.bench.parts import DRAFTS, Cell, Part, speed_parts, tasks_of
from splitinfer.bench.report import figures_of, said, table
from splitinfer.bench.systems import (
    EMULATED,
    NO_DRAFT,
    PIPELINE,
    PLAIN,
    PipelineSystem,
    PlainSystem,
    System,
    open_stages,
    vocabulary,
)
from splitinfer.common.plain_text import duration
from splitinfer.console import say
from splitinfer.core.serving_options import MAX_RUNNING
from splitinfer.engine.profiling.load import LoadWatch
from splitinfer.errors import ModelError, SplitinferError
from splitinfer.llm import LLM
from splitinfer.machine.selection import emulated_machine
from splitinfer.placement.bounds import busy_in_words
from splitinfer.probes.machine import describe
from splitinfer.settings import Settings

_SETTLE = 0.05  # idle seconds before each turn, for the rest of the previous one

Cells = dict[str, dict[str, Cell]]  # by system and part


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    parts = speed_parts(options.decode_tokens, options.prompt_tokens, options.counts)
    context = max(part.context for part in parts)
    options.check_context(context)
    on, watch = describe(), LoadWatch()
    notes = ["fewer than 3 trials say nothing about the spread"] if options.trials < 3 else []
    with ExitStack() as stack:
        waits = Settings().rejoin_timeout  # for a lost stage, like a chat
        settings = options.settings(context, max_running=max(MAX_RUNNING, *options.counts), rejoin_timeout=waits)
        llm, plain = open_stages(stack, options, settings), None
        try:
            if emulated_machine() is not None:
                raise ModelError(EMULATED)
            plain = stack.enter_context(closing(plain_mlx_lm(llm.layout, options.checkpoint)))
        except ModelError as error:
            notes.append(f"{PLAIN}: {error}")
        if llm.layout.draft is None:
            parts = [part for part in parts if part.kind != DRAFTS]
            notes.append(NO_DRAFT)
        cells, same = _take_turns(options, llm, plain, parts, notes)
        notes += busy_in_words("this machine", watch.load())
    return {
        "tool": "splitinfer bench",
        "format": 4,
        "measured_on": on,
        "layout": llm.layout.name,
        "model": llm.layout.model,
        "cut": [stage.num_layers for stage in llm.layout.stages],
        "trials": options.trials,
        "decode_tokens": options.decode_tokens,
        "parts": [{"name": part.name, "label": part.label, "unit": part.unit} for part in parts],
        "systems": {name: {part: figures_of(cell) for part, cell in each.items()} for name, each in cells.items()},
        "ratios": _ratios(cells),
        "same_tokens": same,
        "notes": notes,
    }


def _take_turns(
    options: Options, llm: LLM, plain: MlxLm | None, parts: Sequence[Part], notes: list[str]
) -> tuple[Cells, dict[str, dict[str, int]]]:
    """Run all trials. Return their cells, and by part the number of answers with mlx-lm's tokens.

    If a stage is lost for good, the earlier results stay and ``notes`` says so. If it comes back, the part does not
    count.

    Raises:
        SplitinferError: a stage was lost before anything was measured.
    """
    vocab_size, tokenizer = vocabulary(llm, options.checkpoint), llm.tokenizer if llm.has_tokenizer else None
    cells, same, began = Cells(), dict[str, dict[str, int]](), time.monotonic()
    for trial in range(-1, options.trials):
        if trial == 0:
            left = duration(options.trials * (time.monotonic() - began))
            say(f"{options.trials} trials will take about {left}")
        tasks = tasks_of(parts, vocab_size, tokenizer, trial + 1)
        ours = PipelineSystem(tasks, {}, llm)
        systems: list[System] = [ours] if plain is None else [ours, PlainSystem(tasks, {}, plain)]
        for part in parts:
            name, rejoins = f"trial {trial + 1}" if trial >= 0 else "warming up", llm.stats()["rejoins"]
            try:
                found = {each.name: _turn(each, part, trial, name) for each in systems[:: -1 if trial % 2 else 1]}
            except SplitinferError as error:
                if not cells:
                    raise
                notes.append(f"ended in {name}, {part.label}: {error}")
                return cells, same
            if llm.stats()["rejoins"] > rejoins:
                notes.append(f"{name}, {part.label}: left out, as a stage was lost meanwhile")
            elif trial >= 0:
                for system, cell in found.items():
                    cells.setdefault(system, {}).setdefault(part.name, Cell()).add(cell)
        for name, answer in systems[-1].answers.items() if trial >= 0 and plain is not None else ():
            count = same.setdefault(name, {"same": 0, "of": 0})
            count["same"] += ours.answers.get(name) == answer
            count["of"] += 1
    return cells, same


def _turn(system: System, part: Part, trial: int, name: str) -> Cell:
    """Measure a part of a trial once, and print the figure."""
    time.sleep(_SETTLE)
    cell = system.do(part, trial)
    figure = f"{cell.values[0]:.3g} {part.unit}" if cell.values else cell.why_not
    say(f"{name}: {part.label}, {system.name}: {figure}")
    return cell


def _ratios(cells: Cells) -> dict[str, Any]:
    """Return the ratios of our figures to mlx-lm's, by part. More tokens a second are better, and fewer seconds."""
    ours, theirs = cells[PIPELINE], cells.get(PLAIN, {})
    return {part: ratios(ours[part].values, cell.values) for part, cell in theirs.items() if cell.values}


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """Return the table of the medians."""
    on, cut = found["measured_on"], " + ".join(map(str, found["cut"]))
    same = ", ".join(f"{name} {each['same']} of {each['of']}" for name, each in found["same_tokens"].items())
    caption = [
        f"medians of {found['trials']} trials; `a of b`: b is the limit set by the stages' computing alone",
        "the last column: our figure / mlx-lm's, trial by trial; more tokens a second are better, and fewer seconds",
        *([f"answers with mlx-lm's tokens: {same}"] if same else []),
        *said(found, PIPELINE),
        f"{on['processor']}, {on['processors']} processors, {on['device']}; {on['platform']}",
        *(f"note: {note}" for note in found["notes"]),
    ]
    return [table(found, f"{found['layout']}, {found['model']}, cut {cut}", caption)]
