"""The records of a step on one stage, from its launch to its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from splitinfer.core.plan import SampledSlice, Save, Slice, StageFigures, StepPlan
from splitinfer.engine.device.device import Ticket
from splitinfer.engine.stage.head_drafts import HeadDrafts
from splitinfer.engine.stage.history import Row
from splitinfer.engine.stage.sampler import Scores, TokenChoice
from splitinfer.models.border.hidden_states import PackedRows
from splitinfer.models.caches.kv_blocks import KVBlock


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The arrays of a step, not yet evaluated.

    hidden: [T, d] for the next stage; ``None`` on the last one.
    packed: the rows of ``hidden`` that cross the link in fewer bytes.
    rows, choices: on the last stage, the rows that need logits, and the tokens chosen for them.
    pending: arrays that the step writes and only later steps read.
    scores: on the last stage, the log probabilities of prompts' tokens.
    """

    hidden: mx.array | None
    packed: PackedRows | None
    rows: tuple[Row, ...]
    choices: tuple[TokenChoice, ...]
    pending: Sequence[mx.array]
    scores: tuple[Scores, ...] = ()

    def outputs(self, also: Sequence[mx.array] = ()) -> list[mx.array]:
        """Return the arrays that the host reads when the step is done. They include one element of the last array
        written, which is evaluated last: a reference to the array itself would make the next step copy it instead of
        writing in place. ``also``: arrays written beside the graph, before its own.
        """
        found = [] if self.hidden is None else [self.hidden]
        found += [] if self.packed is None else self.packed.arrays()
        for choice in self.choices:
            found += [choice.tokens, choice.logprobs]
        found += [scores.logprobs for scores in self.scores]
        return found + [corner(array) for array in [*also, *self.pending][-1:]]


def corner(array: mx.array) -> mx.array:
    """Return one new element that depends on all of ``array``."""
    piece = array[tuple(slice(0, 1) for _ in array.shape)]
    return piece + piece


@dataclass(slots=True)
class Applied:
    """The results of a plan's commands, other than its slices.

    pending: arrays to compute with the step.
    for_disk: blocks to write. Their arrays are among the step's outputs, because later launches read the pool's.
    fetching, lacking: as in ``StageFigures``.
    bytes_copied, copying: the bytes of stored KV that were copied for sequences that begin with it, and the seconds;
        0 seconds if the step includes them.
    """

    pending: list[mx.array] = field(default_factory=list)
    for_disk: list[tuple[Save, KVBlock]] = field(default_factory=list)
    fetching: float = 0.0
    lacking: tuple[int, ...] = ()
    bytes_copied: int = 0
    copying: float = 0.0


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight on this process's device. (The coordinator's record from plan to result is ``StepInFlight``.)
    ``drafts``: the drafts after the step, with a ticket for each round."""

    plan: StepPlan
    slices: tuple[Slice, ...]  # the plan's slices that are computed here
    graph: StepGraph
    applied: Applied
    ticket: Ticket
    drafts: HeadDrafts
    draft_tickets: tuple[Ticket, ...]

    @property
    def seq_ids(self) -> list[int]:
        """The sequences whose arrays it writes: the sequences of its slices, and new ones that begin with stored KV."""
        return [*(part.seq_id for part in self.slices), *(new.seq_id for new in self.plan.new if new.blocks)]


@dataclass(frozen=True, slots=True)
class Finished:
    """A completed step: [T, d] hidden states, each followed by a row of taps if the drafter needs them, or sampled
    tokens on the last stage. ``packed``: the rows that cross the link in fewer bytes. ``figures``: makes the step's
    figures, given those of its way here and on."""

    plan: StepPlan
    figures: Callable[..., StageFigures]
    hidden: mx.array | None
    packed: PackedRows | None
    sampled: tuple[SampledSlice, ...]
