"""Which arrays a result depends on, asked of MLX's own graph.

MLX is lazy: calling a model builds a graph and computes nothing. ``mx.export_to_dot`` prints that
graph, with a name for every array we care about; walking it backwards from a result finds the
tensors that it really needs. So no table of architectures has to say which parameters belong to the
embedding, which to the head, which checkpoint tensors ``sanitize`` made them of, or what the layers
of a model hand to each other.
"""

import io
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx

_EDGE = re.compile(r'^("?)(.+?)\1 -> ("?)(.+?)\3$')
_RESULT = "result "  # no parameter has a space in its name


class Graph:
    """The graph of ``results`` as it stands now, with names for some of the arrays in it.

    A later assignment into one of the arrays gives its name to another node, so ask before that.
    """

    def __init__(self, results: Sequence[mx.array], named: Mapping[str, mx.array]) -> None:
        self._named = frozenset(named)
        self._parents: dict[str, list[str]] = defaultdict(list)
        self._children: dict[str, list[str]] = defaultdict(list)
        text = io.StringIO()
        if results:
            mx.export_to_dot(text, **{**named, **{f"{_RESULT}{i}": array for i, array in enumerate(results)}})
        for line in text.getvalue().splitlines():
            edge = _EDGE.match(line)
            if edge:
                self._parents[edge.group(4)].append(edge.group(2))
                self._children[edge.group(2)].append(edge.group(4))

    def read_by(self, results: Collection[int], without: Collection[str] = ()) -> set[str]:
        """The named arrays that results number so-and-so need. The operations that take in an array
        named in ``without`` count as having no other input."""
        return self._ancestors([f"{_RESULT}{i}" for i in results], without) & self._named

    def mixed_with(self, name: str) -> set[str]:
        """The named arrays that the operations which take in ``name`` need besides."""
        return self._ancestors(self._children.get(name, []), ()) & self._named - {name}

    def _ancestors(self, ends: Sequence[str], without: Collection[str]) -> set[str]:
        closed = {child for name in without for child in self._children.get(name, ())}
        seen, queue = set(ends), list(ends)
        while queue:
            node = queue.pop()
            for parent in () if node in closed else self._parents.get(node, ()):
                if parent not in seen:
                    seen.add(parent)
                    queue.append(parent)
        return seen


def arrays_read(outputs: Sequence[mx.array], named: Mapping[str, mx.array]) -> set[str]:
    """The names of those arrays that computing ``outputs`` would read. Computes nothing."""
    return Graph(outputs, named).read_by(range(len(outputs)))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let ``mx.compile`` do nothing: a function compiled now would keep today's placeholders for ever."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
