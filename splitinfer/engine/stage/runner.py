"""Carries out a StepPlan on one stage's layers: the same class on the coordinator and on every worker.

``launch`` builds a step's graph and gives it to the device. ``finish`` reads the results once the device is done, maybe
on another thread while the loop launches the next step. The last stage verifies drafts: it does not compute the slices
after a wrong draft, and their results have no tokens.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np

from splitinfer.core.codecs import NONE
from splitinfer.core.costs.shape import Shape
from splitinfer.core.plan import SampledSlice, Slice, StageFigures, StepPlan
from splitinfer.engine.device.device import Device, DeviceSpan, Ticket, Work, device_errors, round_of
from splitinfer.engine.stage.commands import Commands
from splitinfer.engine.stage.disk import StageDisk
from splitinfer.engine.stage.head_drafts import HeadDrafter, HeadDrafts
from splitinfer.engine.stage.history import History, Row, rows_of_prompts, verdicts_of
from splitinfer.engine.stage.launched import Finished, Launched, StepGraph
from splitinfer.engine.stage.masking import Masks, RawMasks, read_masks, with_masks
from splitinfer.engine.stage.outcomes import TrialOutcome
from splitinfer.engine.stage.prepared import Likely, PreparedStep, PreparedSteps, Snapshot
from splitinfer.engine.stage.sampler import Sampler, read, read_scores, scored
from splitinfer.errors import DeviceFailed, ProtocolError
from splitinfer.models.border.hidden_states import PackedRows, ReceivedRows
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.load.halves import Pair
from splitinfer.models.rows.kv_pool import KVPool
from splitinfer.models.rows.step import StepModel, arrays_to_evaluate
from splitinfer.system.gpu_roads import Road

log = logging.getLogger(__name__)


class StageRunner:
    """Owns a stage's model and its caches, ``pool``.

    Only the thread that loaded the model uses it. Another thread may call ``wait``, ``finish`` and ``store``, for one
    step after another in the order of their launches. If ``needs_verdict`` is true for a plan, all earlier steps must
    be finished before ``launch``.
    """

    def __init__(
        self,
        model: StageModel,
        stage: int,
        vocab_size: int,
        device: Device,
        disk: StageDisk | None = None,
        group: Pair | None = None,
    ) -> None:
        self._model, self._stage, self.device = model, stage, device
        self._step = StepModel(model)
        self.pool = KVPool(model)
        self.rolls_back = True  # whether the states of its layers can be rolled back within blocks of drafts
        self._sampler, self._disk = Sampler(vocab_size), disk
        self._vocab_size = vocab_size
        self._drafter = None if model.heads is None else HeadDrafter(model.heads, self._sampler)
        self._num_ids = model.num_embeddings
        self._histories: dict[int, History] = {}
        agree = list if group is None else group.all_of
        self._commands = Commands(self.pool, self._histories, disk, model.tower, agree, waits=device.computes_at_launch)
        self._codec = NONE
        self._prepared = PreparedSteps()
        self._failure: DeviceFailed | None = None  # of a launch

    def use_codec(self, codec: str) -> None:
        """Set the codec of prompts' rows on the link to the next stage (``core.codecs``)."""
        self._codec = codec

    def use(self, outcome: TrialOutcome) -> None:
        """Use what trials found: how to compute steps of many sequences, and how to roll states back."""
        log.debug("many sequences run by %s", outcome.way.value)
        self._step.use(outcome.way, shares_calls=outcome.shares_calls)
        self.rolls_back = outcome.rollback is not None
        self.pool.rollback = outcome.rollback or self.pool.rollback

    def choose_by_form(self) -> None:
        """Choose how to compute steps by which graphs can be built, without trials, for a stage that is only timed."""
        self._step.choose_by_form()

    def reset(self) -> None:
        """Forget every sequence and block, and the codec to the next stage. Call while no step is in flight."""
        self._codec = NONE
        self._prepared.clear()
        self._failure = None
        self.pool.clear()
        self._histories.clear()
        self._commands.clear()
        if self._model.experts is not None:
            self._model.experts.forget()
        mx.clear_cache()

    def close(self) -> None:
        """End the threads of the stage, because it is used no more."""
        if self._model.experts is not None:
            self._model.experts.close()

    # -- steps ---------------------------------------------------------------------------------

    def check(self, plan: StepPlan, longest: int) -> None:
        """Check a peer's plan, before its rows arrive. ``longest``: the tokens of the longest sequence that has room.

        Raises:
            ProtocolError: the stage cannot carry out the plan. Peers are not trusted: this ends the session.
        """
        if any(part.end > longest for part in plan.slices):
            raise ProtocolError(f"step {plan.step} goes beyond the {longest:,} tokens that the stage has room for")
        known = range(2**31 if self._num_ids is None else self._num_ids)
        unknown = next((t for part in plan.slices for t in (*part.token_ids, *part.scored) if t not in known), None)
        if unknown is not None:
            raise ProtocolError(f"step {plan.step} has token id {unknown}, and the model has {len(known):,}")

    def read_masks(self, masks: RawMasks) -> Masks | None:
        """Return the masks that a step brought. Return None if there are none, or if this is not the last stage.

        Raises:
            ProtocolError: a mask has the wrong size.
        """
        if not masks or not self._model.is_last:
            return None
        found = read_masks(masks, self._vocab_size)
        return lambda: found

    @device_errors(of_memory=True)
    def launch(
        self,
        plan: StepPlan,
        hidden: mx.array | ReceivedRows | None,
        masks: Masks | None = None,
        under_way: Sequence[Launched] = (),
    ) -> Launched:
        """Launch a step.

        Args:
            hidden: [T, d], the rows of all its slices in order; ``None`` on the first stage.
            masks: on the last stage, the masks of its rows or None; called when everything but sampling is built.
            under_way: the earlier steps that may not be done, the oldest first.

        Raises:
            ProtocolError: the rows do not fit the plan.
            DeviceFailed: the device failed.
        """
        began = time.monotonic()
        rows, wanted = 0 if hidden is None else hidden.shape[0], plan.num_tokens * self._model.rows_in
        if rows != wanted:
            raise ProtocolError(
                f"step {plan.step} has {rows} hidden states for stage {self._stage}, which takes {wanted}"
            )
        received = hidden.buffer if isinstance(hidden, ReceivedRows) else None
        prepared = self._prepared.take(plan, received, masks)
        applied = self._commands.apply(plan)
        if prepared is None:
            hidden = hidden.array() if isinstance(hidden, ReceivedRows) else hidden
            slices, parts, graph = self._graph_of(plan, hidden, masks)
            outputs, pending = graph.outputs(applied.pending), [*applied.pending, *graph.pending]
            graph = replace(graph, pending=())  # a reference to these arrays would make the next step copy them
        else:
            slices, parts, graph, outputs = plan.slices, [], prepared.graph, prepared.outputs
            pending = [*applied.pending, *prepared.pending]
            self._fill(prepared, plan, received, masks)
        outputs += [array for _, block in applied.for_disk for array in block.arrays()]
        applied.pending = []
        self._end_first(slices, under_way)
        try:
            ticket = self.device.launch(outputs, pending, Work(Shape.of(slices)), began)
            drafts, tickets = self._draft(slices, parts, graph)
        except DeviceFailed as failure:
            self._failure = failure
            raise
        self._prepared.note(plan, masks)
        plan = plan if self._model.is_last or len(slices) == len(plan.slices) else replace(plan, slices=slices)
        return Launched(plan, slices, graph, applied, ticket, drafts, tickets)

    def _draft(
        self, slices: tuple[Slice, ...], parts: list[SequenceRows], graph: StepGraph
    ) -> tuple[HeadDrafts, tuple[Ticket, ...]]:
        """Launch the drafts after a step, if this stage makes drafts: one launch for each round. The last one also
        computes the arrays that the drafts write."""
        hidden, self._step.tapped = self._step.tapped, None
        if self._drafter is None or hidden is None or not parts:
            return HeadDrafts(), ()
        began = time.monotonic()
        drafts = self._drafter.of(slices, parts, hidden, graph.rows, graph.choices)
        written, last = self._drafter.written(parts), len(drafts.rounds) - 1
        if not drafts.rounds:
            self.device.launch((), written, Work(Shape()), began)
        tickets = [
            self.device.launch(
                (one,),
                written if number == last else (),
                round_of(len(drafts.counts)),
                time.monotonic() if number else began,
            )
            for number, one in enumerate(drafts.rounds)
        ]
        return drafts, tuple(tickets)

    def _end_first(self, slices: tuple[Slice, ...], under_way: Sequence[Launched]) -> None:
        """Wait for steps in flight if launching now would copy too many of the arrays that they write."""
        # A thread has waited for the other steps; drafts after them may still be in flight.
        in_flight = [step for step in under_way if step.ticket.span is None] if under_way else []
        if in_flight:
            step = [part.seq_id for part in slices]
            first = self.pool.must_end_first(step, [each.seq_ids for each in in_flight])
            for each in in_flight[:first] if Road.LAUNCH_AHEAD.is_open else in_flight:
                self.wait(each)

    def _graph_of(
        self, plan: StepPlan, hidden: mx.array | None, masks: Masks | None
    ) -> tuple[tuple[Slice, ...], list[SequenceRows], StepGraph]:
        """Build the graph of a plan; return the slices that are computed here, their parts, and the graph."""
        slices, hidden = self._without_rejected(plan, hidden)
        hidden = hidden if self._model.tower is None else self._model.tower.rows(slices)
        parts, rows = [], list[Row]()
        for part in slices:
            caches = self.pool.at(part.seq_id, part.start)
            block = self.pool.begin(part.seq_id, part.num_drafts, follows=part.begins_with_draft)
            own = [*self._histories[part.seq_id].rows(part)] if self._model.is_last else []
            parts.append(SequenceRows(caches, part.start, len(part.token_ids), part.num_rows, block))
            rows += own
        token_ids = [t for part in slices for t in part.token_ids]
        return slices, parts, self._build(slices, parts, token_ids, hidden, tuple(rows), masks)

    def _build(
        self,
        slices: tuple[Slice, ...],
        parts: list[SequenceRows],
        token_ids: list[int] | mx.array,
        hidden: mx.array | None,
        rows: tuple[Row, ...],
        masks: Masks | None = None,
    ) -> StepGraph:
        """Build the graph of a step."""
        outputs = self._step.run(parts, token_ids, hidden) if parts else []
        # These include states that the output does not depend on. Otherwise the graph would grow from step to step.
        pending = arrays_to_evaluate(parts)
        joined = (mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]) if outputs else None
        if not self._model.is_last:
            return StepGraph(joined, self._pack(slices, joined), (), (), pending)
        if masks is not None:
            rows = with_masks(slices, rows, masks())
        logits, scores = scored(mx.zeros((0, 1)) if joined is None else joined, slices, self._histories)
        choices = tuple(self._sampler.choose(logits, rows)) if rows else ()
        return StepGraph(None, None, rows, choices, pending, scores)

    # -- graphs built ahead --------------------------------------------------------------------

    @device_errors(of_memory=True)
    def prepare_next(self) -> bool:
        """Build the graph of a likely step, when there is nothing else to do. Return whether there may be another one.

        Raises:
            DeviceFailed: the device had no memory left. Only ``reset`` may be called afterwards.
        """
        likely = Likely() if self._drafter is not None else self._prepared.next_wanted()
        if likely.slices and self._can_prepare(likely.slices):
            self._prepared.add(self._prepare(likely))
        return bool(likely.slices)

    def _can_prepare(self, slices: tuple[Slice, ...]) -> bool:
        if not (self._model.traceable and Road.PREPARED_STEPS.is_open):
            return False  # its graph depends on numbers that are not known yet, or graphs ahead are switched off
        histories = [self._histories.get(part.seq_id) for part in slices]
        # A penalty, or a model that reads tokens, makes the graph depend on tokens that are not known yet.
        return not self._model.reads_tokens and all(
            one is not None and not one.params.depends_on_tokens for one in histories
        )

    def _prepare(self, likely: Likely) -> PreparedStep:
        slices, masks = likely.slices, {one: mx.array(np.zeros(self._vocab_size, np.bool_)) for one in likely.masked}
        parts = [SequenceRows(self.pool.at(part.seq_id, part.start), part.start, 1, 1) for part in slices]
        snapshot = Snapshot(part.caches for part in parts)
        ids, raw = mx.array(np.zeros(len(slices), np.int32)), None
        hidden = None
        if self._model.row_spec is not None:
            width, dtype = self._model.row_spec
            raw = mx.array(np.zeros((len(slices) * self._model.rows_in, width), np.dtype(f"uint{8 * dtype.size}")))
            hidden = raw.view(dtype)  # ``fill`` writes its memory later; the view needs no device
        last = [(part, self._histories[part.seq_id]) for part in slices] if self._model.is_last else []
        rows = tuple(Row(one.params, one.seed, part.end, (), mask=masks.get(part.seq_id)) for part, one in last)
        return PreparedStep(slices, self._build(slices, parts, ids, hidden, rows), (ids, raw), snapshot, masks)

    def _fill(self, prepared: PreparedStep, plan: StepPlan, received: memoryview | None, masks: Masks | None) -> None:
        """Write the inputs of a prepared step, and add its tokens to the sequences' histories."""
        prepared.fill(plan.slices, received, masks)
        if self._model.is_last:
            for part in plan.slices:
                self._histories[part.seq_id].tokens[part.start :] = part.token_ids

    def _pack(self, slices: tuple[Slice, ...], hidden: mx.array | None) -> PackedRows | None:
        """Return the prompts' rows of a step, packed. Return None if the link to the next stage has no codec, or if no
        row may be packed."""
        if self._codec == NONE or self._model.is_last or hidden is None or self._model.sends_whole_numbers:
            return None
        rows = rows_of_prompts(slices, self._histories, self._model.rows_out)
        return PackedRows.of(self._codec, hidden, rows) if rows else None

    def needs_verdict(self, plan: StepPlan) -> bool:
        """Return whether all steps in flight must be finished before this plan is launched, because they decide which
        of its slices are rejected."""
        return self._model.is_last and any(part.begins_with_draft for part in plan.slices)

    def _without_rejected(self, plan: StepPlan, hidden: mx.array | None) -> tuple[tuple[Slice, ...], mx.array | None]:
        """Return the slices of a plan that are not rejected, and their rows of ``hidden``."""
        if not self.needs_verdict(plan):
            return plan.slices, hidden
        keep, rows, at = list[Slice](), list[int](), 0
        for part in plan.slices:
            first = at
            at += len(part.token_ids) * self._model.rows_in
            history = self._histories.get(part.seq_id)
            if history is None or not part.is_rejected(len(history.tokens), history.next):
                keep.append(part)
                rows += range(first, at)
        if hidden is not None and len(rows) < at:
            hidden = hidden[mx.array(rows, dtype=mx.int32)] if rows else None
        return tuple(keep), hidden

    def wait(self, launched: Launched) -> DeviceSpan:
        """Wait until the device is done with a step.

        Raises:
            DeviceFailed: the device failed.
        """
        return self.device.wait(launched.ticket)

    @device_errors(of_memory=True)
    def finish(self, launched: Launched) -> Finished:
        """Wait until a step is done, and read its results.

        Raises:
            DeviceFailed: the device failed.
        """
        span = self.wait(launched)
        if self._failure is not None:
            raise self._failure  # of the next launch: MLX reports this step's failure there
        graph, figures = launched.graph, self._figures(launched, span)
        tokens = read(graph.choices, graph.rows)
        spans = [self.device.wait(ticket) for ticket in launched.draft_tickets]
        if drafts := launched.drafts.read():
            figures = partial(figures, drafting=sum(one.ended - one.started for one in spans))
        verdicts: tuple[SampledSlice, ...] = ()
        if self._model.is_last:
            scores = read_scores(graph.scores)
            verdicts = verdicts_of(launched.plan, launched.slices, tokens, self._histories, scores)
        verdicts = tuple(replace(one, drafts=drafts.get(one.seq_id, ())) for one in verdicts) if drafts else verdicts
        return Finished(launched.plan, figures, graph.hidden, graph.packed, verdicts)

    def store(self, launched: Launched) -> None:
        """Write a finished step's saved blocks to disk, in the background. Call after its results are sent."""
        if self._disk is not None:
            for save, block in launched.applied.for_disk:
                self._disk.write(save, block)

    def _figures(self, launched: Launched, span: DeviceSpan) -> Callable[..., StageFigures]:
        """Return what makes the figures of a step, with the keys of the blocks written to disk since the previous
        step."""
        applied, experts = launched.applied, self._model.experts
        return partial(
            StageFigures,
            self._stage,
            span.started,
            span.ended,
            bytes_copied=applied.bytes_copied,
            copying=applied.copying,
            rows=sum(len(part.token_ids) for part in launched.slices),
            fetching=applied.fetching,
            lacking=applied.lacking,
            written=() if self._disk is None else self._disk.written(),
            **({} if experts is None else experts.take_counts()),
        )
