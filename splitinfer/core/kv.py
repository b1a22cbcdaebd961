"""What may be reused of KV that is already there.

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


def reusable(num_held: int, num_common: int, num_wanted: int, rewind: int | None) -> int:
    """How many leading tokens of a new request need not be computed again.

    ``num_held`` tokens have KV on every stage (or had: caches that went back count from the furthest
    they ever came), the first ``num_common`` of them are the request's too, the request has
    ``num_wanted`` tokens, and caches go back at most ``rewind`` tokens. At least one token is always
    computed: without it there are no logits to sample from.

    >>> reusable(100, 100, 132, None), reusable(100, 40, 132, None), reusable(100, 40, 132, 0)
    (100, 40, 0)
    >>> reusable(100, 100, 100, None)
    99
    """
    kept = min(num_held, num_common, num_wanted - 1)
    goes_back = num_held - kept
    return kept if rewind is UNLIMITED or goes_back <= rewind else 0
