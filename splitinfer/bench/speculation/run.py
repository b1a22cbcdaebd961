"""``splitinfer bench --mode speculation``: what drafts in flight are worth.

The systems take turns, trial by trial, with one stream: the same stages without drafts, with synchronous blocks of
several lengths, and with blocks in flight as the controller chooses them; plain mlx-lm in one process, and its own
speculative decoding where there is a draft model. All of them give the same tokens, up to rounding (docs/exactness.md).

With ``replay`` as drafter the acceptance is an option (``bench.speculation.replay``), and each of several values is a
case. With a real drafter the cases are temperatures, on passages of real text. Then eight requests run at once, with
drafts and without, because drafts must cost nothing there.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.inputs import check_context, check_plot, check_text
from splitinfer.bench.shared.printing import print_found
from splitinfer.bench.shared.systems import PlainMlxLm
from splitinfer.bench.shared.texts import passages
from splitinfer.bench.speculation.options import SpeculationOptions
from splitinfer.bench.speculation.plot import plot
from splitinfer.bench.speculation.replay import Replay
from splitinfer.bench.speculation.report import (
    Cut,
    best_cuts,
    case_document,
    curve,
    gpu_like,
    link_effects,
)
from splitinfer.bench.speculation.tables import speculation_tables
from splitinfer.bench.speculation.trials import PROMPT_TOKENS, SETTLE, Trials, vocabulary
from splitinfer.config import find_layout
from splitinfer.console import errors
from splitinfer.engine.drafts.drafters import model_in
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM, NO_DRAFT, Settings
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import fetch, open_model
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from transports.emulated import PRESETS, LinkProfile, installed, preset

REPLAY = "replay"
_WIDTH = 130  # columns, where there is no terminal
_TEACHER_TEXT, _TEACHER_TEXTS = 400, 12  # tokens of a passage that both models read, and number of passages


def measure_speculation(options: SpeculationOptions) -> int:
    """Measure, print tables and, as the last line, the document; return the exit code.

    Raises:
        SplitinferError: something cannot be measured.
    """
    if options.plot is not None:
        check_plot(options.plot)
    check_text(options.text)
    found = _measure(options)
    if options.plot is not None:
        plot(found, options.plot)
    print_found(found, speculation_tables(found), as_json=options.as_json, least_width=_WIDTH)
    return 0


def _measure(options: SpeculationOptions) -> dict[str, Any]:
    assert options.layout is not None  # without, only streams side by side are measured
    layout = find_layout(options.layout)
    name = options.drafter or layout.draft or REPLAY
    link = _link(options.link_preset)
    on, processors = machine.describe(), machine.free_processors()
    if name == NO_DRAFT:
        raise ConfigError("--mode speculation measures drafts, and --draft none leaves no drafter")
    checkpoint = open_model(options.model or layout.model or "demo")
    check_context(checkpoint, PROMPT_TOKENS + max(options.decode_tokens, SETTLE), "--decode-tokens")
    replay = Replay(vocabulary(checkpoint)) if name == REPLAY else None
    settings = Settings(
        context=max(PROMPT_TOKENS + options.decode_tokens, 256) + _TEACHER_TEXT,
        draft=None if replay is not None else name,
        connect_timeout=options.connect_timeout,
        rejoin_timeout=0.0,
        prefix_cache=False,
    )
    with ExitStack() as stack:
        if link is not None:
            stack.enter_context(installed(link))
        errors.print("loading the stages", soft_wrap=True)
        llm = stack.enter_context(
            LLM(
                options.layout,
                model=options.model,
                settings=settings,
                drafter=None if replay is None else lambda: replay,
            )
        )
        checkpoint = open_model(str(llm.layout.model))
        dtype = resolve_dtype(llm.layout.dtype, gpu=on_gpu())
        fetch(str(llm.layout.model), checkpoint, checkpoint.files, lambda _done, _total, _file: None)
        draft = model_in(name) if replay is None else None
        plain = stack.enter_context(_plain(options, checkpoint, dtype, draft))
        pinned = machine.pin_stages(llm.layout.stages, None if plain is None else plain.pid, processors)
        trials = Trials(options, llm, replay, plain, draft is not None)
        cases = trials.run()
        crowd = trials.crowd()
        rig = trials.rig()
    agreement = _agreement(options, llm, checkpoint, draft, dtype)
    in_flight = layout.num_stages
    now = Cut(
        tuple(stage.num_layers for stage in llm.layout.stages), _head_in_layers(checkpoint, llm.layout.num_layers)
    )
    points = [i / 50 for i in range(50)]
    return {
        "measured_on": {**on, "pinned": pinned, "link": None if link is None else asdict(link)},
        "layout": {"name": llm.layout.name, "layers": now.layers},
        "drafter": name,
        "trials": options.trials,
        "decode_tokens": options.decode_tokens,
        "cases": [case_document(case, in_flight) for case in cases],
        "crowd": crowd,
        "teacher_forced": agreement,
        "step_ms_by_rows": [{n: 1000 * s for n, s in stage.measured.items()} for stage in rig.stages],
        "draft_ms": 1000 * rig.draft,
        "link_ms": 1000 * rig.link,
        "draft_share_of_a_step": rig.draft / sum(stage.at(1) for stage in rig.stages),
        "curve": curve(rig, in_flight, points),
        "best_cuts": best_cuts(rig, now, in_flight),
        "links": link_effects(rig, {name: each.latency for name, each in PRESETS.items()} | {"3ms": 0.003}, in_flight),
        "gpu_like": curve(gpu_like(rig), in_flight, (0.6, 0.8, 0.9)),
    }


# -- systems --------------------------------------------------------------------------------------


def _link(name: str | None) -> LinkProfile | None:
    try:
        return None if name is None else preset(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _plain(
    options: SpeculationOptions, checkpoint: Checkpoint, dtype: str | None, draft: str | None
) -> Iterator[PlainMlxLm | None]:
    if not options.baseline:
        yield None
        return
    errors.print("loading the whole model in plain mlx-lm", soft_wrap=True)
    folder = None if draft is None else str(open_model(draft).folder.resolve())
    plain = PlainMlxLm(str(checkpoint.folder.resolve()), dtype, draft=folder)
    try:
        yield plain
    finally:
        plain.close()


def _agreement(
    options: SpeculationOptions, llm: LLM, checkpoint: Checkpoint, draft: str | None, dtype: str | None
) -> dict[str, Any] | None:
    """The draft model's agreement with its target on the text; ``None`` without a text or a draft model."""
    if options.text is None or draft is None or llm.tokenizer is None:
        return None
    texts = [
        llm.encode(text)[:_TEACHER_TEXT]
        for text in passages(options.text, max(_TEACHER_TEXTS, options.trials), 8 * _TEACHER_TEXT)
    ]
    child = ChildProcess("splitinfer.bench.speculation.agreement")
    child.send({
        "target": str(checkpoint.folder.resolve()), "draft": str(open_model(draft).folder.resolve()), "dtype": dtype,
        "texts": texts, "temperature": max(options.temperatures) or 1.0, "seed": options.seed,
        "vocab_size": llm.tokenizer.vocab_size,
    })  # fmt: skip
    try:
        return {**child.receive(), "text": options.text.name}
    finally:
        child.close()


def _head_in_layers(checkpoint: Checkpoint, num_layers: int) -> float:
    """The head's work in layers, by bytes, because decoding reads all weights once."""
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    others = [size for name, size in sizes.items() if ".layers." not in name]
    return max(others, default=0) * num_layers / max(1, in_layers)
