"""The random key of a token: a function of the request's seed and the token's position alone.

So batching, chunking, the cut, drafts, preemption and replay cannot change the sampled tokens, at any temperature. The
mixing is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): two rounds
keep the keys of neighbouring positions and neighbouring seeds unrelated.
"""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def position_key(seed: int, position: int) -> tuple[int, int]:
    """Return the threefry key (two unsigned 32-bit words) of the token at ``position``.

    >>> position_key(7, 0) == position_key(7, 0), position_key(7, 0) == position_key(7, 1)
    (True, False)
    """
    mixed = _mix(_mix(seed) ^ position)
    return mixed >> 32, mixed & 0xFFFFFFFF
