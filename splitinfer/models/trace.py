"""Which arrays a result depends on, asked of MLX's own graph.

MLX is lazy: calling a model builds a graph and computes nothing. ``mx.export_to_dot`` prints that
graph, with a name for every array we care about; walking it backwards from the output finds the
tensors that a stage really reads. So no table of architectures has to say which parameters belong
to the embedding, which to the head, and which checkpoint tensors ``sanitize`` made them of.
"""

import io
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import mlx.core as mx

_EDGE = re.compile(r'^("?)(.+?)\1 -> ("?)(.+?)\3$')
_OUTPUT = "output "  # no parameter has a space in its name


def arrays_read(outputs: Sequence[mx.array], named: Mapping[str, mx.array]) -> set[str]:
    """The names of those arrays that computing ``outputs`` would read. Computes nothing."""
    if not outputs:
        return set()
    ends = {f"{_OUTPUT}{i}": array for i, array in enumerate(outputs)}
    text = io.StringIO()
    mx.export_to_dot(text, **{**named, **ends})
    return _ancestors(text.getvalue(), set(ends)) & set(named)


def _ancestors(dot: str, ends: set[str]) -> set[str]:
    parents = defaultdict(list)
    for line in dot.splitlines():
        edge = _EDGE.match(line)
        if edge:
            parents[edge.group(4)].append(edge.group(2))
    seen, queue = set(ends), deque(ends)
    while queue:
        for parent in parents[queue.popleft()]:
            if parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return seen
