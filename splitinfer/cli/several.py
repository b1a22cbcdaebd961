"""`splitinfer serve --also`: several models behind one server, each with its layout, planned or named."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from splitinfer.cli.opening import layout_of
from splitinfer.cli.options import PipelineOptions
from splitinfer.config import find_layout
from splitinfer.console import load_llm
from splitinfer.core.kv.budget import STAGE_MARGIN
from splitinfer.core.residents import Bounds, num_together
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM
from splitinfer.llm.automatic import named
from splitinfer.llm.setup import model_of
from splitinfer.models.hub import open_model
from splitinfer.server.several import Entry

_NAMED = re.compile(r"(?:(?P<name>[\w.:-]+)=)?(?P<what>.+)")
_PAIRED = frozenset({"(paired)"})  # the workers of --auto, which are found when a model is loaded


def entries_of(options: PipelineOptions, also: Sequence[str], name: str | None, bounds: Bounds) -> list[Entry]:
    """The models of the options, then those of ``also``: ``[NAME=]MODEL``, or a layout's file in place of a model.
    ``name``: of the first.

    Raises:
        ConfigError: two have one name.
        SplitinferError: a layout or a model cannot be used.
    """
    wanted = [(name, options), *(_also(options, each) for each in also)]
    found = [_entry(own, one) for own, one in wanted]
    names = [each.name for each in found]
    if (twice := next((one for one in names if names.count(one) > 1), None)) is not None:
        raise ConfigError(f"two models are called {twice!r}; give one another name: --also NAME=MODEL")
    sharing = num_together([each.needs for each in found], bounds)
    return [replace(each, open=partial(_load, one, sharing)) for each, (_, one) in zip(found, wanted, strict=True)]


def _also(options: PipelineOptions, text: str) -> tuple[str | None, PipelineOptions]:
    match = _NAMED.fullmatch(text)
    if match is None:
        raise ConfigError(f"--also {text!r:.80} names no model; write [NAME=]MODEL, or a layout's file")
    what = match["what"]
    if what.endswith((".yaml", ".yml")):
        return match["name"], replace(options, layout=what, model=None, workers=None, auto=False)
    return match["name"], replace(options, layout=None, model=what)


def _entry(name: str | None, options: PipelineOptions) -> Entry:
    layout = None if options.layout is None else find_layout(options.layout)
    model = options.model or ("" if layout is None else model_of(layout))
    checkpoint = open_model(model)
    weights = sum(each.nbytes for each in checkpoint.tensors.values())
    if layout is None:
        workers = frozenset(named(options.workers or "")) or (_PAIRED if options.auto else frozenset())
        share, num_here = 1 / (1 + len(workers)), 1  # it is planned when it is loaded
    else:
        parts = [(part, stage.num_layers / len(stage.ranks)) for stage in layout.stages for part in stage.ranks]
        workers = frozenset(str(part.address or part.key) for part, _ in parts if part not in layout.here)
        share = sum(layers for part, layers in parts if part in layout.here) / layout.num_layers
        num_here = len(layout.here)
    needs = int(weights * share) + num_here * STAGE_MARGIN
    return Entry(name or Path(model).name, model, checkpoint.context_length, needs, workers, partial(_load, options, 1))


def _load(options: PipelineOptions, sharing: int) -> LLM:
    """``sharing``: models that share this machine's memory."""
    chosen, settings = layout_of(options), replace(options.settings, grows_context=True, models_here=sharing)
    return load_llm(chosen, options.model if isinstance(chosen, str) else None, settings)
