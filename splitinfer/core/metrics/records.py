"""The two records that all counts, drawings and displays are made from: one for each finished step, one for each
request. ``engine.figures.figures`` makes them.

    request   submitted --- queue --- begun --- prefill --- first token --- decode --- last token ... ended
    step      made | sent | received | start --- end      on each stage (``core.metrics.gaps``); its result is heard

All times are seconds on the coordinator's clock. Neither record contains text of a request.
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
    """The rows of a step by kind: prompt tokens, sampled tokens, and drafts."""

    prefill: int = 0
    decode: int = 0
    draft: int = 0

    @property
    def kind(self) -> str:
        """The purpose of the step, as traces name it.

        >>> Rows(8).kind, Rows(0, 1, 3).kind, Rows(8, 1).kind, Rows().kind
        ('prefill', 'decode', 'mixed', 'free')
        """
        decodes = self.decode + self.draft
        if self.prefill and decodes:
            return "mixed"
        return "prefill" if self.prefill else "decode" if decodes else "free"


class Gained(NamedTuple):
    """Tokens that a request got from a step, ``seconds`` after its tokens before, or after its submission. ``prompt``,
    ``cached``: tokens of its prompt, and how many of them were cached; 0 except with its first token."""

    seq_id: int
    tokens: int
    seconds: float
    prompt: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step whose result has come.

    num_sequences: how many sequences had a slice in it. useful: rows whose result was kept.
    visits, figures: one for each stage; the figures' times are on its own clock. gaps: the seconds before each visit.
    sent, heard: when its result was sent and received.
    cut: how many other cuts of the layers were used before this one.
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
        """Whether no row of it was kept, because it came after a wrong draft or its requests had ended."""
        return self.useful == 0 and self.num_rows > 0


@dataclass(slots=True)
class RequestRecord:
    """A request until it ends. ``submitted``: when it was submitted; ``last``: when its last token came, at first when
    it was submitted; ``first``: when its first token came, if any; ``computed``: positions that steps have computed so
    far."""

    sequence: Sequence
    submitted: float
    last: float
    first: float | None = None
    computed: int = 0
