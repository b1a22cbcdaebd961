"""Packs the arrays of a tree into one, byte by byte.

A GPU has a limited number of buffers (``memory.counted_bytes``), and each array of MLX is one: quantised keys and
values of one layer are six. What is stored for long lies in one array, and is unpacked where it is used.

    tree     ((words, scales, biases), (words, scales, biases))
    form     the same tree with the dtype and shape of each array
    data     uint8 [bytes]: the widest numbers first, so that each array begins at a multiple of its item size
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from splitinfer.core.plan import TensorSpec
from splitinfer.models.tensors import mlx_dtype, spec_of, to_buffer


@dataclass(frozen=True, slots=True)
class PackedTree:
    """``form``: a tree with a ``TensorSpec`` for each array; other leaves are as they were."""

    form: Any
    data: mx.array

    @classmethod
    def of(cls, tree: Any) -> "PackedTree":
        """Pack a tree; computes nothing yet. Of several arrays it is a copy, which does not hold their memory."""
        arrays = [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]
        form = tree_map(lambda leaf: spec_of(leaf) if isinstance(leaf, mx.array) else leaf, tree)
        pieces = [arrays[i].reshape(-1).view(mx.uint8) for i in _order(specs_of(form))]
        return cls(form, mx.concatenate(pieces) if pieces else mx.zeros((0,), mx.uint8))

    @classmethod
    def from_buffers(cls, form: Any, buffers: Seq[memoryview | bytes]) -> "PackedTree":
        """Pack the bytes of a form's arrays, in the order of the tree, which must have the sizes that it says."""
        found = [np.frombuffer(buffers[i], np.uint8) for i in _order(specs_of(form))]
        return cls(form, mx.array(np.concatenate(found)) if found else mx.zeros((0,), mx.uint8))

    def tree(self) -> Any:
        """The tree again, its arrays cut out of ``data``; computes nothing yet."""
        specs = specs_of(self.form)
        arrays = [
            self.data[at : at + nbytes_of(spec)].view(mlx_dtype(spec.dtype)).reshape(spec.shape)
            for spec, at in zip(specs, _offsets(specs), strict=True)
        ]
        following = iter(arrays)
        return tree_map(lambda leaf: next(following) if isinstance(leaf, TensorSpec) else leaf, self.form)

    def buffers(self) -> list[memoryview]:
        """The bytes of each array, in the order of the tree. ``data`` must be computed."""
        specs, whole = specs_of(self.form), to_buffer(self.data)
        return [whole[at : at + nbytes_of(spec)] for spec, at in zip(specs, _offsets(specs), strict=True)]


def specs_of(form: Any) -> list[TensorSpec]:
    """The arrays of a form, in the order of the tree."""
    return [leaf for _, leaf in tree_flatten(form) if isinstance(leaf, TensorSpec)]


def nbytes_of(spec: TensorSpec) -> int:
    """The bytes of an array."""
    return prod(spec.shape) * mlx_dtype(spec.dtype).size


def _order(specs: Seq[TensorSpec]) -> list[int]:
    """The arrays' numbers in the order in which they are packed."""
    return sorted(range(len(specs)), key=lambda i: -mlx_dtype(specs[i].dtype).size)


def _offsets(specs: Seq[TensorSpec]) -> list[int]:
    """Where each array begins."""
    offsets, at = [0] * len(specs), 0
    for i in _order(specs):
        offsets[i] = at
        at += nbytes_of(specs[i])
    return offsets
