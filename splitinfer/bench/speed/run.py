"""``splitinfer bench --mode speed``: opens the systems, and lets them take turns.

This process is the coordinator. Plain mlx-lm and the local workers are its children; all are ended at the end. Nobody
drafts: the stages take turns only without drafts, and the limits and causes of a token's time are those of such stages.
"""

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from splitinfer.bench.shared import blas, machine
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.measure import Run
from splitinfer.bench.shared.mlx_lm import MlxLmProcesses, PlainMlxLm, fetched, plain_mlx_lm
from splitinfer.bench.shared.options import Options, emulated_links
from splitinfer.bench.shared.printing import say
from splitinfer.bench.shared.systems import Baseline, Stages, System, vocabulary
from splitinfer.bench.shared.throughput import BatchRun
from splitinfer.bench.shared.workload import KINDS, STEP_SIZES, Kind, Turn, Workload, step_sizes, turns
from splitinfer.bench.speed.report import (
    BASELINE,
    BASELINE_ALL,
    BASELINE_BEST,
    PEERS,
    PIPELINE,
    WHOLE,
    Findings,
    document,
)
from splitinfer.bench.speed.tables import gap_tables, table
from splitinfer.console import load_llm
from splitinfer.core.layout import Layout
from splitinfer.core.model_config import text_part
from splitinfer.core.serving_options import MAX_RUNNING
from splitinfer.errors import ModelError
from splitinfer.llm import LLM, Settings
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu

_USUAL = (8,)  # sequences at once for each stage
_SETTLE = 0.05  # seconds of idleness before each turn, in which the previous one's rest is done
_SHAPE = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "quantization",
)  # fmt: skip


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    longest = plan(options, 2).longest
    check_context(options.checkpoint, longest, "--prompt-tokens, --decode-tokens or --stream-tokens")
    return document(_measure(options, settings_of(options, longest)))


def tables(found: dict[str, Any]) -> list[Any]:
    """The table of medians, and those of gaps."""
    return [table(found), *gap_tables(found)]


def plan(options: Options, vocab_size: int) -> Workload:
    """The tasks of all trials."""
    return Workload(
        options.trials, options.prompt_tokens, options.decode_tokens, vocab_size, options.seed,
        _USUAL if options.streams is None else options.streams, options.stream_prompt_tokens, options.stream_tokens,
    )  # fmt: skip


def settings_of(options: Options, context: int) -> Settings:
    """The engine's settings."""
    streams, num_stages = plan(options, 2).streams, options.found_layout.num_stages
    most = max([MAX_RUNNING, *(n * num_stages for n in streams)])
    return options.settings(
        context, token_budget=options.token_budget, max_running=most, trace=options.trace, prefix_cache=True
    )


def _measure(options: Options, settings: Settings) -> Findings:
    link = options.link()
    on = machine.describe()  # before this measurement loads the machine
    with ExitStack() as stack:
        if link is not None:
            stack.enter_context(emulated_links().installed(link))
        llm = stack.enter_context(load_llm(options.layout, options.model, settings))
        checkpoint = open_model(str(llm.layout.model))
        workload = plan(options, vocabulary(llm, checkpoint))
        systems = _opened(stack, options, settings, llm, with_peers=options.peers and bool(workload.streams))
        pinned = _pinned(systems, llm)
        blas_by_process = _blas(systems.plain)
        _warm_up(systems.in_order, workload)
        tried: dict[int, float] = {}
        if systems.plain is not None:
            tried = _try_step_sizes(systems.plain, workload)
            baselines = _baselines(systems.plain, min(tried, key=lambda size: tried[size]))
            _warm_up_batches(baselines[0], workload)
            systems.in_order[1:1] = baselines
        runs, batches = _take_turns(systems.in_order, workload)
    where = {"pinned": pinned, "is_pinned": bool(machine.free_processors()), "blas": blas_by_process}
    where["link"] = None if link is None else {"preset": options.link_preset, **asdict(link)}
    chunk = llm.stats()["token_budget"]
    return Findings(
        measured_on={**on, **where},
        layout=_plain_layout(llm.layout),
        model=_model(checkpoint, llm.layout),
        workload={
            **asdict(workload),
            "chunk": chunk,
            "baseline_step_size": STEP_SIZES[0] if systems.plain else None,
            "baseline_ttft_by_step_size": {str(size): seconds for size, seconds in tried.items()},
        },
        prompt_tokens=workload.prompt_tokens,
        chunk=chunk,
        stages={c.name: [s.name for s in c.llm.layout.stages] for c in systems.in_order if isinstance(c, Stages)},
        runs=runs,
        notes=[*_notes(options, on, pinned, blas_by_process, llm.layout), *systems.notes],
        batches=batches,
    )


@dataclass(slots=True)
class _Systems:
    """The systems ``in_order`` of their turns, the processes behind them, and notes on those that could not be opened.

    ``plain`` runs several of the systems.
    """

    in_order: list[System]
    plain: PlainMlxLm | None = None
    peers: MlxLmProcesses | None = None
    notes: list[str] = field(default_factory=list)


# -- systems ----------------------------------------------------------------------------------


def _opened(stack: ExitStack, options: Options, settings: Settings, llm: LLM, *, with_peers: bool) -> _Systems:
    """The pipeline, and what is measured beside it."""
    systems = _Systems([Stages(PIPELINE, llm)])
    if options.whole:
        whole = stack.enter_context(_whole(llm, replace(settings, trace=None)))
        systems.in_order.append(Stages(WHOLE, whole))
    if options.baseline:
        systems.plain = stack.enter_context(plain_mlx_lm(llm.layout))
    if with_peers:
        _open_peers(stack, systems, llm)
    return systems


def _pinned(systems: _Systems, llm: LLM) -> dict[str, int | None]:
    """Give each process its processors."""
    plain = {} if systems.plain is None else {BASELINE: systems.plain.pid}
    peers = {f"{PEERS} {i}": pid for i, pid in enumerate(systems.peers.pids if systems.peers else ())}
    return machine.pin_stages(llm.layout.stages, plain, peers)


def _whole(llm: LLM, settings: Settings) -> LLM:
    """The same model in one stage, in this process, which shows the engine's cost without a cut."""
    say("loading the whole model as one stage")
    keys = {"model": llm.layout.model, "dtype": llm.layout.dtype}
    return LLM({**keys, "stages": [{"name": "whole", "layers": llm.layout.num_layers}]}, settings=settings)


def _baselines(plain: PlainMlxLm, best: int) -> list[System]:
    """mlx-lm at its default step size, and for prompts also at the best one, where that is another."""
    default: System = Baseline(BASELINE, plain, STEP_SIZES[0], KINDS, 1)
    if best == STEP_SIZES[0]:
        return [default]
    return [default, Baseline(BASELINE_BEST, plain, best, ("prefill",), 0)]


def _open_peers(stack: ExitStack, systems: _Systems, llm: LLM) -> None:
    """Add mlx-lm's own pipeline with the layout's cut, and mlx-lm in one process on all processors of this machine."""
    say("loading the model in mlx-lm's own pipeline")
    layout = llm.layout
    try:
        if layout.num_stages == 1:
            raise ModelError("the layout has 1 stage")
        peers = MlxLmProcesses(*fetched(llm.layout), [stage.num_layers for stage in layout.stages])
        systems.peers = stack.enter_context(peers)
        systems.in_order.append(Baseline(PEERS, peers, 0, (), layout.num_stages))
    except ModelError as error:
        systems.notes.append(f"mlx-lm's own pipeline was not measured: {error}")
    count = str(len(machine.free_processors()) or os.cpu_count() or 1)
    threads = {"OPENBLAS_NUM_THREADS": count, "OMP_NUM_THREADS": count}
    everywhere = stack.enter_context(plain_mlx_lm(llm.layout, threads))
    systems.in_order.append(Baseline(BASELINE_ALL, everywhere, STEP_SIZES[0], (), 1))


def _blas(plain: PlainMlxLm | None) -> dict[str, str]:
    """The BLAS of each process here, where MLX has no GPU and the system can tell."""
    if on_gpu():
        return {}
    pids = {"coordinator": os.getpid(), **machine.local_workers()}
    found = {name: blas.computed_by(pid) for name, pid in pids.items()}
    if plain is not None:
        found[BASELINE] = plain.is_on["blas"]
    return {name: words for name, words in found.items() if words is not None}


# -- turns ---------------------------------------------------------------------------------------


def _warm_up(systems: Sequence[System], workload: Workload) -> None:
    for system in systems:
        say(f"warming up: {system.name}")
        for kind in system.does:
            system.run(workload.warm_up(kind))
        if system.num_stages:
            _warm_up_batches(system, workload)


def _warm_up_batches(system: System, workload: Workload) -> None:
    """Run whole batches, so that one that is too short for a rate is refused before anything is timed."""
    for streams in workload.streams:
        _batch(system, workload, streams, -1)


def _try_step_sizes(plain: PlainMlxLm, workload: Workload) -> dict[int, float]:
    """TTFT of the long prompt by step size, each tried once, which also warms up mlx-lm."""
    plain.run(workload.warm_up("decode"), STEP_SIZES[0])
    tried = {}
    for size in step_sizes(workload.prompt_tokens):
        tried[size] = plain.run(workload.warm_up("prefill"), size).ttft
        say(f"warming up: {BASELINE}, {size:,} prompt tokens at once: {tried[size]:.3g} s")
    return tried


def _take_turns(
    systems: Sequence[System], workload: Workload
) -> tuple[dict[tuple[str, Kind], list[Run]], dict[tuple[str, int], list[BatchRun]]]:
    runs: dict[tuple[str, Kind], list[Run]] = {(c.name, kind): [] for c in systems for kind in c.does}
    batches: dict[tuple[str, int], list[BatchRun]] = {
        (c.name, n): [] for c in systems if c.num_stages for n in workload.streams
    }
    for trial, turn, system in turns(systems, workload.trials, workload.streams):
        if not _takes_part(system, turn):
            continue
        time.sleep(_SETTLE)
        if isinstance(turn, int):
            batch = _batch(system, workload, turn, trial)
            batches[(system.name, turn)].append(batch)
            what, figure = f"throughput at {turn}", f"{batch.tokens_per_second:.3g} tokens/s"
        else:
            run = system.run(workload.task(turn, trial))
            runs[(system.name, turn)].append(run)
            what = turn
            figure = f"{1 / run.seconds_per_token:.3g} tokens/s" if turn == "decode" else f"{run.ttft:.3g} s"
        say(f"trial {trial + 1} of {workload.trials}: {what}, {system.name}: {figure}")
    return runs, batches


def _takes_part(system: System, turn: Turn) -> bool:
    return system.num_stages > 0 if isinstance(turn, int) else turn in system.does


def _batch(system: System, workload: Workload, streams: int, trial: int) -> BatchRun:
    run = system.run_batch(workload.batch(streams, trial, system.num_stages))
    run.check()
    return run


# -- the document's descriptions ------------------------------------------------------------------


def _plain_layout(layout: Layout) -> dict[str, Any]:
    stages = [{"name": s.name, "layers": s.num_layers, "address": s.address} for s in layout.stages]
    return {"name": layout.name, "model": layout.model, "dtype": layout.dtype, "stages": stages}


def _model(checkpoint: Checkpoint, layout: Layout) -> dict[str, Any]:
    config = {**checkpoint.config, **text_part(checkpoint.config)}
    return {
        "name": Path(str(layout.model)).name,
        "dtype": resolve_dtype(layout.dtype, gpu=on_gpu()) or "as stored",
        **{key: config.get(key) for key in _SHAPE},
        "num_parameters_stored": sum(math.prod(t.shape) for t in checkpoint.tensors.values()),
        "bytes_stored": sum(t.nbytes for t in checkpoint.tensors.values()),
    }


def _notes(
    options: Options,
    on: dict[str, Any],
    pinned: dict[str, int | None],
    blas_by_process: dict[str, str],
    layout: Layout,
) -> list[str]:
    """Caveats for readers of the figures."""
    notes = []
    shared = [cpu for stage in layout.stages if (cpu := pinned[stage.name]) is not None]
    if len(shared) > len(set(shared)):
        notes.append(f"{len(shared)} stages share {len(set(shared))} processors")
    if on["load_average"] > 0.5:
        notes.append(f"the machine was busy before this began (load average {on['load_average']})")
    if options.trials < 3:
        notes.append("fewer than 3 trials say nothing about the spread")
    if blas.WHEEL in blas_by_process.values():
        notes.append(blas.HINT)
    return notes
