"""How the arrays of a sequence's KV grow: arithmetic that the stages' caches and the scheduler's budget share.

The keys and the values of a layer lie in one array each, because attention reads them so. A growing array is copied,
and until the copy is done there are two. If all arrays grew in one step, that step would need the KV a second time. So
they take turns, layer after layer, each at another *phase* of the same ladder of lengths:

    layer 0    |-----------|-----------|-----------|      room of an array: the first mark
    layer 1    |------|-----------|-----------|----       at or after its length
    layer 2    |--|-----------|-----------|--------

The ladder's step is a block of ``BLOCK`` tokens for short sequences, and 1/16 to 1/8 of the length for long ones, which
are therefore seldom copied. The marks of a long sequence are not at block ends; otherwise many arrays would grow in a
step that also saves a block. An array has at most 1/8 of its length and one block unused. The budget counts the mean,
half of that.
"""

BLOCK = 256  # tokens of a block, unless a pipeline's ``KVBudget`` says otherwise

_SHARE = 8  # a step is at most a length divided by this
_GRAIN = 16  # tokens between possible marks of a long sequence
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are


def phase_of(index: int) -> float:
    """Return the phase in [0, 1) at which the cache with this index grows.

    >>> [round(phase_of(i), 2) for i in range(4)]
    [0.0, 0.62, 0.24, 0.85]
    """
    return index * _GOLDEN % 1


def room(num_tokens: int, phase: float = 0.0) -> int:
    """Return for how many tokens an array has room after it grew to hold ``num_tokens``.

    >>> room(1), room(300), room(300, 0.3), room(40_000), room(40_000, 0.3)
    (256, 512, 512, 40960, 42176)
    """
    blocks = -(-num_tokens // BLOCK)
    step = _step(blocks) * BLOCK
    if step == BLOCK:
        return blocks * BLOCK
    mark = int(phase * step) // _GRAIN * _GRAIN
    return num_tokens + (mark - num_tokens) % step


def mean_room(num_tokens: int, block: int = BLOCK) -> int:
    """Return for how many tokens caches of ``num_tokens`` tokens have room, as the mean over all phases in whole
    blocks.

    >>> mean_room(0), mean_room(257), mean_room(40_000)
    (0, 512, 42240)
    """
    blocks = -(-num_tokens // block)
    return (blocks + _step(blocks) // 2) * block if blocks else 0


def spare(num_tokens: int) -> int:
    """Return how much of that room, in tokens, lies beyond the last block with tokens.

    >>> spare(3000), spare(40_000)
    (0, 2048)
    """
    return _step(-(-num_tokens // BLOCK)) // 2 * BLOCK


def _step(blocks: int) -> int:
    """Return the ladder's step in blocks. It and the length from which it holds are powers of two."""
    return max(1, (1 << blocks.bit_length() - 1) // _SHARE) if blocks else 1
