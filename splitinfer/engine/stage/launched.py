"""A step on one stage, from its launch to its results: what a runner returns, and takes back."""

import time
from dataclasses import dataclass, replace

import mlx.core as mx

from splitinfer.core.costs.shape import Shape
from splitinfer.core.plan import SampledSlice, Save, Slice, StageFigures, StepPlan
from splitinfer.engine.device.device import Device, Ticket, Work, round_of
from splitinfer.engine.stage.head_drafts import HeadDrafts
from splitinfer.engine.stage.step_graph import StepGraph
from splitinfer.models.hidden_states import PackedRows
from splitinfer.models.kv_blocks import KVBlock
from splitinfer.models.tensors import HostRows, Rows


@dataclass(frozen=True, slots=True)
class Copied:
    """The cost of copying stored KV for sequences that begin with it. ``seconds``: 0 if it is a part of the step's."""

    num_bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def now(cls, arrays: list[mx.array]) -> "Copied":
        """Copy, and wait for it: it is rare and short, and its cost could not be measured otherwise."""
        began = time.monotonic()
        mx.eval(arrays)
        return cls(sum(array.nbytes for array in arrays), time.monotonic() - began) if arrays else cls()

    @classmethod
    def with_step(cls, arrays: list[mx.array]) -> "Copied":
        """Copy with the step: waiting for it would be waiting for the step under way."""
        return cls(sum(array.nbytes for array in arrays))


@dataclass(slots=True)
class Applied:
    """What carrying out a plan's commands other than its slices has left. ``for_disk``: blocks that ``store`` reads,
    their arrays among the step's outputs: the pool's own are read by later launches."""

    pending: list[mx.array]  # arrays to be computed with the step
    copied: Copied
    for_disk: list[tuple[Save, KVBlock]]
    fetching: float
    lacking: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftsUnderWay:
    """Drafts on the device, behind their step: a launch for each round."""

    drafts: HeadDrafts
    tickets: tuple[Ticket, ...]

    @classmethod
    def of(cls, device: Device, drafts: HeadDrafts, written: list[mx.array], began: float) -> "DraftsUnderWay | None":
        """Launch drafts, of which building ``began`` then, and with the last of them what they write."""
        if not drafts.rounds:
            device.launch((), written, Work(Shape()), began)
            return None
        work, last = round_of(len(drafts.counts)), len(drafts.rounds) - 1
        tickets = [
            device.launch((one,), written if number == last else (), work, time.monotonic() if number else began)
            for number, one in enumerate(drafts.rounds)
        ]
        return cls(drafts, tuple(tickets))


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way on the device: the stage's one record of it, to which the loop's refers."""

    plan: StepPlan
    slices: tuple[Slice, ...]  # those that are computed here
    graph: StepGraph
    applied: Applied
    ticket: Ticket
    drafts: DraftsUnderWay | None = None

    @property
    def seq_ids(self) -> list[int]:
        """The sequences whose arrays it writes: those computed, and those that begin with stored KV."""
        return [*(part.seq_id for part in self.slices), *(new.seq_id for new in self.plan.new if new.blocks)]

    @property
    def is_done(self) -> bool:
        """Whether somebody has waited for it; the drafts behind it may still be under way."""
        return self.ticket.span is not None


@dataclass(frozen=True, slots=True)
class Finished:
    """A completed step: [T, d] hidden states on an earlier stage, with a row of taps behind each if there are any;
    sampled tokens on the last one. ``packed``: the rows that cross the link in fewer bytes."""

    plan: StepPlan
    figures: StageFigures
    hidden: Rows | None
    packed: PackedRows | None
    sampled: tuple[SampledSlice, ...]

    def reduced_to(self, plan: StepPlan) -> "Finished":
        """The same step with only the slices of ``plan``. Their rows are copied by the host (``models.tensors``)."""
        if plan is self.plan:
            return self
        rows, at = list[int](), 0
        each = 1 if self.hidden is None else self.hidden.shape[0] // max(1, self.plan.num_tokens)
        for part in self.plan.slices:
            first, at = at, at + each * len(part.token_ids)
            rows += range(first, at) if part in plan.slices else ()
        hidden = HostRows.of(self.hidden, rows) if self.hidden is not None and rows else None
        packed = None if self.packed is None or hidden is None else self.packed.among(hidden, rows)
        wanted = {part.seq_id for part in plan.slices}
        sampled = tuple(one for one in self.sampled if one.seq_id in wanted)
        return replace(self, plan=plan, hidden=hidden, packed=packed, sampled=sampled)
