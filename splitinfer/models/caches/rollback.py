"""Rolls recurrent states back to any row of a block of drafts, without another step.

A recurrent state stands for all tokens so far, so it cannot be cut. But most of a module's work on a row, its
projections, depends on that row alone. So for a block of drafts a stage keeps (``DraftedBlock``) the states from before
it, the rows given to each module that updates a state, and the results of that module's linear layers:

    projections    kept     kept     kept     kept
    state      S0 -----> S1 -----> S2 -----> S3 -----> S4      S0 is kept, S4 is there
    rollback   S0 -----> S1 -----> S2                          if row 2 is wrong

The graph of the rollback becomes a part of the next step's. If a model's modules cannot run this way, the whole stage
runs those rows again. A trial (``kv_trial``) finds out which way is right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from splitinfer.models.caches.caches import arrays_within, copied_state, states_of
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.library.layers import children_watched

_LINEAR = (nn.Linear, nn.QuantizedLinear)


class Rollback(StrEnum):
    """How a stage's states go back to a row of a block."""

    MODULES = "modules"  # the modules with states run again, on kept projections
    STAGE = "stage"  # the whole stage runs again


@dataclass(slots=True)
class _Call:
    """A call of a module with a state, for ``count`` rows of one sequence. ``results``: of its linear layers, in the
    order of their calls; ``None`` for a result without one row per row."""

    module: nn.Module
    args: tuple[Any, ...]
    named: dict[str, Any]
    count: int
    results: list[mx.array | None]

    def again(self, count: int) -> None:
        """Run the module again on the first ``count`` rows."""
        results = iter(self.results)

        def recalled(layer: Any, args: Any, named: Any) -> Any:
            result = next(results)
            return layer(*args, **named) if result is None else result[:, :count]

        with children_watched([(holder, key, recalled) for holder, key in _linear_layers(self.module)]):
            self.module(
                *(_first_rows(value, self.count, count) for value in self.args),
                **{name: _first_rows(value, self.count, count) for name, value in self.named.items()},
            )

    def arrays(self) -> Iterator[mx.array]:
        """Yield the arrays to evaluate together with the step, so that their graph is not kept."""
        yield from (value for value in (*self.args, *self.named.values()) if isinstance(value, mx.array))
        yield from (result for result in self.results if result is not None)


@dataclass(slots=True)
class DraftedBlock:
    """The record of a block of drafts of one sequence, from which it can be rolled back to any of the block's rows.

    Attributes:
        start: the block's first position.
        states: the states before the block, in the order of the sequence's own caches.
        tokens, hidden: the block's rows as given to the stage, if the whole stage would run them again.
    """

    start: int
    states: list[Any]
    way: Rollback = Rollback.MODULES
    tokens: mx.array | None = None
    hidden: mx.array | None = None
    calls: list[_Call] = field(default_factory=list)

    @classmethod
    def of(cls, caches: SequenceCaches, way: Rollback) -> "DraftedBlock | None":
        """Return a new block at a sequence's position. Return None if the sequence has no states."""
        states = state_caches(caches)
        if not states:
            return None
        return cls(caches.place.position, [copied_state(cache.state) for cache in states], way)

    def given(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Record the [n] token ids and [n, d] hidden states of the block, if the whole stage would run them again."""
        if self.way is Rollback.STAGE:
            self.tokens, self.hidden = tokens, hidden

    def call(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the module on the block's rows and return its result. Record the call if an argument is a state."""
        values = (*args, *named.values())
        if self.way is Rollback.STAGE or not any(_is_state(value) for value in values):
            return module(*args, **named)
        rows = next((v.shape[1] for v in values if isinstance(v, mx.array) and v.ndim > 1 and v.shape[0] == 1), 0)
        results: list[mx.array | None] = []

        def noted(layer: Any, args: Any, named: Any) -> Any:
            result = layer(*args, **named)
            results.append(result if result.ndim >= 2 and result.shape[:2] == (1, rows) else None)
            return result

        with children_watched([(holder, key, noted) for holder, key in _linear_layers(module)]):
            result = module(*args, **named)
        self.calls.append(_Call(module, args, named, rows, results))
        return result

    def restore(self, stage: Callable[..., Any], caches: SequenceCaches, count: int) -> None:
        """Bring the states to row ``count``. Builds a graph and computes nothing yet. All other caches must already be
        at the position that ``resumes_at`` returns. ``stage``: a ``StageModel``."""
        for cache, state in zip(state_caches(caches), self.states, strict=True):
            cache.state = copied_state(state)
        if count and self.way is Rollback.MODULES:
            for call in self.calls:
                call.again(count)
        elif count:
            assert self.tokens is not None, "no step was run since the block was begun"
            hidden = None if self.hidden is None else self.hidden[None, :count]
            stage(self.tokens[None, :count], caches, hidden)

    def resumes_at(self, position: int) -> int:
        """Return the position to which other caches must be rolled back before ``restore`` to ``position``."""
        return self.start if self.way is Rollback.STAGE else position

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate together with the block's step."""
        return [*arrays_within(self.states), *(array for call in self.calls for array in call.arrays())]


def state_caches(caches: SequenceCaches) -> list[Any]:
    """Return the caches of a sequence that hold a state."""
    return [one for cache in caches.own for one in states_of(cache)]


def _is_state(value: Any) -> bool:
    return hasattr(value, "is_trimmable") and any(True for _ in states_of(value))


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the linear layers within a module, each as its holder and its name there."""
    for key, child in module.items():
        if isinstance(child, _LINEAR):
            yield module, key
        elif isinstance(child, nn.Module):
            yield from _linear_layers(child)


def _first_rows(value: Any, count: int, wanted: int) -> Any:
    """Return an argument cut to the first ``wanted`` of ``count`` rows, if it has rows."""
    if isinstance(value, mx.array) and value.ndim >= 2 and value.shape[:2] == (1, count):
        return value[:, :wanted]
    return value
