"""How far KV that is there can be rolled back.

Cache kinds differ in how far they can be rolled back: a plain KV cache to anywhere, a sliding
window by its slack (what it dropped is gone), a recurrent state not at all. Each stage reports the
least of its own layers; the least of all stages decides.
"""

from collections.abc import Iterable

UNLIMITED = None


def least_rewind(limits: Iterable[int | None]) -> int | None:
    """The rollback, in tokens, that every cache allows. ``None`` is without limit.

    >>> least_rewind([None, 256, None])
    256
    """
    known = [limit for limit in limits if limit is not UNLIMITED]
    return min(known) if known else UNLIMITED
