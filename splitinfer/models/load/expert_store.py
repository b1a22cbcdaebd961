"""Runs stacked experts of which a part is in memory: a step reads those that it lacks from the files.

    slots   a few experts of each layer, kept from step to step; the least recently used give way
    areas   two, for a call that needs more experts than a layer has slots: one is computed while the other is filled

A call evaluates its indices: one wait for the device in each layer. Few experts are read into slots together, for all
modules of the layer, and the indices become numbers of slots. Many experts pass through the areas in ascending order,
each once, while slots are only filled, not replaced: a prompt leaves the experts of running answers alone. The real
module computes in both cases, with the same rows and the same experts, so no answer depends on what is in memory.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.graph import is_reading
from splitinfer.models.load.expert_files import Bytes, ExpertFiles, Read
from splitinfer.models.load.experts import Experts, by_layer
from splitinfer.models.load.tables import put
from splitinfer.models.memory import on_gpu

Ints = NDArray[np.int64]

_OF_AREAS = 4  # the areas get at most this part of the memory
_ROWS_EACH, _ROWS = 4, 16  # MLX's GPUs multiply sorted rows in another way from these numbers of rows on
_NEARLY_ALL = 0.9  # the share of experts from which on the next layer's are read before its router is computed
_HELD = 4 * 2**20  # bytes of results that may wait to be evaluated


@dataclass(slots=True)
class ExpertCounts:
    """What a stage's experts have taken since the last ``take``: experts wanted and found in memory, one for each layer
    and step, bytes read, and seconds waited for them."""

    wanted: int = 0
    found: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Shares:
    """How a stage's memory for experts is divided. ``slots``: experts in each layer; ``area``: bytes of each area."""

    slots: int
    area: int


def shares(experts: Sequence[Experts], nbytes: int) -> Shares:
    """Return how ``nbytes`` are divided. An area is large enough for all experts of the largest module, if it may be.

    >>> from splitinfer.models.load.experts import Column
    >>> column = Column("weight", ("a",), (256,), mx.uint32, mx.uint32, 1024, 1024)
    >>> stage = [Experts(f"layers.{i}.up", 8, (column,)) for i in range(4)]
    >>> shares(stage, 32 * 1024), shares(stage, 8 * 1024), shares(stage, 2048)
    (Shares(slots=6, area=4096), Shares(slots=1, area=1024), Shares(slots=0, area=1024))
    """
    largest = max(experts, key=lambda one: one.nbytes)
    area = min(largest.count, max(1, nbytes // (2 * _OF_AREAS * largest.nbytes_each))) * largest.nbytes_each
    slots = (nbytes - 2 * area) // sum(one.nbytes_each for one in experts)
    return Shares(min(slots, max(one.count for one in experts)), area)


def least_bytes(experts: Sequence[Experts]) -> int:
    """Return the least memory with which a stage's experts can run."""
    return 2 * max((one.nbytes_each for one in experts), default=0)


@dataclass(slots=True)
class _Memory:
    """Memory for ``count`` experts of a module. ``arrays``: [count, ...] by parameter; ``bytes_``: the same memory as
    [count, bytes]."""

    count: int
    arrays: dict[str, mx.array] = field(default_factory=dict)
    bytes_: dict[str, Bytes] = field(default_factory=dict)

    def add(self, one: Experts, raw: mx.array) -> None:
        """Divide ``raw`` [bytes] among the columns of a module."""
        at, memory = 0, np.frombuffer(memoryview(raw), np.uint8)  # type: ignore[arg-type]
        for column in one.columns:
            end = at + self.count * column.nbytes
            self.bytes_[column.name] = memory[at:end].reshape(self.count, column.nbytes)
            self.arrays[column.name] = raw[at:end].view(column.dtype).reshape(self.count, *column.shape)
            at = end
        mx.eval(self.arrays)  # views of the same memory


def _raw(nbytes: int) -> mx.array:
    raw = mx.zeros(nbytes, mx.uint8)
    mx.eval(raw)
    return raw


class _Area:
    """Memory through which many experts pass. ``result``: of the last call that reads it."""

    def __init__(self, nbytes: int) -> None:
        self._raw, self._divided = _raw(nbytes), dict[Any, _Memory]()
        self.result: mx.array | None = None

    def of(self, one: Experts) -> _Memory:
        """Return the memory divided for a module: for all of its experts, or as many as have room."""
        form = tuple((column.name, column.shape, column.dtype) for column in one.columns), one.count
        if form not in self._divided:
            memory = _Memory(min(one.count, self._raw.size // one.nbytes_each))
            memory.add(one, self._raw)
            self._divided[form] = memory
        return self._divided[form]


@dataclass(slots=True)
class _Choice:
    """The indices of a call, on the host. ``experts``: those among them, ascending, and their numbers of rows."""

    indices: mx.array
    flat: Ints
    experts: Ints
    rows: Ints
    is_few: bool = False


@dataclass(slots=True)
class _Filling:
    """An area that is being filled with ``experts`` of a module."""

    part: "ExpertsOnDisk"
    experts: Ints
    area: _Area
    reads: "list[Future[None]]"


class ExpertStore:
    """The experts of a stage, with memory for a part of them. Only the thread that loaded the stage uses it.

    ``nbytes``: the memory, at least ``least_bytes``.

    Raises:
        ModelError: a file is gone or damaged.
    """

    def __init__(self, checkpoint: Checkpoint, experts: Sequence[Experts], nbytes: int) -> None:
        self.experts, self.files, self.counts = tuple(experts), ExpertFiles(checkpoint), ExpertCounts()
        self._shares = shares(experts, nbytes)
        self._areas = [_Area(self._shares.area) for _ in range(2)]
        self._ahead: _Filling | None = None
        self._layers = list[_Layer]()

    def put_into(self, model: nn.Module) -> None:
        """Replace the modules of experts by modules that read them."""
        modules = dict(model.named_modules())
        for several in by_layer(self.experts).values():
            layer = _Layer(self, min(self._shares.slots, several[0].count))
            self._layers.append(layer)
            for one in several:
                put(model, one.path, ExpertsOnDisk(modules[one.path], one, self, layer))

    def take_counts(self) -> ExpertCounts:
        """Return the counts since the last call."""
        found, self.counts = self.counts, ExpertCounts()
        return found

    def forget(self) -> None:
        """Forget unevaluated results, because their steps failed. Experts stay in memory."""
        self._wait(self._ahead.reads if self._ahead else [], raises=False)
        self._ahead = None
        for area in self._areas:
            area.result = None
        for layer in self._layers:
            layer.forget()

    def read(self, reads: Sequence[Read]) -> None:
        """Read experts into memory. Raise DeviceFailed if that fails."""
        self._wait(self._start(reads))

    def _start(self, reads: Sequence[Read]) -> "list[Future[None]]":
        self.counts.nbytes += sum(one.into.nbytes for one in reads)
        return self.files.start(reads)

    def _wait(self, reads: "Sequence[Future[None]]", *, raises: bool = True) -> None:
        """Wait until all reads are done, even if one fails: they write into memory that is used again."""
        began = time.monotonic()
        errors = [one.exception() for one in reads]
        self.counts.seconds += time.monotonic() - began
        if raises:
            for error in filter(None, errors):
                raise error

    # -- many experts ----------------------------------------------------------------------------

    def pass_through(self, part: "ExpertsOnDisk", experts: Ints) -> tuple[_Area, _Memory]:
        """Return an area with ``experts`` of a module: each at its own place if all have room, else in this order."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._wait(ahead.reads)
            if ahead.part is part and np.isin(experts, ahead.experts).all():
                return ahead.area, ahead.area.of(part.experts)
        filling = self._fill(part, experts)
        self._wait(filling.reads)
        return filling.area, filling.area.of(part.experts)

    def foresee(self, part: "ExpertsOnDisk", experts: Ints) -> None:
        """Start to fill the other area with experts that the next call probably needs, if all of them have places."""
        if self.room(part) == part.experts.count:
            self._ahead = self._fill(part, experts)

    def room(self, part: "ExpertsOnDisk") -> int:
        """Return how many of a module's experts an area has room for."""
        return self._areas[0].of(part.experts).count

    def _fill(self, part: "ExpertsOnDisk", experts: Ints) -> _Filling:
        area = self._areas[0]
        self._areas.reverse()
        if area.result is not None:
            mx.eval(area.result)
            area.result = None
        memory, reads = area.of(part.experts), list[Read]()
        places = experts if memory.count == part.experts.count else np.arange(len(experts))
        for place, expert in zip(places.tolist(), experts.tolist(), strict=True):
            reads += part.into(memory, place, expert)
        return _Filling(part, experts, area, self._start(reads))

    def following(self, layer: "_Layer") -> "_Layer | None":
        """Return the layer that is called after ``layer``, if there is one."""
        at = self._layers.index(layer) + 1
        return self._layers[at] if at < len(self._layers) else None


class _Layer:
    """The modules of one layer that get the same indices, and the experts in their slots."""

    def __init__(self, store: ExpertStore, slots: int) -> None:
        self._store, self.slots = store, slots
        self.parts = list["ExpertsOnDisk"]()
        self.order = list["ExpertsOnDisk"]()  # in which they are called
        self.place = np.full(0, -1)  # by expert: its slot
        self._holds = np.full(slots, -1)  # by slot: its expert
        self._used = np.zeros(slots, np.int64)  # by slot: the number of the call that used it last
        self._calls = 0
        self._choice: _Choice | None = None
        self.result: list[mx.array] | None = None  # of calls that read slots and may not be evaluated

    def add(self, part: "ExpertsOnDisk") -> None:
        """Add a module."""
        self.parts.append(part)
        self.place = np.full(part.experts.count, -1)

    def choose(self, part: "ExpertsOnDisk", indices: mx.array, *, may_be_few: bool) -> _Choice:
        """Evaluate the indices of a call, and read the experts that the slots lack. The layer's other modules are
        called with the same array, which is evaluated once."""
        if part not in self.order:
            self.order.append(part)
        if self._choice is not None and self._choice.indices is indices:
            return self._choice
        self._choice, results, self.result = None, self.result, None
        mx.eval(indices, results or [])
        flat = np.array(indices).reshape(-1).astype(np.int64)
        experts, rows = np.unique(flat, return_counts=True)
        lacking = experts[self.place[experts] < 0]
        counts = self._store.counts
        counts.wanted += len(experts)
        counts.found += len(experts) - len(lacking)
        is_few = may_be_few and len(experts) <= self.slots
        if not is_few:  # the most frequent ones of them
            free = np.count_nonzero(self._holds < 0)
            lacking = lacking[np.argsort(-rows[self.place[experts] < 0], kind="stable")][:free]
        self._calls += 1
        here = self.place[experts]
        self._used[here[here >= 0]] = self._calls
        if len(lacking):
            self._keep(lacking)
        self._choice = _Choice(indices, flat, experts, rows, is_few)
        return self._choice

    def forget(self) -> None:
        """Forget unevaluated results and the indices of the last call."""
        self._choice = self.result = None

    def _keep(self, experts: Ints) -> None:
        """Read experts into the slots that were not used for the longest time."""
        slots = np.argsort(self._used, kind="stable")[: len(experts)]
        gone = self._holds[slots]
        self.place[gone[gone >= 0]] = -1
        self._holds[slots] = -1
        pairs = [*zip(slots.tolist(), experts.tolist(), strict=True)]
        self._store.read([read for slot, expert in pairs for part in self.parts for read in part.reads(slot, expert)])
        self.place[experts], self._holds[slots], self._used[slots] = slots, experts, self._calls


class ExpertsOnDisk(nn.Module):
    """Stands for a module of stacked experts, and runs the real one with the experts that a call needs."""

    def __init__(self, real: nn.Module, experts: Experts, store: ExpertStore, layer: _Layer) -> None:
        super().__init__()
        self.form = repr((type(real).__name__, experts.count, [(one.shape, one.dtype) for one in experts.columns]))
        own = vars(self)  # not among the module's parameters and children
        own["experts"], own["_real"], own["_store"], own["_layer"] = experts, real, store, layer
        own["_sources"] = {one.name: store.files.source(one) for one in experts.columns}
        own["_zeros"] = {one.name: mx.zeros((experts.count, *one.shape), one.dtype) for one in experts.columns}
        own["_slots"] = _Memory(layer.slots)
        self._slots.add(experts, _raw(layer.slots * experts.nbytes_each))
        layer.add(self)
        for name in self._zeros:
            real.pop(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)

    def reads(self, slot: int, expert: int) -> list[Read]:
        """Return the reads of an expert into a slot."""
        return [Read(source, expert, self._slots.bytes_[name][slot]) for name, source in self._sources.items()]

    def into(self, memory: _Memory, place: int, expert: int) -> list[Read]:
        """Copy an expert from its slot to a place of other memory, or return the reads that bring it there."""
        slot = self._layer.place[expert]
        if slot < 0:
            return [Read(source, expert, memory.bytes_[name][place]) for name, source in self._sources.items()]
        for name, held in self._slots.bytes_.items():
            memory.bytes_[name][place] = held[slot]
        return []

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return what the real module returns."""
        if is_reading():
            return self._with(self._zeros, x, indices, sorted_indices)
        count, is_quantised = self.experts.count, "scales" in self._zeros
        # On a GPU the number of experts decides with sorted rows how it multiplies; the areas have the same number.
        by_experts = sorted_indices and on_gpu() and (not is_quantised or indices.size >= _ROWS_EACH * count)
        choice = self._layer.choose(self, indices, may_be_few=not by_experts)
        if not choice.is_few:
            return self._many(x, choice, sorted_indices, is_quantised)
        slots = mx.array(self._layer.place[choice.flat].reshape(indices.shape).astype(np.int32))
        result = self._with(self._slots.arrays, x, slots, sorted_indices=False)
        if result.nbytes > _HELD:
            mx.eval(result)
        self._layer.result = [*(self._layer.result or ()), result]
        return result

    def _with(self, arrays: dict[str, mx.array], x: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
        for name, array in arrays.items():
            self._real[name] = array
        try:
            return self._real(x, indices, sorted_indices=sorted_indices)  # type: ignore[no-any-return]
        finally:
            for name in arrays:
                self._real.pop(name, None)

    def _many(self, x: mx.array, choice: _Choice, sorted_indices: bool, is_quantised: bool) -> mx.array:
        """Return the result of a call that needs many experts."""
        store, room = self._store, self._store.room(self)
        if room == self.experts.count:
            area, memory = store.pass_through(self, choice.experts)
            result = self._with(memory.arrays, x, choice.indices, sorted_indices)
            self._launch(area, result)
            self._foresee(choice)
            return result
        flat = mx.broadcast_to(x, (*choice.indices.shape, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        is_batched = sorted_indices and (not is_quantised or len(choice.flat) >= _ROWS_EACH * self.experts.count)
        order, found, done = np.argsort(choice.flat, kind="stable"), list[mx.array](), 0
        for at in range(0, len(choice.experts), room):
            experts = choice.experts[at : at + room]
            count = int(choice.rows[at : at + room].sum())
            rows = order[done : done + count]
            if is_batched:  # in the same way as all rows together
                rows = np.pad(rows, (0, max(0, max(_ROWS, _ROWS_EACH * room) - count)), mode="edge")
            area, memory = store.pass_through(self, experts)
            places = mx.array(np.searchsorted(experts, choice.flat[rows]).astype(np.int32))
            result = self._with(memory.arrays, flat[mx.array(rows)], places, is_batched)
            self._launch(area, result)
            found.append(result[:count])
            done += count
        back = mx.array(np.argsort(order, kind="stable"))
        return mx.concatenate(found)[back].reshape(*choice.indices.shape, *found[0].shape[1:])

    def _launch(self, area: _Area, result: mx.array) -> None:
        area.result = result
        mx.async_eval(result)  # type: ignore[no-untyped-call]

    def _foresee(self, choice: _Choice) -> None:
        """Read what the next call needs while this one is computed: the next module's experts, or those of the next
        layer if it will need nearly all."""
        order, layer = self._layer.order, self._store.following(self._layer)
        at = order.index(self) + 1
        if at < len(order):
            self._store.foresee(order[at], choice.experts)
        elif layer is not None and layer.order and len(choice.experts) >= _NEARLY_ALL * self.experts.count:
            self._store.foresee(layer.order[0], np.arange(layer.order[0].experts.count))
