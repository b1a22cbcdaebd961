"""A draft model and n-grams: at each place whichever has been right at such places (``core.speculation.choice``).

Where n-grams draft a whole block the model computes nothing; the tokens that it has missed go into its next step. The
first block of all is the model's, so that it is known what a draft costs.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.choice import Choosers
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.device.device import Device
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.engine.drafts.drafters import WITH_NGRAMS


class ModelWithNGrams:
    """Drafts with ``model``, and with n-grams where these are as good."""

    def __init__(self, model: DraftModel) -> None:
        self.name = model.name + WITH_NGRAMS
        self._model = model
        self._choosers = Choosers()
        self._has_drafted = False  # the model

    def use_device(self, device: Device) -> None:
        """Compute on a device from now on."""
        self._model.use_device(device)

    def prepare(self, seq: Sequence) -> bool:
        """Compute a part of a prompt, unless the next draft is an n-gram's."""
        return not self._guesses(seq, 1) and self._model.prepare(seq)

    def draft_together(self, seqs: Seq[Sequence], counts: Seq[int]) -> Iterator[list[Draft | None]]:
        """See ``Drafter``: the guesses first, then the model's drafts behind them."""
        given = [self._guesses(seq, count) for seq, count in zip(seqs, counts, strict=True)]
        ahead = [[*seq.drafts] for seq in seqs]
        for found in self._model.draft_together(seqs, counts, given):
            for seq, before, draft in zip(seqs, ahead, found, strict=True):
                if draft is None:
                    continue
                by_model = draft.seconds != 0.0  # else it was known
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
