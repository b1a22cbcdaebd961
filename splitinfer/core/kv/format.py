"""How many bits each number of keys and values takes in memory.

The keys and values of a position are stored in runs of numbers that share a scale and a bias (MLX's affine
quantisation), computed from that position alone. So they do not depend on how a prompt was cut into chunks or on the
rest of a step. A row attends to stored values, also at its own position. Hence a whole model and a cut one, one row and
many, stored blocks and recomputed ones give the same tokens. They may differ from the tokens that exact KV gives.

Keys are more sensitive than values: an error in a key moves all weights of a row's attention, an error in a value only
adds to the sum. So only values are stored in four bits; four-bit keys make some models useless.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bits of each number of keys and of values."""

    name: str
    key_bits: int
    value_bits: int


EXACT = "exact"
FORMATS = {"k8v8": KVFormat("k8v8", 8, 8), "k8v4": KVFormat("k8v4", 8, 4)}
NAMES = (EXACT, *FORMATS)


def format_of(name: str) -> KVFormat | None:
    """Return the format named ``name``, or None for keys and values as the model computes them. Raise ValueError if the
    name is unknown."""
    if name not in NAMES:
        raise ValueError(f"kv_format {name!r} is unknown; known: {', '.join(NAMES)}")
    return FORMATS.get(name)
