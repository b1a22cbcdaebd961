"""``splitinfer bench --mode speculation``: what drafts in flight are worth.

The systems take turns, trial by trial, with one stream: the same stages without drafts, with synchronous blocks of
several lengths, and with blocks in flight as the controller chooses them; plain mlx-lm in one process, and its own
speculative decoding where there is a draft model. All of them give the same tokens, up to
rounding (docs/understand/exactness.md).

With ``replay`` as drafter the acceptance is an option (``bench.speculation.replay``), and each of several values is a
case. With a real drafter the cases are temperatures, on passages of real text. Then eight requests run at once, with
drafts and without, because drafts must cost nothing there.
"""

from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.mlx_lm import fetched, plain_mlx_lm
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.systems import open_stages, plain_layout
from splitinfer.bench.shared.texts import passages
from splitinfer.bench.speculation.replay import Replay
from splitinfer.bench.speculation.report import Cut, best_cuts, case_document, curve
from splitinfer.bench.speculation.tables import plot, tables
from splitinfer.bench.speculation.trials import PROMPT_TOKENS, SETTLE, TEMPERATURES, Trials
from splitinfer.engine.drafts.drafters import model_in
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM, NO_DRAFT
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model
from transports.emulated import installed

__all__ = ["measure", "plot", "tables"]

REPLAY = "replay"
_TEACHER_TEXT, _TEACHER_TEXTS = 400, 12  # tokens of a passage that both models read, and number of passages


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    layout = options.found_layout
    name = options.draft or layout.draft or REPLAY
    link = options.link()
    on, processors = machine.describe(), machine.free_processors()
    if name == NO_DRAFT:
        raise ConfigError("--mode speculation measures drafts, and --draft none leaves no drafter")
    checkpoint = options.checkpoint
    check_context(checkpoint, PROMPT_TOKENS + max(options.decode_tokens, SETTLE), "--decode-tokens")
    replay = Replay(checkpoint.vocab_size or 2) if name == REPLAY else None
    context = max(PROMPT_TOKENS + options.decode_tokens, 256) + _TEACHER_TEXT
    settings = options.settings(context, draft=None if replay is not None else name)
    with ExitStack() as stack:
        if link is not None:
            stack.enter_context(installed(link))
        llm = open_stages(stack, options, settings, drafter=None if replay is None else lambda: replay)
        draft = model_in(name) if replay is None else None
        plain = stack.enter_context(plain_mlx_lm(llm.layout, draft=draft)) if options.baseline else None
        pinned = machine.pin_stages(llm.layout.stages, None if plain is None else plain.pid, processors)
        trials = Trials(options, llm, replay, plain, draft is not None)
        cases = trials.run()
        crowd = trials.crowd()
        rig, steps = trials.rig(), llm.stats()["speculation"]["step_seconds_by_rows"]
    agreement = _agreement(options, llm, draft)
    in_flight = layout.num_stages
    layers = tuple(stage.num_layers for stage in llm.layout.stages)
    now = Cut(layers, _head_in_layers(checkpoint, llm.layout.num_layers))
    points = [i / 50 for i in range(50)]
    return {
        "measured_on": {**on, "pinned": pinned, "link": None if link is None else asdict(link)},
        "layout": plain_layout(llm),
        "drafter": name,
        "trials": options.trials,
        "decode_tokens": options.decode_tokens,
        "cases": [case_document(case, in_flight) for case in cases],
        "crowd": crowd,
        "teacher_forced": agreement,
        "step_ms_by_rows": [{n: 1000 * s for n, s in measured.items()} for measured in steps],
        "draft_ms": 1000 * rig.draft,
        "link_ms": 1000 * rig.link,
        "draft_share_of_a_step": rig.draft / rig.computing(1),
        "curve": curve(rig, in_flight, points),
        "best_cuts": best_cuts(rig, now, in_flight),
    }


def _agreement(options: Options, llm: LLM, draft: str | None) -> dict[str, Any] | None:
    """The draft model's agreement with its target on the text; ``None`` without a text or a draft model."""
    if options.text is None or draft is None or llm.tokenizer is None:
        return None
    count = max(_TEACHER_TEXTS, options.trials)
    texts = [llm.encode(text)[:_TEACHER_TEXT] for text in passages(options.text, count, 8 * _TEACHER_TEXT)]
    target, dtype = fetched(llm.layout)
    with closing(ChildProcess("splitinfer.bench.speculation.agreement")) as child:
        answer = child.ask({
            "target": target, "draft": str(open_model(draft).folder.resolve()), "dtype": dtype, "texts": texts,
            "temperature": max(TEMPERATURES), "seed": options.seed, "vocab_size": llm.tokenizer.vocab_size,
        })  # fmt: skip
    return {**answer, "text": options.text.name}


def _head_in_layers(checkpoint: Checkpoint, num_layers: int) -> float:
    """The head's work in layers, by bytes, because decoding reads all weights once."""
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    others = [size for name, size in sizes.items() if ".layers." not in name]
    return max(others, default=0) * num_layers / max(1, in_layers)
