"""A drafter that is a small model with the same tokenizer, whole on the coordinator.

It samples with the key of the position, as the target does: the same noise makes both choose the same token more often.
Its KV holds the tokens of each sequence's last stream. Tokens that the current stream does not share are rolled back.

Drafts for several sequences are made in *rounds*: one step of the model with a row for each sequence gives one draft
for each. In the first round a sequence catches up with the tokens since its last draft. Under an answer's rules it
draws only allowed tokens, and does not compute forced ones. On a GPU the next round is launched before the current one
is read: its input is the array, not the numbers.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Self

import mlx.core as mx

from splitinfer.core.kv.rewind import UNLIMITED, WITHIN_DRAFTS
from splitinfer.core.sampling_params import REPETITION_CONTEXT, SamplingParams
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.device.device import Device, Ticket, default_device, round_of
from splitinfer.engine.stage.history import Row
from splitinfer.engine.stage.launched import corner
from splitinfer.engine.stage.loader import OnLoading
from splitinfer.engine.stage.masking import mask_of
from splitinfer.engine.stage.sampler import Sampler
from splitinfer.errors import ModelError
from splitinfer.models.border.tensors import numbers_of
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.folder.hub import fetch
from splitinfer.models.load.loader import count_layers, load_stage, resolve_dtype, survey
from splitinfer.models.memory import check_fit
from splitinfer.models.rows.kv_pool import MAX_COPIED
from splitinfer.models.rows.step import StepModel, arrays_to_evaluate, nbytes
from splitinfer.system.gpu_roads import Road
from splitinfer.wire.messages import Progress

_CHUNK = 128  # tokens of a prompt at a time; a result that arrives meanwhile waits for them
_FEW = 8  # tokens that are computed together with the next draft
_MAX_SEQUENCES = 16  # sequences whose KV is cached; more only if a round has more


@dataclass(slots=True)
class _CacheEntry:
    """One sequence's KV, and the tokens in it. ``params``: the sequence's parameters, without log probabilities."""

    caches: SequenceCaches
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Line:
    """A sequence that gets drafts. ``index``: its place in the caller's list; ``answer``: its stream after the prompt,
    with the drafts made so far; ``given``: its first drafts, if they are already known."""

    index: int
    seq: Sequence
    entry: _CacheEntry
    answer: list[int]
    given: Seq[int] = ()
    has_ended: bool = False

    def force(self, number: int, most: int) -> None:
        """Make forced tokens the next drafts. The stream has ``number`` drafts, and may have at most ``most``."""
        if self.seq.rules is None or self.has_ended or number < len(self.given) or number >= most:
            return
        if forced := self.seq.rules.jump_forward(self.answer, most - number):
            self.given = [*self.answer[len(self.answer) - number :], *forced]

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens from a position on."""
        num_prompt = self.seq.num_prompt_tokens
        return [*self.seq.sent(start, num_prompt), *self.answer[max(0, start - num_prompt) :]]

    def row(self, num_unknown: int, vocab_size: int) -> Row:
        """Return the row of the token that follows the stream and ``num_unknown`` further tokens, which are not known
        yet."""
        params, length = self.entry.params, self.seq.num_prompt_tokens + len(self.answer)
        before = tuple(self.tokens_from(max(0, length - REPETITION_CONTEXT)))
        answer = tuple(self.answer) if params.has_answer_penalty else ()
        masks = [] if self.seq.rules is None else self.seq.rules.masks(self.answer, len(self.answer))
        mask = mask_of(masks[0], vocab_size) if masks and masks[0] is not None else None
        return Row(params, self.seq.seed, length + num_unknown, before, answer, mask)


@dataclass(frozen=True, slots=True)
class _Round:
    """A step in flight on the device, with a token for each of its lines: ``tokens``, [lines], for the next step, and
    ``ticket.outputs`` for the host."""

    lines: tuple[_Line, ...]
    tokens: mx.array
    ticket: Ticket


class DraftModel:
    """Drafts with ``model``, a whole model. ``vocab_size``: the tokenizer's vocabulary size, for which noise is drawn.

    If the device computes while Python continues, a round is launched before the previous one is read.
    """

    def __init__(self, name: str, model: StageModel, vocab_size: int) -> None:
        self.name = name
        self._model, self._vocab_size = model, vocab_size
        self._step = StepModel(model)
        self._sampler = Sampler(vocab_size)
        self._entries: OrderedDict[int, _CacheEntry] = OrderedDict()
        self._most_entries = _MAX_SEQUENCES
        self._device = default_device()

    @classmethod
    def load(
        cls, name: str, checkpoint: Checkpoint, dtype: str, vocab_size: int, kv_tokens: int, report: OnLoading
    ) -> Self:
        """Read the model into memory, with room for the KV of ``kv_tokens`` tokens. ``report`` receives the progress.

        Raises:
            ModelError: the model is missing, does not fit, or cannot be rolled back after a wrong draft.
        """
        resolved = resolve_dtype(dtype)
        num_layers = count_layers(checkpoint)
        found = survey(checkpoint, 0, num_layers, resolved)
        if found.rewind is not UNLIMITED and found.rewind <= WITHIN_DRAFTS:
            raise ModelError(
                f"draft {name} cannot be rolled back after a wrong draft, because its layers keep a state; "
                "choose one with attention only, or draft with 'ngram'"
            )
        free = check_fit(found.need, kv_tokens, f"draft {name}", "choose a smaller one, or a smaller --context")
        report(Progress("survey", 0, found.need.weights, found.need.warning(kv_tokens, free)))
        fetch(name, checkpoint, found.tensors, lambda *at: report(Progress("download", *at)))
        model = load_stage(checkpoint, found, 0, num_layers, resolved, lambda *at: report(Progress("load", *at)))
        return cls(name, model, vocab_size)

    # -- the Drafter protocol ------------------------------------------------------------------

    def use_device(self, device: Device) -> None:
        """Compute on a device from now on."""
        self._device = device

    def prepare(self, seq: Sequence) -> bool:
        """Compute the KV of one chunk of the sequence's tokens. Return false if no chunk was missing."""
        entry = self._rewound(seq)
        start, end = len(entry.tokens), seq.num_streamed - 1
        if end - start <= _FEW:
            return False
        chunk = seq.streamed(start, min(end, start + _CHUNK))
        parts = [SequenceRows(entry.caches, start, len(chunk))]
        self._step.run(parts, chunk, None)
        written = arrays_to_evaluate(parts)
        self._device.wait(self._device.launch([corner(written[-1])], written, round_of(1), time.monotonic()))
        entry.tokens += chunk
        return True

    def draft_together(
        self, seqs: Seq[Sequence], counts: Seq[int], given: Seq[Seq[int]] = ()
    ) -> Iterator[list[Draft | None]]:
        """Yield rounds as ``Drafter``, one step of the model for each. ``given``: for each sequence, its first drafts;
        the model continues after them."""
        given = given or [()] * len(seqs)
        self._most_entries = max(self._most_entries, len(seqs))
        for seq, count, known in zip(seqs, counts, given, strict=True):
            while count > len(known) and self.prepare(seq):
                pass
        zipped = enumerate(zip(seqs, given, strict=True))
        lines = [_Line(i, seq, self._rewound(seq), seq.answer_stream, known) for i, (seq, known) in zipped]
        goes_ahead = self._may_go_ahead(lines)
        number, under_way = 0, None
        while True:
            for line in lines:
                line.force(number, counts[line.index])
            found = _next_given(lines, counts, number)
            under_way = under_way or self._begin(lines, counts, number)
            if under_way is None and not any(found):
                return
            following = None
            if under_way is not None:
                following = self._follow(under_way, lines, counts, number + 1) if goes_ahead else None
                self._read(under_way, following, found)
                for line in under_way.lines:
                    if counts[line.index] <= number:
                        found[line.index] = None  # its number was lowered while the round was under way
            if any(found):
                yield found
            number, under_way = number + 1, following

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's KV."""
        entry = self._entries.pop(seq_id, None)
        if entry is not None:
            entry.caches.close()

    # -- internals -----------------------------------------------------------------------------

    def _rewound(self, seq: Sequence) -> _CacheEntry:
        """Return a sequence's KV, rolled back to the tokens that it shares with the stream, except the stream's
        last."""
        entry = self._entries.get(seq.seq_id)
        if entry is None:
            entry = self._entries[seq.seq_id] = _CacheEntry(
                self._model.make_caches(), replace(seq.params, logprobs=None)
            )
            while len(self._entries) > self._most_entries:
                self.forget(next(iter(self._entries)))
        self._entries.move_to_end(seq.seq_id)
        same = min(len(entry.tokens), seq.num_prompt_tokens)  # a prompt does not change
        shared = min(same + _num_shared(entry.tokens[same:], seq.streamed(same)), seq.num_streamed - 1)
        back = len(entry.tokens) - shared
        if back and not entry.caches.rewind(back):
            entry.caches.close()  # its windows do not reach that far back: recompute
            entry.caches, entry.tokens = self._model.make_caches(), []
        elif back:
            del entry.tokens[shared:]
        return entry

    def _may_go_ahead(self, lines: Seq[_Line]) -> bool:
        """Return whether a round may be launched before the previous one is read. It may not if that gains nothing, if
        sampling needs the token ids, or if it would copy much KV that the previous round still reads."""
        if self._device.computes_at_launch or not Road.LAUNCH_AHEAD.is_open:
            return False
        if any(one.entry.params.depends_on_tokens or one.seq.rules is not None for one in lines):
            return False
        return nbytes([line.entry.caches for line in lines]) <= MAX_COPIED

    def _begin(self, lines: Seq[_Line], counts: Seq[int], number: int) -> _Round | None:
        """Launch a round of the lines, with known streams, that get more than ``number`` drafts. Return None if none
        do."""
        able = [line for line in lines if _is_drafted_for(line, counts, number)]
        if not able:
            return None
        missing = [line.tokens_from(len(line.entry.tokens)) for line in able]
        return self._launch(able, [token for tokens in missing for token in tokens], missing, 0)

    def _follow(self, before: _Round, lines: Seq[_Line], counts: Seq[int], number: int) -> _Round | None:
        """Launch the round after one that is not read yet, with that one's array as its input. Return None if a line
        begins with this round, because its tokens are numbers."""
        able = [line for line in lines if _is_drafted_for(line, counts, number)]
        places = [i for i, line in enumerate(before.lines) if any(line is one for one in able)]
        if not able or len(places) < len(able):
            return None
        tokens = before.tokens if len(able) == len(before.lines) else before.tokens[mx.array(places)]
        return self._launch(able, tokens, [[0]] * len(able), 1)  # a placeholder until the id is known

    def _launch(self, lines: Seq[_Line], ids: Seq[int] | mx.array, tokens: Seq[list[int]], num_unknown: int) -> _Round:
        """Launch a step that appends ``tokens`` to the lines' KV. ``ids``: the same tokens in one list or array. The
        last ``num_unknown`` tokens of each line are not in its stream yet."""
        parts, rows = [], []
        for line, new in zip(lines, tokens, strict=True):
            entry = line.entry
            parts.append(SequenceRows(entry.caches, len(entry.tokens), len(new), 1))
            rows.append(line.row(num_unknown, self._vocab_size))
            entry.tokens += new
        logits = self._step.run(parts, ids, None)
        chosen = self._sampler.tokens(logits[0] if len(logits) == 1 else mx.concatenate(logits), rows)
        # If the next round may read the chosen tokens, the host reads a copy of the array (``Device.launch``).
        read, pending = (chosen, ()) if self._device.computes_at_launch else (chosen + 0, (chosen,))
        ticket = self._device.launch((read,), pending, round_of(len(lines)), time.monotonic())
        return _Round(tuple(lines), chosen, ticket)

    def _read(self, done: _Round, following: _Round | None, found: list[Draft | None]) -> None:
        """Wait for a round, and put its drafts at the places of their sequences in ``found``."""
        span = self._device.wait(done.ticket)
        seconds = None if self._device.computes_at_launch else (span.ended - span.started) / len(done.lines)
        ahead = () if following is None else following.lines
        for line, token_id in zip(done.lines, numbers_of(done.ticket.outputs[0]), strict=True):
            if any(line is one for one in ahead):
                line.entry.tokens[-1] = token_id
            if line.has_ended or token_id >= self._vocab_size:
                line.has_ended = True  # the id is padding of this model's vocabulary, and the target may not have it
                continue
            line.answer.append(token_id)
            found[line.index] = Draft(token_id, seconds=seconds)


def _is_drafted_for(line: _Line, counts: Seq[int], number: int) -> bool:
    """Return whether the model makes draft ``number`` of a line."""
    return len(line.given) <= number < counts[line.index] and not line.has_ended


def _next_given(lines: Seq[_Line], counts: Seq[int], number: int) -> list[Draft | None]:
    """Return each line's draft ``number`` if it is known, and append it to the line's stream."""
    found: list[Draft | None] = [None] * len(lines)
    for line in lines:
        if number < min(len(line.given), counts[line.index]):
            found[line.index] = Draft(line.given[number], seconds=0.0)
            line.answer.append(line.given[number])
    return found


def _num_shared(a: list[int], b: list[int]) -> int:
    """Return the number of equal leading tokens. It is nearly always the length of the shorter list, which a comparison
    of slices finds at C's speed."""
    size = min(len(a), len(b))
    return size if a[:size] == b[:size] else next(i for i in range(size) if a[i] != b[i])
