"""Keeps account of workers that stay away: requests a layout without them, searches for them, takes them in again.

    the engine's thread   lost, rest, loaded
    search                asks the workers that are left out, every few seconds, and has the loop call ``_came``

``core.absence`` and ``placement.without`` decide; this module asks workers and keeps what is known of them.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from splitinfer.core.absence import LossTimes, Rest, part_again, pays, tokens_to_come, told
from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.fleet.pipeline import Pipeline
from splitinfer.engine.loop.loop import Loop, WantedCut
from splitinfer.engine.loop.shared import Shared
from splitinfer.errors import SplitinferError
from splitinfer.wire.messages import Ready

log = logging.getLogger(__name__)

_SEARCH_EVERY = 2.0  # seconds between two questions to a worker that is away
_LOOK_AGAIN = 5.0  # seconds between two attempts to do without a worker
_AFTER_FAILURE = 30.0  # seconds until another layout is tried, after one that could not be loaded


class Known(NamedTuple):
    """A layout, the costs of its steps so far, and the Ready message of each stage."""

    layout: Layout
    costs: CostModel
    ready: Sequence[Ready]


Replan = Callable[[Known, Collection[StageSpec], int], Rest]
"""Returns the best layout without some workers, with room for so many tokens of a sequence. Raises CannotFit."""


class Absent:
    """The workers that are away. ``replan``: None if requests only wait for them. ``leave_after``: seconds until the
    others go on without a worker."""

    def __init__(
        self, loop: Loop, pipeline: Pipeline, shared: Shared, replan: Replan | None, leave_after: float
    ) -> None:
        self._loop, self._pipeline, self._shared = loop, pipeline, shared
        self._replan, self._leave_after = replan, leave_after
        self._written, self._losses = pipeline.layout, LossTimes()
        self._known = Known(pipeline.layout, loop.scheduler.costs, pipeline.ready)
        self._gone: tuple[StageSpec, ...] = ()
        self._coming: tuple[Rest, tuple[StageSpec, ...]] | None = None  # a requested layout, and the workers without it
        self._look_at = self._come_at = float("-inf")
        self._has_said = False  # whether it was logged since the loss that the others cannot do without a worker
        self._pause: float | None = None  # the seconds that loading took last
        self._ended, self._thread = threading.Event(), threading.Thread()

    # -- lost ----------------------------------------------------------------------------------

    def lost(self, now: float) -> None:
        """Note the loss of a worker."""
        self._losses.add(self._pipeline.lost_worker or "", now)
        if not self._gone:  # some may have moved to other addresses
            self._written = self._pipeline.layout
            self._known = Known(self._written, self._loop.scheduler.costs, self._pipeline.ready)
        self._look_at, self._has_said = float("-inf"), False

    def rest(self, waited: float, now: float) -> Rest | None:
        """Return the layout to load without the workers that do not answer. Return None if it is too early, if all
        answer, or if the others cannot do without them, which is logged once. ``waited``: seconds since the loss."""
        lost = self._pipeline.lost_worker or ""
        is_due = waited >= self._leave_after or self._losses.flaps([lost], now)
        if self._replan is None or now < self._look_at:
            return None
        self._look_at = now + (_LOOK_AGAIN if is_due else self._leave_after - waited)
        remote = [one for one in self._written.workers if not one.is_local]
        gone = tuple(one for one in remote if (self._pipeline.find(one) is None if is_due else one.name == lost))
        if not gone:
            return None
        try:
            rest = self._replan(self._known, gone, self._longest())
        except SplitinferError as error:
            if not self._has_said:
                self._has_said = True
                log.warning("%s; requests wait for it", error)
            return None
        self._coming = (rest, gone) if is_due else None
        return rest if is_due else None

    def _longest(self) -> int:
        scheduler = self._loop.scheduler
        each = (scheduler.config.longest(seq) for seq in (*scheduler.waiting, *scheduler.running.values()))
        return max(each, default=BLOCK)

    # -- loaded --------------------------------------------------------------------------------

    def loaded(self, rest: Rest, seconds: float) -> None:
        """Note that another layout is in force, and say what that means for the workers that are away."""
        coming, self._coming, self._pause = self._coming, None, seconds
        if coming is None or coming[0] is not rest:  # a person wanted it
            self._written, self._gone, self._shared.absent = rest.layout, (), None
            return
        before, self._gone = self._gone, coming[1]
        names, now = [one.name for one in self._gone], time.monotonic()
        self._shared.absent = told(names, rest, flaps=self._losses.flaps(names, now)) if names else None
        if names:
            log.warning("%s", self._shared.absent)
            if not self._thread.is_alive():
                self._thread = threading.Thread(target=self._search, name="search", daemon=True)
                self._thread.start()
        else:
            layers = ", ".join(f"{stage.name} {stage.num_layers}" for stage in rest.layout.stages)
            log.warning("%s: %s", part_again([one.name for one in before]), layers)

    def failed(self, now: float) -> None:
        """Note that a layout could not be loaded."""
        self._coming, self._look_at = None, now + _AFTER_FAILURE
        self._come_at = self._look_at

    # -- back ----------------------------------------------------------------------------------

    def _search(self) -> None:
        while not self._ended.wait(_SEARCH_EVERY):
            gone = () if self._coming is not None else self._gone
            if found := {one.name: address for one in gone if (address := self._pipeline.find(one)) is not None}:
                self._shared.inbox.put(partial(self._came, found))

    def _came(self, found: dict[str, str], loop: Loop) -> None:
        """Request the layout with the workers that answer again, if that is worth it now."""
        now = time.monotonic()
        still = tuple(one for one in self._gone if one.name not in found)
        if len(still) == len(self._gone) or self._coming is not None or now < self._come_at:
            return
        if loop.requests and (self._losses.flaps(found, now) or not self._pays()):
            return
        moved = {one.name: (found[one.name], one.key) for one in self._gone if one.name in found}
        written = self._written = self._written.with_found(moved)
        assert self._replan is not None
        try:
            rest = self._replan(self._known, still, self._longest()) if still else Rest(written)
        except SplitinferError:
            return
        self._coming = (rest, still)
        loop.wanted.append(WantedCut(rest, Future()))

    def _pays(self) -> bool:
        """Return whether open requests end sooner if the written layout is loaded now."""
        scheduler = self._loop.scheduler
        open_ = [*scheduler.waiting, *scheduler.running.values()]
        shape = Shape(len(open_), sum(len(seq.tokens) for seq in open_))
        tokens = max((tokens_to_come(seq.num_generated, seq.params.max_tokens) for seq in open_), default=0)
        size = scheduler.config.token_budget
        reading = [self._known.costs.reading(0, len(seq.tokens), size) for seq in open_]
        pause = None if None in (*reading, self._pause) else sum(filter(None, (*reading, self._pause)))
        return pays(scheduler.costs.predicted(shape), self._known.costs.predicted(shape), tokens, pause)

    def close(self) -> None:
        """End the search."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
