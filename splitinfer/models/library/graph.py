"""Finds the arrays that a result depends on, in MLX's own graph.

Calling a model builds a graph and computes nothing. ``mx.export_to_dot`` prints it; walking it backwards from a result
finds the tensors that it needs. So no table of architectures has to list which parameters belong to the embedding, from
which checkpoint tensors ``sanitize`` makes them, or which arrays layers pass to each other.
"""

import io
import os
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import mlx.core as mx

_OPERATION = re.compile(
    r'\[label ="(\w+).*\n'  # the operation
    r'((?:"\w+" -> \d+\n)*)'  # the arrays that it reads
    r'((?:\{[^\[\n]*\n\d+ -> "\w+"\n)*)'  # the arrays that it makes
    r'((?:\{ rank=source; "\w+"; \}\n)*)'  # arrays that no operation makes, printed before the next one
)
_NODE = re.compile(r'"(\w+)"')
_NAMED_AT_ONCE = 1000  # MLX takes no more keyword arguments


class Graph:
    """The graph of ``results`` at this moment, with names for some of the arrays in it.

    A later assignment into one of the arrays gives its name to another node, so make the graph before that.
    """

    def __init__(self, results: Sequence[mx.array], named: Mapping[str, mx.array]) -> None:
        ends = [mx.stop_gradient(array) for array in results]
        arrays = {id(array): array for array in [*named.values(), *ends]}  # some have two names
        nodes, self._operations, self._maker = _read([*arrays.values()])
        node_of = dict(zip(arrays, nodes, strict=True))
        self._nodes: dict[str, str] = {name: node_of[id(array)] for name, array in named.items()}
        self._results = [node_of[id(array)] for array in ends]

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        readers: dict[str, list[int]] = defaultdict(list)
        for index, (_, read) in enumerate(self._operations):
            for node in read:
                readers[node].append(index)
        return readers

    @cached_property
    def _made(self) -> dict[int, list[str]]:
        made: dict[int, list[str]] = defaultdict(list)
        for node, index in self._maker.items():
            made[index].append(node)
        return made

    def holds(self, name: str) -> bool:
        """Return whether any operation reads this named array."""
        return self._nodes[name] in self._readers

    def read_by(self, results: Collection[int], without: Collection[str] = ()) -> set[str]:
        """Return the named arrays that the results with these indices depend on. An operation that reads an array named
        in ``without`` counts as having no other input."""
        return self._ancestors([self._results[i] for i in results], without)

    def readers(self, name: str) -> set[str]:
        """Return the names of the operations that read a named array."""
        return {self._operations[index][0] for index in self._readers.get(self._nodes[name], ())}

    def origins(self) -> list[tuple[list[str], set[str]]]:
        """Return for each result the named arrays that it is made of, in the order in which its operations take them,
        and the names of these operations."""
        named = {node: name for name, node in reversed(self._nodes.items())}
        return [self._origin(end, named) for end in self._results]

    def _origin(self, end: str, named: Mapping[str, str]) -> tuple[list[str], set[str]]:
        arrays, operations, queue = dict[str, None](), set[str](), [end]
        while queue:
            node = queue.pop()
            if node in named:
                arrays[named[node]] = None
                continue
            if node in self._maker:
                operation, read = self._operations[self._maker[node]]
                operations.add(operation)
                queue += reversed(read)
        return [*arrays], operations - {"StopGradient"}

    def mixed_with(self, name: str) -> set[str]:
        """Return the other named arrays on which the operations that read ``name`` depend."""
        readers = self._readers.get(self._nodes[name], ())
        return self._ancestors([node for index in readers for node in self._operations[index][1]], ()) - {name}

    def met_by(self, name: str) -> set[str]:
        """Return the other named arrays on which the operations depend in which ``name``, transposed or in another
        form, meets other arrays."""
        ends, queue = list[str](), [self._nodes[name]]
        while queue:
            for index in self._readers.get(queue.pop(), ()):
                read = self._operations[index][1]
                if len(set(read)) > 1:
                    ends += read
                else:
                    queue += self._made[index]
        return self._ancestors(ends, ()) - {name}

    def _ancestors(self, ends: Sequence[str], without: Collection[str]) -> set[str]:
        nodes = [self._nodes[name] for name in without]
        closed = {index: [node] for node in nodes for index in self._readers.get(node, ())}
        seen, queue = set(ends), list(ends)
        while queue:
            index = self._maker.get(queue.pop())
            if index is None:
                continue
            for node in closed.get(index) or self._operations[index][1]:
                if node not in seen:
                    seen.add(node)
                    queue.append(node)
        return {name for name, node in self._nodes.items() if node in seen}


def _read(arrays: Sequence[mx.array]) -> tuple[list[str], list[tuple[str, list[str]]], dict[str, int]]:
    """Return each array's node in their common graph, every operation's name and the nodes that it reads, and which
    operation makes a node."""
    # MLX prints the arrays' graphs one after the other, each without what was printed before. A separator after
    # each array marks its end; the last node before that is the array itself, unless it was printed earlier.
    zero = mx.array(0.0)
    printed = [zero]
    for array in arrays:
        printed += [array, -zero]
    text = _print(printed, {})
    first, *sources = _NODE.findall(text[: text.find("[")])
    nodes, operations, maker, last = list[str | None](), list[tuple[str, list[str]]](), dict[str, int](), sources[-1:]
    for label, reads, makes, printed_next in _OPERATION.findall(text):
        read = reads.split('"')[1::2]
        if read == [first]:
            nodes.append(last[0] if len(last) == 1 else None)
            last = []
        else:
            last = makes.split('"')[1::4]
            maker.update(dict.fromkeys(last, len(operations)))
            operations.append((label, read))
        if printed_next:
            last = [printed_next.rsplit('"', 2)[1]]
    return _complete(nodes, arrays, printed, text), operations, maker


def _complete(
    nodes: Sequence[str | None], arrays: Sequence[mx.array], printed: Sequence[mx.array], text: str
) -> list[str]:
    """Find the nodes that are still unknown by printing the same graph again with names in it."""
    unknown = {id(array): array for node, array in zip(nodes, arrays, strict=True) if node is None}
    known: dict[int, str] = {}
    keys = list(unknown)
    for at in range(0, len(keys), _NAMED_AT_ONCE):
        asked = {f"asked_{key}": unknown[key] for key in keys[at : at + _NAMED_AT_ONCE]}
        for node, name in zip(_NODE.findall(text), _NODE.findall(_print(printed, asked)), strict=True):
            if name in asked:
                known[id(asked[name])] = node
    return [known[id(array)] if node is None else node for node, array in zip(nodes, arrays, strict=True)]


def _print(arrays: Sequence[mx.array], named: Mapping[str, mx.array]) -> str:
    text = io.StringIO()
    mx.export_to_dot(text, *arrays, **named)
    return text.getvalue()


def arrays_read(outputs: Sequence[mx.array], *named: Mapping[str, mx.array]) -> tuple[set[str], ...]:
    """Return for each mapping the names of its arrays that ``outputs`` depend on. Computes nothing."""
    arrays = {f"{which} {name}": array for which, each in enumerate(named) for name, array in each.items()}
    read = Graph(outputs, arrays).read_by(range(len(outputs)))
    return tuple({name for name in each if f"{which} {name}" in read} for which, each in enumerate(named))


_compiling = threading.RLock()
_depth = 0
_reader: int | None = None  # the thread that builds graphs for reading


def is_reading() -> bool:
    """Return whether this thread builds a graph that is only read (``uncompiled``)."""
    return _reader == threading.get_ident()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Turn ``mx.compile`` off while a graph is built for reading.

    The printed graph shows all calls of a compiled function as one node, so everything would seem to depend on
    everything; and a function compiled now would hold its placeholders for ever. The switch is one per process, so
    threads that survey stages wait for each other.
    """
    global _depth, _reader
    with _compiling:
        _depth, _reader = _depth + 1, threading.get_ident()
        mx.disable_compile()
        try:
            yield
        finally:
            _depth -= 1
            if _depth == 0:
                _reader = None
                if "MLX_DISABLE_COMPILE" not in os.environ:
                    mx.enable_compile()
