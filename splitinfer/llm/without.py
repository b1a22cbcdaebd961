"""Plans a layout without workers that are away, by what the machines were measured to do or have done so far."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from splitinfer.core.absence import Rest
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.loop.absent import Known
from splitinfer.errors import RequestError
from splitinfer.llm.automatic import ACCEPTANCE, profile_of
from splitinfer.llm.rebalance import figures_of, machine_of
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import ModelProfile, Profiles
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.memory import KV_SHARE
from splitinfer.placement.asked import Asked
from splitinfer.placement.without import alike, without


@dataclass(frozen=True)
class Without:
    """Finds the best layout without some workers (``engine.loop.absent.Replan``). Call it on the engine's thread:
    describing a model switches off MLX's compiler, which the whole process shares. ``written``: the layout when the
    pipeline was opened. ``context``: tokens of a sequence that every stage should have room for. ``measured``: what the
    machines were measured to do before, if so. ``models_here``: the number of models that share memory for KV."""

    checkpoint: Checkpoint
    written: Layout
    context: int
    measured: Profiles | None
    models_here: int = 1

    @cached_property
    def _described(self) -> tuple[ModelProfile, int]:
        """The model, and the bytes of unfused attention for each token of context."""
        return profile_of(self.written, self.checkpoint)

    def __call__(self, known: Known, gone: Collection[StageSpec], longest: int) -> Rest:
        layout, (model, scores) = known.layout, self._described
        acceptance = None if model.draft is None else ACCEPTANCE
        asked = Asked(self.context, acceptance=acceptance, kv_share=KV_SHARE / self.models_here)
        try:
            live = figures_of(model, layout, known.costs, known.ready, asked, self.measured)
        except RequestError:  # too few steps yet
            free = {layer.kind: Costs() for layer in model.layers}
            stages = zip(layout.stages, known.ready, strict=True)
            profiles = alike(Profiles(model, [machine_of(*stage, free, scores=scores) for stage in stages]))
            return without(profiles, asked, layout, gone, longest, is_known=False)
        machines = [replace(each, scores=max(each.scores, scores)) for each in live.profiles.machines]
        return without(replace(live.profiles, machines=machines), asked, layout, gone, longest)
