"""A small model of the same tokenizer, whole on the coordinator, as drafter.

It samples with the key of the position, as the target does: where both models would spread their choice over the same
tokens, the same noise makes them choose the same one, so at a temperature more drafts are right.

Its KV holds the tokens of the stream it was last asked about; what the new one does not share is rolled back.

On a GPU the next guess of a block is under way before the last one has been read: its input is the array, not the
number.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self, cast

import mlx.core as mx

from splitinfer.core.kv.rewind import PUT_BACK, UNLIMITED
from splitinfer.core.sequence import REPETITION_CONTEXT, SamplingParams, Sequence, common_prefix
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.stage.runner import launches_ahead
from splitinfer.engine.stage.sampler import Row, Sampler
from splitinfer.errors import ModelError
from splitinfer.models.caches import trim
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import fetch
from splitinfer.models.loader import cache_arrays, count_layers, load_stage, resolve_dtype, survey
from splitinfer.models.memory import check_fit, on_gpu
from splitinfer.models.openblas import use_transposed_products
from splitinfer.wire.messages import Progress

Report = Callable[[Progress], None]


def _nothing(_progress: Progress) -> None:
    """Nobody wants to know."""


_CHUNK = 128  # tokens of a prompt at once: what a result that comes meanwhile waits for
_FEW = 8  # tokens that are read with the next guess
_MOST_SEQUENCES = 8  # whose KV is kept; more than ever draft at a time


@dataclass(slots=True)
class _Held:
    """One sequence's KV, and the tokens it is of. ``params``: its own, with log probabilities, for confidence."""

    caches: SequenceCaches
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Guess:
    """Under way on the device: a [1] token and the [1] probability that the model gives it."""

    token: mx.array
    confidence: mx.array


class DraftModel:
    """Guesses with ``model``, which is whole. ``vocab_size``: of the tokenizer, for which noise is drawn.

    ``ahead``: whether a guess is launched before the one before it was read.
    """

    def __init__(self, name: str, model: StageModel, vocab_size: int, *, ahead: bool | None = None) -> None:
        self.name = name
        self._model, self._vocab_size = model, vocab_size
        self._sampler = Sampler(vocab_size)
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._ahead = launches_ahead() if ahead is None else ahead

    @classmethod
    def load(
        cls, name: str, checkpoint: Checkpoint, dtype: str, vocab_size: int, kv_tokens: int, report: Report = _nothing
    ) -> Self:
        """Read the model into memory, with room for the KV of ``kv_tokens`` tokens. ``report``: how far that is.

        Raises:
            ModelError: it is not here, does not fit, or cannot go back to where a draft was wrong.
        """
        resolved = resolve_dtype(dtype, gpu=on_gpu())
        num_layers = count_layers(checkpoint)
        found = survey(checkpoint, 0, num_layers, resolved)
        if found.rewind is not UNLIMITED and found.rewind <= PUT_BACK:
            raise ModelError(
                f"draft {name} cannot go back to where one of its guesses was wrong, because its layers keep a state; "
                "choose one with attention only, or draft with 'ngram'"
            )
        free = check_fit(found.need, kv_tokens, f"draft {name}", "choose a smaller one, or a smaller --context")
        report(Progress("survey", 0, found.need.weights, found.need.sentence(kv_tokens, free)))
        fetch(name, checkpoint, found.files, lambda *at: report(Progress("download", *at)))
        model = load_stage(checkpoint, found, 0, num_layers, resolved, lambda *at: report(Progress("load", *at)))
        use_transposed_products(model.whole)
        return cls(name, model, vocab_size)

    # -- as the engine sees it -----------------------------------------------------------------

    def prepare(self, seq: Sequence) -> bool:
        """Read a part of what others have computed of a sequence; whether there was any."""
        held, stream = self._at(seq), seq.stream
        start, end = len(held.tokens), len(stream) - 1
        if end - start <= _FEW:
            return False
        chunk = stream[start : min(end, start + _CHUNK)]
        self._model(mx.array([chunk], dtype=mx.int32), held.caches, None, 0)
        mx.eval(cache_arrays(held.caches))
        held.tokens += chunk
        return True

    def drafts(self, seq: Sequence, count: int) -> Iterator[Draft]:
        """Guesses, each with the model's own probability for it."""
        while self.prepare(seq):
            pass
        held, stream, guess = self._at(seq), seq.stream, None
        ahead = self._ahead and seq.params.repetition_penalty == 1.0  # which looks at numbers
        for number in range(count):
            if guess is None:
                missing = stream[len(held.tokens) :]
                guess = self._launch(held, mx.array(missing, dtype=mx.int32), seq, stream)
                held.tokens += missing
            following = None
            if ahead and number + 1 < count:
                following = self._launch(held, guess.token, seq, [*stream, 0])
                held.tokens.append(0)  # until it is known
            token_id = cast(int, guess.token.item())
            if following is not None:
                held.tokens[-1] = token_id
            if token_id >= self._vocab_size:
                return  # a padded place of its own, which the target may not have
            stream.append(token_id)
            yield Draft(token_id, cast(float, guess.confidence.item()))
            guess = following

    def forget(self, seq_id: int) -> None:
        """Its KV goes."""
        self._held.pop(seq_id, None)

    # -- inside --------------------------------------------------------------------------------

    def _at(self, seq: Sequence) -> _Held:
        """A sequence's KV, rolled back to what the stream shares with it; the stream's last token is not in it."""
        held = self._held.get(seq.seq_id)
        if held is None:
            held = self._held[seq.seq_id] = _Held(self._model.make_caches(), replace(seq.params, logprobs=0))
            while len(self._held) > _MOST_SEQUENCES:
                self._held.popitem(last=False)
        self._held.move_to_end(seq.seq_id)
        shared = min(_num_shared(held.tokens, seq.stream), len(seq.stream) - 1)
        back = len(held.tokens) - shared
        went = [trim(cache, back) for cache in held.caches.own] if back else []
        if not all(went):
            held.caches, held.tokens = self._model.make_caches(), []  # farther than its windows reach: anew
        elif back:
            held.caches.place.position -= back
            del held.tokens[shared:]
        return held

    def _launch(self, held: _Held, ids: mx.array, seq: Sequence, before: list[int]) -> _Guess:
        """Let the device compute what follows ``before``, whose last tokens are ``ids``."""
        logits = self._model(ids[None], held.caches, None, 1)[0]
        row = Row(held.params, seq.seed, len(before), tuple(before[-REPETITION_CONTEXT:]))
        (choice,) = self._sampler.choose(logits, [row])
        assert choice.logprobs is not None
        confidence = mx.exp(mx.take_along_axis(choice.logprobs, choice.tokens[:, None], axis=-1)[:, 0])
        mx.async_eval(choice.tokens, confidence)  # type: ignore[no-untyped-call]
        return _Guess(choice.tokens, confidence)


def _num_shared(a: list[int], b: list[int]) -> int:
    """Leading tokens that are equal. Nearly always that is all of the shorter, which is compared at C's speed."""
    size = min(len(a), len(b))
    return size if a[:size] == b[:size] else common_prefix(a, b)
