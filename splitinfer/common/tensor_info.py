"""One tensor of a safetensors file as its header describes it: name, dtype, shape and place, without the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of a number, by safetensors' name of its dtype. Only dtypes that MLX loads are listed."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: ``dtype`` by safetensors' name, ``begin`` and ``end`` in bytes of the data part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin

    @property
    def fills_its_place(self) -> bool:
        """Whether the bytes from ``begin`` to ``end`` are as many as dtype and shape need."""
        bits = ITEM_BITS.get(self.dtype)
        if bits is None or self.begin < 0 or min(self.shape, default=0) < 0:
            return False
        return 8 * (self.end - self.begin) == prod(self.shape) * bits


def header_entry(info: TensorInfo, begin: int) -> Mapping[str, Any]:
    """Return the entry of a safetensors header for this tensor, placed at ``begin`` of the data part."""
    return {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, begin + info.nbytes]}
