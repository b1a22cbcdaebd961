"""How many bits the numbers of keys and values have in memory.

Keys and values of a position are stored in groups of numbers that share a scale and a bias (MLX's affine quantisation),
made of that position alone; so how a prompt was cut into chunks, and who shared a step, does not change them. A row
attends to what is stored, its own position included: whole and cut, one row and many, blocks that were kept and blocks
computed anew give the same tokens, which are those of the format, not of exact KV.

Keys are more sensitive than values: a key's error moves all weights of a row's attention, a value's only adds to its
sum. Four bits are for values alone; keys in four bits make some models useless.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bits of each number, keys and values."""

    name: str
    key_bits: int
    value_bits: int


EXACT = "exact"
FORMATS = {"k8v8": KVFormat("k8v8", 8, 8), "k8v4": KVFormat("k8v4", 8, 4)}
NAMES = (EXACT, *FORMATS)


def format_of(name: str) -> KVFormat | None:
    """The format of a name; ``None`` for keys and values as the model computes them.

    Raises:
        ValueError: there is no such format.
    """
    if name not in NAMES:
        raise ValueError(f"kv_format {name!r} is none of {', '.join(NAMES)}")
    return FORMATS.get(name)
