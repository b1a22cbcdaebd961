"""What a machine is asked to measure: a model, without its files.

The configuration and the names, dtypes and shapes of all tensors travel in a part of the frame, as JSON: a model with
experts in tensors of their own has tens of thousands of them.

    {"files": {"config.json": "...", ...}, "tensors": {"model.norm.weight": {"dtype": "BF16", "shape": [5120]}, ...}}
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from splitinfer import cleanup
from splitinfer.core.kv.format import EXACT
from splitinfer.core.tensor_info import ITEM_BITS
from splitinfer.errors import ModelError, ProtocolError
from splitinfer.models.building import CONFIGURATION
from splitinfer.models.checkpoint import Checkpoint, parse_entries, read_config, table_of

_MOST_BYTES = 64 * 2**20  # of a description


@dataclass(frozen=True, slots=True)
class Question:
    """A model, the layout's ``dtype`` and format of keys and values, with which it would be loaded."""

    name: str
    checkpoint: Checkpoint
    dtype: str = "auto"
    kv_format: str = EXACT

    def shape(self) -> str:
        """A digest of all that the profile of a machine depends on: not of the weights."""
        return hashlib.sha256(described(self.checkpoint) + f"{self.dtype} {self.kv_format}".encode()).hexdigest()


def described(checkpoint: Checkpoint) -> bytes:
    """A checkpoint's configuration and tensors, without the weights."""
    files = {name: (checkpoint.folder / name).read_text() for name in CONFIGURATION if _is_there(checkpoint, name)}
    tensors = {info.name: {"dtype": info.dtype, "shape": list(info.shape)} for info in checkpoint.tensors.values()}
    return json.dumps({"files": files, "tensors": tensors}, sort_keys=True).encode()


def _is_there(checkpoint: Checkpoint, name: str) -> bool:
    return (checkpoint.folder / name).exists()


@contextmanager
def checkpoint_of(description: bytes | memoryview) -> Iterator[Checkpoint]:
    """The checkpoint that ``described`` has described, in a temporary folder without weights.

    Raises:
        ProtocolError: a peer sent something else.
        ModelError: a dtype that MLX does not load.
    """
    if len(description) > _MOST_BYTES:
        raise ProtocolError(f"a model was described in {len(description):,} bytes; it may have {_MOST_BYTES:,}")
    try:
        found = json.loads(bytes(description))
        files = {name: str(found["files"][name]) for name in CONFIGURATION if name in dict(found["files"])}
        if "config.json" not in files:
            raise ValueError("it has no config.json")
        entries = {str(name): _entry(one) for name, one in found["tensors"].items()}
        tensors = table_of(parse_entries(entries, ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a model's description cannot be read ({type(error).__name__}: {error})") from error
    with cleanup.temporary_folder("splitinfer-") as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text)
        yield Checkpoint(folder, read_config(folder), tensors)


def _entry(one: dict[str, Any]) -> dict[str, Any]:
    """A tensor as a safetensors header has it, as if it were alone in a file."""
    dtype, shape = str(one["dtype"]), [int(size) for size in one["shape"]]
    if dtype not in ITEM_BITS:
        raise ModelError(f"a model has tensors in {dtype!r:.20}, which MLX does not load")
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, prod(shape) * ITEM_BITS[dtype] // 8]}
