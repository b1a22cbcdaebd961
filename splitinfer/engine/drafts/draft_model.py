"""A drafter that is a small model of the same tokenizer, whole on the coordinator.

It samples with the key of the position, as the target does: where both models spread their probability over the same
tokens, the same noise makes them choose the same one, so at a temperature above 0 more drafts are accepted.

Its KV holds the tokens of each sequence's last stream; what the current stream does not share is rolled back.

On a GPU the next draft of a block is launched before the one before it has been read: its input is the array, not the
number.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self, cast

import mlx.core as mx

from splitinfer.core.kv.rewind import PUT_BACK, UNLIMITED
from splitinfer.core.sequence import REPETITION_CONTEXT, SamplingParams, Sequence, common_prefix
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.device.device import DRAFT, Device, Ticket
from splitinfer.engine.device.selection import default_device
from splitinfer.engine.stage.row import Row
from splitinfer.engine.stage.sampler import Sampler
from splitinfer.errors import ModelError
from splitinfer.models.caches import nbytes_written, trim
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import fetch
from splitinfer.models.kv_pool import MAX_COPIED
from splitinfer.models.loader import cache_arrays, count_layers, load_stage, resolve_dtype, survey
from splitinfer.models.memory import check_fit, on_gpu
from splitinfer.models.openblas import use_transposed_products
from splitinfer.wire.messages import Progress

Report = Callable[[Progress], None]

_CHUNK = 128  # tokens of a prompt at once; a result that arrives meanwhile waits for them
_FEW = 8  # tokens that are computed together with the next draft
_MAX_SEQUENCES = 8  # whose KV is cached; more than ever draft at a time


def _ignore(_progress: Progress) -> None:
    """Discards progress."""


@dataclass(slots=True)
class _CacheEntry:
    """One sequence's KV, and the tokens in it. ``params``: the sequence's, with log probabilities, for confidence."""

    caches: SequenceCaches
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _DraftInFlight:
    """A draft under way on the device: a [1] token and the [1] probability that the model gives it."""

    token: mx.array
    confidence: mx.array
    ticket: Ticket


class DraftModel:
    """Drafts with ``model``, which is whole. ``vocab_size``: the tokenizer's, at which noise is drawn.

    On a device that computes while Python goes on, a draft is launched before the one before it has been read.
    """

    def __init__(self, name: str, model: StageModel, vocab_size: int) -> None:
        self.name = name
        self._model, self._vocab_size = model, vocab_size
        self._sampler = Sampler(vocab_size)
        self._entries: OrderedDict[int, _CacheEntry] = OrderedDict()
        self._device = default_device()

    @classmethod
    def load(
        cls, name: str, checkpoint: Checkpoint, dtype: str, vocab_size: int, kv_tokens: int, report: Report = _ignore
    ) -> Self:
        """Read the model into memory, with room for the KV of ``kv_tokens`` tokens; ``report`` receives the progress.

        Raises:
            ModelError: the model is not here, does not fit, or cannot be rewound to where a draft was wrong.
        """
        resolved = resolve_dtype(dtype, gpu=on_gpu())
        num_layers = count_layers(checkpoint)
        found = survey(checkpoint, 0, num_layers, resolved)
        if found.rewind is not UNLIMITED and found.rewind <= PUT_BACK:
            raise ModelError(
                f"draft {name} cannot go back to where one of its drafts was wrong, because its layers keep a state; "
                "choose one with attention only, or draft with 'ngram'"
            )
        free = check_fit(found.need, kv_tokens, f"draft {name}", "choose a smaller one, or a smaller --context")
        report(Progress("survey", 0, found.need.weights, found.need.sentence(kv_tokens, free)))
        fetch(name, checkpoint, found.files, lambda *at: report(Progress("download", *at)))
        model = load_stage(checkpoint, found, 0, num_layers, resolved, lambda *at: report(Progress("load", *at)))
        use_transposed_products(model.whole)
        return cls(name, model, vocab_size)

    # -- the Drafter protocol ------------------------------------------------------------------

    def use_device(self, device: Device) -> None:
        """Compute on a device from now on."""
        self._device = device

    def prepare(self, seq: Sequence) -> bool:
        """Compute the KV of one chunk of the sequence's tokens; whether any was missing."""
        entry, stream = self._rewound(seq), seq.stream
        start, end = len(entry.tokens), len(stream) - 1
        if end - start <= _FEW:
            return False
        chunk = stream[start : min(end, start + _CHUNK)]
        self._model(mx.array([chunk], dtype=mx.int32), entry.caches, None, 0)
        self._device.wait(self._device.launch(cache_arrays(entry.caches), (), DRAFT, time.monotonic()))
        entry.tokens += chunk
        return True

    def drafts(self, seq: Sequence, count: int) -> Iterator[Draft]:
        """Yield up to ``count`` drafts, each with the probability that this model gives it."""
        while self.prepare(seq):
            pass
        entry, stream, draft = self._rewound(seq), seq.stream, None
        has_penalty = seq.params.depends_on_tokens  # which needs the token ids
        is_small = sum(map(nbytes_written, entry.caches.own)) <= MAX_COPIED
        ahead = not self._device.computes_at_launch and not has_penalty and is_small
        for number in range(count):
            if draft is None:
                missing = stream[len(entry.tokens) :]
                draft = self._launch(entry, mx.array(missing, dtype=mx.int32), seq, stream)
                entry.tokens += missing
            following = None
            if ahead and number + 1 < count:
                following = self._launch(entry, draft.token, seq, [*stream, 0])
                entry.tokens.append(0)  # a placeholder until the id is known
            span = self._device.wait(draft.ticket)
            token_id = cast(int, draft.token.item())
            if following is not None:
                entry.tokens[-1] = token_id
            if token_id >= self._vocab_size:
                return  # an id of this model's padding, which the target may not have
            stream.append(token_id)
            seconds = None if self._device.computes_at_launch else span.ended - span.started
            yield Draft(token_id, cast(float, draft.confidence.item()), seconds)
            draft = following

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's KV."""
        self._entries.pop(seq_id, None)

    # -- internals -----------------------------------------------------------------------------

    def _rewound(self, seq: Sequence) -> _CacheEntry:
        """A sequence's KV, rolled back to what it shares with the stream, without the stream's last token."""
        entry = self._entries.get(seq.seq_id)
        if entry is None:
            entry = self._entries[seq.seq_id] = _CacheEntry(self._model.make_caches(), replace(seq.params, logprobs=0))
            while len(self._entries) > _MAX_SEQUENCES:
                self._entries.popitem(last=False)
        self._entries.move_to_end(seq.seq_id)
        shared = min(_num_shared(entry.tokens, seq.stream), len(seq.stream) - 1)
        back = len(entry.tokens) - shared
        trimmed = [trim(cache, back) for cache in entry.caches.own] if back else []
        if not all(trimmed):
            entry.caches, entry.tokens = self._model.make_caches(), []  # farther than its windows reach: recompute
        elif back:
            entry.caches.place.position -= back
            del entry.tokens[shared:]
        return entry

    def _launch(self, entry: _CacheEntry, ids: mx.array, seq: Sequence, before: list[int]) -> _DraftInFlight:
        """Launch the computation of the token after ``before``, whose last tokens are ``ids``."""
        logits = self._model(ids[None], entry.caches, None, 1)[0]
        answer = tuple(before[seq.num_prompt_tokens :]) if entry.params.has_answer_penalty else ()
        row = Row(entry.params, seq.seed, len(before), tuple(before[-REPETITION_CONTEXT:]), answer)
        (choice,) = self._sampler.choose(logits, [row])
        assert choice.logprobs is not None
        confidence = mx.exp(choice.logprobs[:, 0])
        ticket = self._device.launch((choice.tokens, confidence), (), DRAFT, time.monotonic())
        return _DraftInFlight(choice.tokens, confidence, ticket)


def _num_shared(a: list[int], b: list[int]) -> int:
    """The number of equal leading tokens: nearly always all of the shorter list, which is compared at C's speed."""
    size = min(len(a), len(b))
    return size if a[:size] == b[:size] else common_prefix(a, b)
