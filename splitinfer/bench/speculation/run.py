"""``splitinfer bench --mode speculation``: what drafts in flight are worth.

The systems take turns, trial by trial, with one stream: the same stages without drafts, with synchronous blocks of
several lengths, and with blocks in flight as the engine chooses them; plain mlx-lm in one process, and its own
speculative decoding where there is a draft model. All of them give the same tokens, up to
rounding (docs/understand/exactness.md).

With ``replay`` as drafter the acceptance is an option (``bench.speculation.replay``), and each of several values is a
case. With a real drafter the cases are temperatures, on passages of real text. Then eight requests run at once, with
drafts and without, because drafts must cost nothing there.
"""

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.mlx_lm import plain_mlx_lm
from splitinfer.bench.shared.options import Options, emulated_links
from splitinfer.bench.shared.systems import open_stages, plain_layout
from splitinfer.bench.speculation.replay import Replay
from splitinfer.bench.speculation.report import case_document
from splitinfer.bench.speculation.tables import plot, tables
from splitinfer.bench.speculation.trials import PROMPT_TOKENS, SETTLE, Trials
from splitinfer.engine.drafts.drafters import model_in
from splitinfer.errors import ConfigError
from splitinfer.llm import NO_DRAFT

__all__ = ["measure", "plot", "tables"]

REPLAY = "replay"


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    layout = options.found_layout
    name = options.draft or layout.draft or REPLAY
    link = options.link()
    on = machine.describe()
    if name == NO_DRAFT:
        raise ConfigError("--mode speculation measures drafts, and --draft none leaves no drafter")
    checkpoint = options.checkpoint
    check_context(checkpoint, PROMPT_TOKENS + max(options.decode_tokens, SETTLE), "--decode-tokens")
    replay = Replay(checkpoint.vocab_size or 2) if name == REPLAY else None
    context = max(PROMPT_TOKENS + options.decode_tokens, 256)
    settings = options.settings(context, draft=None if replay is not None else name)
    with ExitStack() as stack:
        if link is not None:
            stack.enter_context(emulated_links().installed(link))
        llm = open_stages(stack, options, settings, drafter=None if replay is None else lambda: replay)
        draft = model_in(name) if replay is None else None
        plain = stack.enter_context(plain_mlx_lm(llm.layout, draft=draft)) if options.baseline else None
        pinned = machine.pin_stages(llm.layout.stages, {} if plain is None else {"plain mlx-lm": plain.pid})
        trials = Trials(options, llm, replay, plain, draft is not None)
        cases = trials.run()
        crowd = trials.crowd()
        costs = llm.stats()["speculation"]
    return {
        "measured_on": {**on, "pinned": pinned, "link": None if link is None else asdict(link)},
        "layout": plain_layout(llm),
        "drafter": name,
        "trials": options.trials,
        "decode_tokens": options.decode_tokens,
        "cases": [case_document(case) for case in cases],
        "crowd": crowd,
        "step_ms_by_rows": [{n: 1000 * s for n, s in measured.items()} for measured in costs["step_seconds_by_rows"]],
        "draft_ms": 1000 * (costs["draft_seconds"] or 0.0),
        "link_ms": 1000 * costs["link_seconds"],
    }
