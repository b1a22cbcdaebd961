"""One record of a step that has ended, and one of each request (``engine.figures.figures`` makes them). All that is
counted, drawn or shown is made of these two.

    request   submitted --- queue --- begun --- prefill --- first token --- decode --- last token ... ended
    step      made | sent | received | start --- end      on each stage (``core.metrics.gaps``); its result is heard

All times are seconds on the coordinator's clock. Neither says what was asked.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from splitinfer.core.metrics.gaps import Cause, Visit
from splitinfer.core.plan import StageFigures
from splitinfer.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of a step were: of prompts, tokens that had been chosen, and drafts."""

    prefill: int = 0
    decode: int = 0
    draft: int = 0

    @property
    def kind(self) -> str:
        """What the step was for, as traces call it.

        >>> Rows(8).kind, Rows(0, 1, 3).kind, Rows(8, 1).kind, Rows().kind
        ('prefill', 'decode', 'mixed', 'free')
        """
        decodes = self.decode + self.draft
        if self.prefill and decodes:
            return "mixed"
        return "prefill" if self.prefill else "decode" if decodes else "free"


class Gained(NamedTuple):
    """Tokens that a step brought a request, ``seconds`` after the ones before, or after its submission. ``prompt``,
    ``cached``: tokens of its prompt, and those of them that were kept from before; 0 but with its first token."""

    seq_id: int
    tokens: int
    seconds: float
    prompt: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step whose result has come.

    num_sequences: how many it had a slice of. useful: rows whose result was kept.
    visits, figures: of each stage; the figures' times are on its own clock. gaps: the seconds before each visit.
    sent, heard: when its result was sent and received.
    cut: how many cuts of the layers were before this one.
    """

    number: int
    num_sequences: int
    rows: Rows
    useful: int
    gained: Seq[Gained]
    visits: Seq[Visit]
    figures: Seq[StageFigures]
    gaps: Seq[Mapping[Cause, float]]
    sent: float
    heard: float
    cut: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that went through the stages."""
        return self.rows.prefill + self.rows.decode + self.rows.draft

    @property
    def is_rejected(self) -> bool:
        """Whether nothing of it was kept, as it lay behind a wrong draft or its requests had ended."""
        return self.useful == 0 and self.num_rows > 0


@dataclass(slots=True)
class RequestRecord:
    """A request, until it has ended.

    submitted: when. last: when its last token came; before, when it was submitted. first: its first token's; ``None``:
    none has come. computed: positions that steps have brought so far.
    """

    sequence: Sequence
    submitted: float
    last: float
    first: float | None = None
    computed: int = 0
