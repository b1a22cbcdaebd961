"""Asks a running engine what its steps have cost, for ``llm.rebalance``."""

from dataclasses import replace

from splitinfer.core.kv.format import format_of
from splitinfer.core.layout import Layout
from splitinfer.engine.coordinator.engine import Engine
from splitinfer.llm.automatic import ACCEPTANCE
from splitinfer.llm.rebalance import LiveFigures, Running, figures_of
from splitinfer.machine.profile import DraftProfile, Profiles
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.layer_kinds import describe
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from splitinfer.placement.asked import Asked
from splitinfer.settings import Settings

_ENOUGH = 100  # drafts from which their share that was right is taken


def live_figures(
    engine: Engine, checkpoint: Checkpoint, layout: Layout, settings: Settings, measured: Profiles | None
) -> LiveFigures:
    """What the cut in force and its machines do. ``measured``: what the machines were measured to do before, if so.

    Raises:
        RequestError: no step has been computed yet.
    """
    scheduler = engine.scheduler
    dtype, kv_format = resolve_dtype(layout.dtype, gpu=on_gpu()), format_of(layout.kv_format)
    name = str(layout.model)
    # Graphs that are read are built without MLX's compiler, which the whole process shares.
    model = engine.carry_out(lambda: describe(checkpoint, dtype, name, kv_format=kv_format).profile)
    speculation, draft, acceptance = scheduler.speculation, 0.0, None
    if speculation is not None and layout.draft is not None:
        draft = speculation.controller.draft or 0.0
        model = replace(model, draft=DraftProfile(layout.draft))
        tried, right = sum(speculation.counts.tried_at), sum(speculation.counts.accepted_at)
        acceptance = right / tried if tried >= _ENOUGH else ACCEPTANCE
    asked = Asked(
        context=settings.context_of(model.context_length),
        acceptance=acceptance,
        token_budget=scheduler.config.token_budget,
    )
    return figures_of(model, Running(layout, scheduler.costs, engine.pipeline.ready, draft), asked, measured)
