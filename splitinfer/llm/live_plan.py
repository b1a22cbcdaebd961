"""Asks a running engine what its steps have cost, for ``llm.rebalance``."""

from dataclasses import replace

from splitinfer.core.kv.format import format_of
from splitinfer.core.layout import Layout
from splitinfer.engine.coordinator.engine import Engine
from splitinfer.llm.automatic import ACCEPTANCE
from splitinfer.llm.rebalance import Rebalance, profiles_of, rebalance
from splitinfer.llm.settings import Settings
from splitinfer.machine.profile import DraftProfile
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.layer_kinds import describe
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from splitinfer.placement.asked import Aim, Asked


def rebalance_of(engine: Engine, checkpoint: Checkpoint, layout: Layout, settings: Settings, aim: Aim) -> Rebalance:
    """The best cut for ``aim``, beside the one in force.

    Raises:
        RequestError: as ``rebalance`` and ``profiles_of``.
    """
    scheduler = engine.scheduler
    dtype, kv_format = resolve_dtype(layout.dtype, gpu=on_gpu()), format_of(layout.kv_format)
    name = str(layout.model)
    # Graphs that are read are built without MLX's compiler, which the whole process shares.
    model = engine.carry_out(lambda: describe(checkpoint, dtype, name, kv_format=kv_format).profile)
    speculation, draft = scheduler.speculation, 0.0
    if speculation is not None and layout.draft is not None:
        draft = speculation.controller.draft or 0.0
        model = replace(model, draft=DraftProfile(layout.draft))
    asked = Asked(
        context=settings.context_of(model.context_length),
        acceptance=None if model.draft is None else ACCEPTANCE,
        token_budget=scheduler.config.token_budget,
    )
    return rebalance(profiles_of(model, layout, scheduler.costs, engine.pipeline.ready, draft), layout, asked, aim)
