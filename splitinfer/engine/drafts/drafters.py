"""The interface of drafters, which run on the coordinator, on the engine's thread; n-gram lookup.

A wrong draft cannot change the output: the last stage accepts a draft only if it equals the model's own token. A
drafter gets the whole *stream* every time, a sequence's tokens and its drafts in flight, and finds rollbacks by
comparing the stream with the previous one.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import zip_longest
from typing import Protocol

from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.drafter_choice import Choosers
from splitinfer.core.speculation.ngram import NGramIndex
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.device.device import Device
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.errors import LayoutError
from splitinfer.models.drafters.mtp import MTP

NGRAM = "ngram"
WITH_NGRAMS = "+" + NGRAM  # after the name of a drafter
FLOAT32 = "+float32"  # after its name, before the n-grams


def has_heads(drafter: str | None) -> bool:
    """Return whether a layout's ``draft`` means prediction heads in the model's checkpoint, which run on the last
    stage."""
    return drafter is not None and drafter.removesuffix(WITH_NGRAMS).removesuffix(FLOAT32) == MTP


def dtype_in(drafter: str, dtype: str) -> str:
    """Return the dtype that a layout's ``draft`` is computed in, in a layout of ``dtype``.

    >>> dtype_in("mtp+float32+ngram", "auto"), dtype_in("small", "auto")
    ('float32', 'auto')
    """
    return "float32" if drafter.removesuffix(WITH_NGRAMS).endswith(FLOAT32) else dtype


def model_in(drafter: str) -> str | None:
    """Return the draft model in a layout's ``draft``, or None for n-grams or prediction heads alone.

    Raises:
        LayoutError: no model is named before the n-grams.

    >>> model_in("small+ngram"), model_in("small+float32"), model_in("ngram")
    ('small', 'small', None)
    """
    name = drafter.removesuffix(WITH_NGRAMS).removesuffix(FLOAT32)
    if name != drafter and name in ("", NGRAM, "none"):
        raise LayoutError(f"draft {drafter!r} names no model before '+'; n-grams alone are {NGRAM!r}")
    return None if name in (NGRAM, MTP) else name


class Drafter(Protocol):
    """The interface of a drafter for the engine. It yields drafts one by one, so that a result can stop it."""

    @property
    def name(self) -> str:
        """Its name in figures."""
        ...

    def use_device(self, device: Device) -> None:
        """Compute on this device, the coordinator's, from now on."""
        ...

    def prepare(self, seq: Sequence) -> bool:
        """Do a part of the work before a sequence's first draft. Return false if there was none to do."""
        ...

    def draft_together(self, seqs: Seq[Sequence], counts: Seq[int]) -> Iterator[list[Draft | None]]:
        """Yield rounds until no sequence gets another draft. A round has one draft for each of ``seqs``, in their
        order, or ``None`` if the sequence has no more drafts or has its number in ``counts``.

        The streams do not change meanwhile. ``counts`` is read before every round, so a caller ends the drafts of one
        sequence by lowering its number. It ends all drafts by leaving the iterator after any round.
        """
        ...

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's state."""
        ...


class NGramDrafter:
    """Drafts the tokens that followed the same tokens before (``core.speculation.ngram``). Costs almost no time."""

    name = NGRAM

    def __init__(self) -> None:
        self._indices: dict[int, NGramIndex] = {}

    def use_device(self, device: Device) -> None:
        """Ignore the device, which look-up does not need."""

    def prepare(self, seq: Sequence) -> bool:
        """Index a part of a long prompt. Return false if there was none to index."""
        return self._index(seq).catch_up(seq.tokens)

    def _index(self, seq: Sequence) -> NGramIndex:
        return self._indices.setdefault(seq.seq_id, NGramIndex())

    def drafts(self, seq: Sequence, count: int) -> Iterator[Draft]:
        """Yield at most ``count`` drafts, until the last tokens have not occurred before."""
        index = self._index(seq)
        ahead = [*seq.drafts]
        for _ in range(count):
            guess = index.look_up(seq.tokens, ahead)
            if guess is None:
                return
            ahead.append(guess.token_id)
            yield Draft(guess.token_id)

    def draft_together(self, seqs: Seq[Sequence], counts: Seq[int]) -> Iterator[list[Draft | None]]:
        """Yield rounds as ``Drafter``, with separate drafts for each sequence."""
        each = [self.drafts(seq, count) for seq, count in zip(seqs, counts, strict=True)]
        for number, found in enumerate(zip_longest(*each)):
            wanted = [draft if count > number else None for draft, count in zip(found, counts, strict=True)]
            if not any(wanted):
                return
            yield wanted

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's index."""
        self._indices.pop(seq_id, None)


class ModelWithNGrams:
    """Drafts with ``model``, and with n-grams if they have been right as often (``core.speculation.drafter_choice``).

    If n-grams draft a whole block, the model computes nothing, and its next step includes the missed tokens. The model
    drafts the very first block, so that the cost of a draft is known.
    """

    def __init__(self, model: DraftModel) -> None:
        self.name = model.name + WITH_NGRAMS
        self._model = model
        self._choosers = Choosers()
        self._has_drafted = False  # whether the model has drafted

    def use_device(self, device: Device) -> None:
        """Compute on a device from now on."""
        self._model.use_device(device)

    def prepare(self, seq: Sequence) -> bool:
        """Compute a part of a prompt, unless an n-gram makes the next draft. Return false if nothing was left to do."""
        if self._choosers.of(seq.seq_id).catch_up(seq.tokens):
            return True
        return not self._guesses(seq, 1) and self._model.prepare(seq)

    def draft_together(self, seqs: Seq[Sequence], counts: Seq[int]) -> Iterator[list[Draft | None]]:
        """Yield rounds as ``Drafter``: first the n-grams' guesses, then the model's drafts after them."""
        given = [self._guesses(seq, count) for seq, count in zip(seqs, counts, strict=True)]
        ahead = [[*seq.drafts] for seq in seqs]
        for found in self._model.draft_together(seqs, counts, given):
            for seq, before, draft in zip(seqs, ahead, found, strict=True):
                if draft is None:
                    continue
                by_model = draft.seconds != 0.0  # 0 s: an n-gram's guess or a forced token
                self._choosers.of(seq.seq_id).drafted(seq.tokens, before, draft.token_id, by_model=by_model)
                self._has_drafted |= by_model
                before.append(draft.token_id)
            yield found

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's state."""
        self._choosers.forget(seq_id)
        self._model.forget(seq_id)

    def _guesses(self, seq: Sequence, count: int) -> list[int]:
        guesses = self._choosers.of(seq.seq_id).guesses(seq.tokens, [*seq.drafts], count)
        return guesses if self._has_drafted else []
