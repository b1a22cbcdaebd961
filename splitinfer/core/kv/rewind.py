"""How far caches can be rolled back.

A plain KV cache can be rolled back to any position, a sliding window by its slack (older positions are lost). A
recurrent state stands for all tokens so far. It cannot be truncated, but it can be rolled back to any row of a block of
drafts, from what the cache kept of that block. A cache of an unknown kind cannot be rolled back. Each stage reports the
least of its layers, and the least of all stages decides.
"""

from collections.abc import Iterable

UNLIMITED = None
WITHIN_DRAFTS = 0  # only to rows of blocks of drafts without a verdict
NEVER = -1


def least_rewind(limits: Iterable[int | None]) -> int | None:
    """Return by how many tokens all caches can be rolled back: ``UNLIMITED``, ``WITHIN_DRAFTS``, ``NEVER`` or a number.

    >>> least_rewind([None, 256, None])
    256
    """
    known = [limit for limit in limits if limit is not UNLIMITED]
    return min(known) if known else UNLIMITED
