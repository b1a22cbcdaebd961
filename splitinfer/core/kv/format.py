"""How many bits the numbers of keys and values have in memory.

Keys and values of a position are stored in groups of numbers that share a scale and a bias (MLX's affine quantisation),
computed from that position alone; so they do not depend on how a prompt was cut into chunks or what else was in a step.
A row attends to the stored values, its own position included: a whole model and a cut one, one row and many, stored
blocks and blocks computed again give the same tokens, which are those of the format, not of exact KV.

Keys are more sensitive than values: a key's error moves all weights of a row's attention, a value's only adds to its
sum. Four bits are for values alone; keys in four bits make some models useless.
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
    """Return the format of that name; ``None`` for keys and values as the model computes them.

    Raises:
        ValueError: there is no such format.
    """
    if name not in NAMES:
        raise ValueError(f"kv_format {name!r} is unknown; known: {', '.join(NAMES)}")
    return FORMATS.get(name)
