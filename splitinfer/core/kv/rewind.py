"""How far caches can be rolled back.

A plain KV cache can be rolled back to anywhere, a sliding window by its slack (what it dropped is lost). A recurrent
state stands for all tokens so far, so it cannot be truncated, but it can be rolled back to any row of a block of
drafts, from what was kept of that block; a cache of an unknown kind cannot even do that. Each stage reports the least
of its own layers; the least of all stages decides.
"""

from collections.abc import Iterable

UNLIMITED = None
WITHIN_DRAFTS = 0  # only to rows of blocks of drafts without a verdict
NEVER = -1


def least_rewind(limits: Iterable[int | None]) -> int | None:
    """Return the rollback, in tokens, that every cache allows: ``UNLIMITED``, ``WITHIN_DRAFTS``, ``NEVER`` or a number.

    >>> least_rewind([None, 256, None])
    256
    """
    known = [limit for limit in limits if limit is not UNLIMITED]
    return min(known) if known else UNLIMITED
