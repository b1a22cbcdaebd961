"""How far KV that is there can be rolled back.

Cache kinds differ in how far they can be rolled back: a plain KV cache to anywhere, a sliding
window by its slack (what it dropped is gone). A recurrent state stands for all tokens up to now, so it
cannot be cut, but what it was at some position can be kept and put back; a cache of no known kind
cannot even that. Each stage reports the least of its own layers; the least of all stages decides.
"""

from collections.abc import Iterable

UNLIMITED = None
PUT_BACK = 0  # a state
NEVER = -1


def least_rewind(limits: Iterable[int | None]) -> int | None:
    """The rollback, in tokens, that every cache allows. ``None`` is without limit, 0 and less as above.

    >>> least_rewind([None, 256, None])
    256
    """
    known = [limit for limit in limits if limit is not UNLIMITED]
    return min(known) if known else UNLIMITED
