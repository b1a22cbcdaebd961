"""A running pipeline in its operator's hands: that part of ``LLM``. What it does, how it is run, another cut."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from splitinfer.core.layout import Layout as PlainLayout
from splitinfer.core.metrics.histogram import Histogram
from splitinfer.core.scheduler.room import seconds_until_room
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.serving_options import MAX_RUNNING, ServingOptions
from splitinfer.engine.coordinator.engine import Engine
from splitinfer.engine.coordinator.figures import Watch
from splitinfer.engine.coordinator.health import PipelineHealth
from splitinfer.errors import ConfigError
from splitinfer.llm.rebalance import Rebalance, live_figures, rebalance
from splitinfer.llm.setup import (
    as_layout,
    check_ranks,
    token_budget_of,
    with_layers,
)
from splitinfer.machine.profile import Profiles
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.placement.asked import Aim
from splitinfer.settings import Settings


class Operated:
    """A pipeline that runs. ``layout``, ``serving_options``: those in force."""

    layout: PlainLayout
    serving_options: ServingOptions
    settings: Settings
    _engine: Engine
    _checkpoint: Checkpoint
    _profiles: Profiles | None
    _recutting: threading.Lock

    def forget(self, session: str) -> None:
        """Free the cached KV of a session's requests."""
        self._engine.call(lambda loop: loop.scheduler.kv.forget(session))

    def tune(self, **serving_options: Any) -> None:
        """Change serving options (``Settings``) while requests are under way. They hold from the next step on, and
        change no token. ``None`` restores a default.

        Raises:
            ConfigError: there is no such option, or the value is out of range.
        """
        known = [each.name for each in fields(ServingOptions)]
        unknown = next((name for name in serving_options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"there is no option {unknown!r}; there are {', '.join(known)}")
        try:
            changed = replace(self.serving_options, **serving_options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{error}") from error
        pipeline = self._engine.pipeline

        def change(scheduler: Scheduler) -> None:  # also of another cut, whose stages may have other devices
            budget = token_budget_of(changed, (ready.device for ready in pipeline.ready))
            scheduler.tune(changed.policy_config, budget, changed.max_running or MAX_RUNNING)

        self._engine.call(lambda loop: loop.tune("rules", change))
        self.serving_options = changed

    def plan(self, aim: Aim = Aim.CHAT) -> Rebalance:
        """Compare the cut in force with the best for ``aim``, by what the pipeline's own steps have cost; ``recut``
        loads its layout.

        Raises:
            RequestError: no step has been computed yet, or no cut meets the aim.
        """
        with self._recutting:
            figures = live_figures(self._engine, self._checkpoint, self.layout, self.settings, self._profiles)
        return rebalance(figures, aim)

    def recut(self, cut: Sequence[int] | PlainLayout | Mapping[str, Any] | str | Path) -> float:
        """Load another cut of the model over its machines; returns the seconds in which nothing was computed.

        Requests wait meanwhile, and go on with the same tokens: what the stages held of them is computed again, or read
        from disk, as far as every stage has it there.

        ``cut``: the numbers of layers of the stages in their order, or a layout, whose stages replace the present ones.

        Raises:
            LayoutError: the layers are not the model's.
            SplitinferError: the cut cannot be loaded, or has no room for a request under way; the one before is in
                force again. Or the pipeline has failed, was closed, or is being drained.
        """
        with self._recutting:
            if isinstance(cut, Sequence) and not isinstance(cut, str):
                layout = with_layers(self.layout, cut)
            else:
                layout = replace(self.layout, stages=as_layout(cut, None).stages)
            layout.check(self.layout.num_layers)
            check_ranks(layout, self._checkpoint, self.settings)
            paused = self._engine.recut(layout)
            self.layout = layout
        return paused

    def stats(self) -> dict[str, Any]:
        """Counters and per-stage figures, as a plain dictionary; ``docs/operate/metrics.md`` explains each. Counters
        begin with the pipeline and never go back: what a while has brought is the difference of two readings."""
        return self._engine.stats()

    def request_figures(self) -> dict[str, Histogram]:
        """Distributions of requests' times and sizes since the start, for a program that reads them again and again."""
        return self._engine.figures.histograms()

    def watch_steps(self, watch: Watch | None) -> None:
        """Call ``watch`` with the record of every step that comes back from now on; ``None``: no more. The last caller
        has them. It is called on any thread, and must return at once; after ``stats`` it has had all that came back."""
        self._engine.figures.watch = watch

    def health(self) -> PipelineHealth:
        """The state of each stage, and what is waited for, if a worker is lost."""
        return self._engine.health()

    def seconds_until_room(self, nth: int = 1) -> float:
        """When to try again after ``QueueFull``: seconds until ``nth`` requests more could be queued, from what steps
        have cost and answers have lasted so far; between 1 and 60. From any thread."""
        scheduler = self._engine.scheduler
        running = list(scheduler.running.values())  # at once, as the engine's thread changes it
        usual = self._engine.figures.usual_request
        return seconds_until_room(running, scheduler.config, scheduler.costs, usual, nth)

    def drain(self, seconds: float) -> None:
        """Take no new request from now on; those under way have ``seconds`` to end, then they are aborted."""
        self._engine.drain(seconds)
