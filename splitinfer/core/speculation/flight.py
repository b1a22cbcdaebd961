"""The blocks of drafts of a sequence.

One stream of tokens leaves a pipeline idle: the next token needs the last one to have passed all stages. Drafts predict
the next tokens, so that there is something to compute meanwhile. The first block after a sampled token is that token
with ``first`` drafts. Blocks of ``further`` drafts may follow it before its verdict:

    stage 0   | draft | A | draft | B | draft | C |          A: t d d d    B: d d d d    C: d d d d
    stage 1                   |  A  |    |  B  |             A's last row verifies B's first draft

The last stage samples the target at every position and accepts drafts while they are equal (``Slice.num_accepted``). A
wrong draft rejects everything after it, and the next first block begins with the token sampled instead. See PipeInfer
(Butler et al., arXiv 2407.11798).
"""

from dataclasses import dataclass

MAX_ROWS = 16  # of a block; verifying more is not nearly free on any machine


@dataclass(frozen=True, slots=True)
class Flight:
    """The sizes of a sequence's draft blocks: ``first`` drafts after a sampled token, then blocks of ``further``,
    with at most ``in_flight`` blocks at a time. With one in flight, every block begins with a sampled token
    (synchronous)."""

    first: int = 0
    further: int = 0
    in_flight: int = 1

    @property
    def is_off(self) -> bool:
        """Whether there are no drafts at all."""
        return self.first == 0 and (self.further == 0 or self.in_flight == 1)

    @property
    def is_synchronous(self) -> bool:
        """Whether a block waits for the verdict on the one before it."""
        return self.in_flight == 1 or self.further == 0


OFF = Flight()
