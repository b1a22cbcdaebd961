"""Runs stacked experts of which a part is in memory: a step reads those that it lacks from the files.

    slots   a few experts of each layer, kept from step to step; those that the last tokens chose least give way
    areas   two, for a call that needs more experts than a layer has slots: one is computed while the other is filled

A call evaluates its indices: one wait for the device in each layer. Few experts are read into slots together, for all
modules of the layer, and the indices become numbers of slots. Many experts pass through the areas in ascending order,
each once, while slots are only filled, not replaced: a prompt leaves the experts of running answers alone. The real
module computes in both cases, with the same rows and the same experts, so no answer depends on what is in memory.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.graph import is_reading
from splitinfer.models.load.expert_files import Bytes, ExpertFiles, Read
from splitinfer.models.load.experts import Experts
from splitinfer.models.load.tables import called_with, put
from splitinfer.models.memory import on_gpu

Ints = NDArray[np.int64]

_OF_AREAS = 8  # the areas get at most this part of the memory
_ROWS_EACH, _ROWS = 4, 16  # MLX's GPUs multiply sorted rows in another way from these numbers of rows on
_HELD = 4 * 2**20  # bytes of results that may wait to be evaluated
_FADES = 0.9  # what a choice still counts when the next one is made


class Shares(NamedTuple):
    """How a stage's memory for experts is divided. ``slots``: experts in each layer; ``area``: bytes of each area."""

    slots: int
    area: int


def shares(experts: Sequence[Experts], nbytes: int) -> Shares:
    """Return how ``nbytes`` are divided. An area is large enough for all experts of the largest module, if it may be.

    >>> from splitinfer.models.load.experts import Column
    >>> column = Column("weight", ("a",), (256,), mx.uint32, mx.uint32, 1024, 1024)
    >>> stage = [Experts(f"layers.{i}.up", 8, (column,)) for i in range(4)]
    >>> shares(stage, 32 * 1024), shares(stage, 8 * 1024), shares(stage, 2048)
    (Shares(slots=7, area=2048), Shares(slots=1, area=1024), Shares(slots=0, area=1024))
    """
    largest = max(experts, key=lambda one: one.nbytes)
    area = min(largest.count, max(1, nbytes // (2 * _OF_AREAS * largest.nbytes_each))) * largest.nbytes_each
    slots = (nbytes - 2 * area) // sum(one.nbytes_each for one in experts)
    return Shares(min(slots, max(one.count for one in experts)), area)


def least_bytes(experts: Sequence[Experts]) -> int:
    """Return the least memory with which a stage's experts can run."""
    return 2 * max((one.nbytes_each for one in experts), default=0)


class _Memory:
    """Memory for as many experts of a module as ``raw`` [bytes] has room for.

    ``arrays``: [count, ...] by parameter; ``bytes_``: the same memory as [count, bytes].
    """

    def __init__(self, one: Experts, raw: mx.array) -> None:
        self.count, self.arrays = min(one.count, raw.size // one.nbytes_each), dict[str, mx.array]()
        self.bytes_, at, memory = dict[str, Bytes](), 0, np.frombuffer(memoryview(raw), np.uint8)  # type: ignore[arg-type]
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
            self._divided[form] = _Memory(one, self._raw)
        return self._divided[form]

    def launch(self, result: mx.array) -> mx.array:
        """Start to compute a result from this memory, and return it."""
        self.result = result
        mx.async_eval(result)  # type: ignore[no-untyped-call]
        return result


@dataclass(slots=True)
class _Choice:
    """The indices of a call, on the host. ``experts``: those among them, ascending, and their numbers of rows."""

    indices: mx.array
    flat: Ints
    experts: Ints
    rows: Ints
    is_few: bool = False


class _Part:
    """One module's experts: what reads them, and its memory in slots."""

    def __init__(self, experts: Experts, files: ExpertFiles, slots: int) -> None:
        self.experts, self.slots = experts, _Memory(experts, _raw(slots * experts.nbytes_each))
        self._sources = {column.name: files.source(column) for column in experts.columns}

    def reads(self, memory: _Memory, place: int, expert: int) -> list[Read]:
        """Return the reads that bring an expert to a place in memory."""
        return [Read(source, expert, memory.bytes_[name][place]) for name, source in self._sources.items()]

    def copy(self, slot: int, memory: _Memory, place: int) -> None:
        """Copy an expert from its slot to a place in memory."""
        for name, held in self.slots.bytes_.items():
            memory.bytes_[name][place] = held[slot]


class _Layer:
    """The modules of one layer that get the same indices, and the experts in their slots."""

    def __init__(self, parts: Sequence[_Part], slots: int) -> None:
        self.parts, self.slots = parts, slots
        self.place = np.full(parts[0].experts.count, -1)  # by expert: its slot
        self._holds = np.full(slots, -1)  # by slot: its expert
        self._chosen = np.zeros(len(self.place))  # by expert: how often it was chosen of late
        self.choice: _Choice | None = None
        self.result: list[mx.array] | None = None  # of calls that read slots and may not be evaluated

    def forget(self) -> None:
        """Forget unevaluated results and the indices of the last call."""
        self.choice = self.result = None

    def lacking(self, choice: _Choice) -> Ints:
        """Return the experts to read into slots: all that are missing if there are few, else the most frequent ones
        that have free slots."""
        here = self.place[choice.experts] >= 0
        self._chosen *= _FADES
        self._chosen[choice.experts] += choice.rows / choice.rows.max()
        lacking, rows = choice.experts[~here], choice.rows[~here]
        free = np.count_nonzero(self._holds < 0)
        return lacking if choice.is_few else lacking[np.argsort(-rows, kind="stable")][:free]

    def begin(self, choice: _Choice, experts: Ints) -> tuple[Ints, list[Read]]:
        """Empty the slots whose experts were chosen least of late, and return them with the reads that fill them."""
        worth = np.where(self._holds < 0, -1.0, self._chosen[self._holds])
        worth[np.isin(self._holds, choice.experts)] = np.inf
        slots = np.argsort(worth, kind="stable")[: len(experts)]
        gone = self._holds[slots]
        self.place[gone[gone >= 0]] = -1
        self._holds[slots] = -1
        pairs = zip(slots.tolist(), experts.tolist(), strict=True)
        return slots, [read for slot, one in pairs for part in self.parts for read in part.reads(part.slots, slot, one)]

    def end(self, slots: Ints, experts: Ints) -> None:
        """Note that experts were read into slots."""
        self.place[experts], self._holds[slots] = slots, experts


class ExpertStore:
    """The experts of a stage, with memory for a part of them. Only the thread that loaded the stage uses it.

    ``nbytes``: the memory, at least ``least_bytes``.

    Raises:
        ModelError: a file is gone or damaged.
    """

    def __init__(self, checkpoint: Checkpoint, experts: Sequence[Experts], nbytes: int) -> None:
        self._counts, self._files = Counter[str](), ExpertFiles(checkpoint)
        share = shares(experts, nbytes)
        self._areas = [_Area(share.area) for _ in range(2)]
        self._layers = list[_Layer]()  # they and their parts do not refer to the store: a cycle is freed late
        same_indices = defaultdict[str, list[Experts]](list)  # by the path above them: such as gate, up and down
        for one in experts:
            same_indices[one.path.rpartition(".")[0]].append(one)
        for several in same_indices.values():
            slots = min(share.slots, several[0].count)
            self._layers.append(_Layer([_Part(one, self._files, slots) for one in several], slots))

    def put_into(self, model: nn.Module) -> None:
        """Replace the modules of experts by modules that read them."""
        modules = dict(model.named_modules())
        for layer in self._layers:
            for part in layer.parts:
                path = part.experts.path
                put(model, path, ExpertsOnDisk(modules[path], self, layer, part))

    def take_counts(self) -> Mapping[str, Any]:
        """Return the counts since the last call, by the names of ``StageFigures``."""
        found, self._counts = self._counts, Counter()
        return found

    def forget(self) -> None:
        """Forget unevaluated results, because their steps are gone. Experts stay in memory."""
        for area in self._areas:
            area.result = None
        for layer in self._layers:
            layer.forget()

    def close(self) -> None:
        """End the threads that read, because the stage is used no more."""
        self.forget()
        self._files.close()

    def choose(self, layer: _Layer, indices: mx.array, *, may_be_few: bool) -> _Choice:
        """Evaluate the indices of a call, and read the experts that the slots lack. The layer's other modules are
        called with the same array, which is evaluated once."""
        if layer.choice is not None and layer.choice.indices is indices:
            return layer.choice
        results = layer.result or []
        layer.forget()
        mx.eval(indices, results)  # before slots that the earlier results are computed from are filled anew
        flat = np.array(indices).reshape(-1).astype(np.int64)
        experts, rows = np.unique(flat, return_counts=True)
        choice = _Choice(indices, flat, experts, rows, may_be_few and len(experts) <= layer.slots)
        self._counts["experts_wanted"] += len(experts)
        self._counts["experts_found"] += int(np.count_nonzero(layer.place[experts] >= 0))
        lacking = layer.lacking(choice)
        if len(lacking):
            slots, reads = layer.begin(choice, lacking)
            self._wait(self._start(reads))
            layer.end(slots, lacking)
        layer.choice = choice
        return choice

    def _start(self, reads: Sequence[Read]) -> "list[Future[None]]":
        self._counts["experts_read"] += sum(one.into.nbytes for one in reads)
        return self._files.start(reads)

    def _wait(self, reads: "Sequence[Future[None]]") -> None:
        """Wait until all reads are done, even if one fails: they write into memory that is used again. Raise
        DeviceFailed if one fails."""
        began = time.monotonic()
        errors = [one.exception() for one in reads]
        self._counts["experts_waiting"] += time.monotonic() - began  # type: ignore[assignment] # of floats, too
        for error in filter(None, errors):
            raise error

    def pass_through(self, layer: _Layer, part: _Part, experts: Ints) -> tuple[Ints, _Area]:
        """Read the first of ``experts`` of a module into an area, as many as it has room for. Return them and the area.
        The device computes from the other area meanwhile."""
        area = self._areas[0]
        self._areas.reverse()
        if area.result is not None:
            mx.eval(area.result)
            area.result = None
        memory = area.of(part.experts)
        experts = experts[: memory.count]
        slots = layer.place[experts]
        lacking = np.flatnonzero(slots < 0).tolist()
        reads = self._start([read for at in lacking for read in part.reads(memory, at, int(experts[at]))])
        for at in np.flatnonzero(slots >= 0).tolist():
            part.copy(slots[at], memory, at)
        self._wait(reads)
        return experts, area


class ExpertsOnDisk(nn.Module):  # type: ignore[misc]
    """Stands for a module of stacked experts, and runs the real one with the experts that a call needs."""

    def __init__(self, real: nn.Module, store: ExpertStore, layer: _Layer, part: _Part) -> None:
        super().__init__()
        experts = part.experts
        self.form = repr((type(real).__name__, experts.count, [(one.shape, one.dtype) for one in experts.columns]))
        zeros = {one.name: mx.zeros((experts.count, *one.shape), one.dtype) for one in experts.columns}
        hidden = {"_real": real, "_store": store, "_layer": layer, "_part": part, "_zeros": zeros}
        for name, value in hidden.items():
            object.__setattr__(self, name, value)  # not among the module's parameters and children
        self._count = experts.count
        for name in self._zeros:
            real.pop(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return what the real module returns."""
        if is_reading():
            return cast(mx.array, called_with(self._zeros, self._real, x, indices, sorted_indices=sorted_indices))
        # On a GPU, how sorted rows are multiplied depends on their number and on that of the experts.
        is_batched = sorted_indices and ("scales" not in self._zeros or indices.size >= _ROWS_EACH * self._count)
        store, layer, part = self._store, self._layer, self._part
        choice = store.choose(layer, indices, may_be_few=not (is_batched and on_gpu()))
        if not choice.is_few:
            return self._in_turns(x, choice, is_batched=is_batched)
        slots = mx.array(layer.place[choice.flat].reshape(indices.shape).astype(np.int32))
        result: mx.array = called_with(part.slots.arrays, self._real, x, slots, sorted_indices=False)
        if result.nbytes > _HELD:
            mx.eval(result)
        layer.result = [*(layer.result or ()), result]
        return result

    def _in_turns(self, x: mx.array, choice: _Choice, *, is_batched: bool) -> mx.array:
        """Return the result of a call whose experts pass through the areas, as many at a time as one has room for."""
        part, found, at, done = self._part, list[mx.array](), 0, 0
        flat = mx.broadcast_to(x, (*choice.indices.shape, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        order = np.argsort(choice.flat, kind="stable")
        while at < len(choice.experts):
            experts, area = self._store.pass_through(self._layer, part, choice.experts[at:])
            memory, count = area.of(part.experts), int(choice.rows[at : at + len(experts)].sum())
            rows = order[done : done + count]
            if is_batched:  # so many that they are multiplied as all rows together would be
                rows = np.pad(rows, (0, max(0, max(_ROWS, _ROWS_EACH * memory.count) - count)), mode="edge")
            places = mx.array(np.searchsorted(experts, choice.flat[rows]).astype(np.int32))
            given = flat[mx.array(rows)], places
            result = called_with(memory.arrays, self._real, *given, sorted_indices=is_batched)
            found.append(area.launch(result)[:count])
            at, done = at + len(experts), done + count
        back = mx.array(np.argsort(order, kind="stable"))
        return mx.concatenate(found)[back].reshape(*choice.indices.shape, *found[0].shape[1:])
