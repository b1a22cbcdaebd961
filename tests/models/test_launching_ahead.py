"""What launching ahead costs in memory: a sequence's KV is written in place, and grows layer after layer."""

from collections.abc import Sequence
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.kv.growth import BLOCK, mean_room, phases_of, room
from splitinfer.models import kv_pool
from splitinfer.models.caches import Place
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.growing import GrowingKVCache
from splitinfer.models.kv_pool import KVPool

LAYERS, HEAD = 8, 64
LENGTH = 32 * 1024
KV = LAYERS * 2 * LENGTH * HEAD * 4  # bytes


# -- the ladder ------------------------------------------------------------------------------------

lengths = st.integers(1, 300_000)


@given(lengths, st.floats(0, 1, exclude_max=True))
def test_there_is_room_and_never_much_more(length: int, phase: float):
    here = room(length, phase)
    assert here % 16 == 0
    assert length <= here < length + length / 8 + BLOCK


@given(lengths, st.integers(16, 100), st.integers(0, 100))
def test_what_is_counted_is_what_is_held(length: int, num_layers: int, first: int):
    """On any stage of some layers: whole blocks are counted, and the phases are not quite even."""
    held = [room(length, phase) for i in range(first, first + num_layers) for phase in phases_of(i)]
    mean, counted = sum(held) / len(held), mean_room(length)
    assert counted - BLOCK - 0.01 * length <= mean <= counted + 0.01 * length


# -- the rule --------------------------------------------------------------------------------------


def pool_of_long_and_short(monkeypatch: pytest.MonkeyPatch) -> KVPool:
    """Sequence 1 has 2,048 bytes a block and array, sequence 2 as many and 3 none; 10,000 may be copied."""

    def make_caches() -> SequenceCaches:
        own = [GrowingKVCache()]
        return SequenceCaches(own, own, Place())

    model = SimpleNamespace(make_caches=make_caches)
    monkeypatch.setattr(kv_pool, "MAX_COPIED", 10_000)
    pool = KVPool(model)  # type: ignore[arg-type]
    for seq_id, tokens in ((1, 1024), (2, 1024), (3, 0)):
        pool.open(seq_id)
        if tokens:
            pool.at(seq_id, 0).own[0].update_and_fetch(*[mx.zeros((1, 1, tokens, 1))] * 2)
    return pool


def test_a_step_waits_only_where_it_would_copy_too_much(monkeypatch: pytest.MonkeyPatch):
    pool = pool_of_long_and_short(monkeypatch)
    assert pool.must_end_first([1], []) == 0
    assert pool.must_end_first([1], [[2], [3]]) == 0, "other sequences' arrays are other arrays"
    assert pool.must_end_first([1], [[1]]) == 0, "8,192 bytes"
    assert pool.must_end_first([1, 2], [[1, 2]]) == 1
    assert pool.must_end_first([1, 2], [[3], [2, 1], [3]]) == 2
    assert pool.must_end_first([1], [[1], [1], [3]]) == 1, "two copies are live at a time"
    assert pool.must_end_first([3, 9], [[3, 9]]) == 0


# -- the memory ------------------------------------------------------------------------------------


class Layers:
    """A stage of layers that attend, and nothing else: MLX's CPU backend launches at most some hundred operations
    ahead, so with a whole model's no copies of all layers could ever be in flight."""

    own_places = tuple(range(LAYERS))

    def make_caches(self) -> SequenceCaches:
        own = [GrowingKVCache(phases_of(i)) for i in self.own_places]
        return SequenceCaches(own, own, Place())

    def __call__(self, x: mx.array, caches: SequenceCaches) -> mx.array:
        """[1, 1, n, d] after all layers."""
        for cache in caches.own:
            keys, values = cache.update_and_fetch(x, x)
            x = mx.softmax(x @ keys.swapaxes(2, 3), axis=-1) @ values
        caches.place.position += x.shape[2]
        return x


class Ahead:
    """Launches steps on one long sequence, as a loop does: three before the first is waited for."""

    def __init__(self, length: int, *, waits: bool) -> None:
        self.layers, self.waits = Layers(), waits
        self.pool = KVPool(self.layers)  # type: ignore[arg-type]
        self.in_flight: list[mx.array] = []
        self.pool.open(1)
        caches = self.pool.at(1, 0)
        for cache in caches.own:
            cache.update_and_fetch(*[mx.zeros((1, 1, length, HEAD))] * 2)
            mx.eval(cache.keys, cache.values)
        self.position = caches.place.position = length

    def launch(self, rows: int) -> None:
        caches = self.pool.at(1, self.position)
        y = self.layers(mx.zeros((1, 1, rows, HEAD)), caches)
        self.position += rows
        if self.waits:
            for _ in range(self.pool.must_end_first([1], [[1]] * len(self.in_flight))):
                self.finish()
        mx.async_eval(y, [(cache.keys, cache.values) for cache in caches.own])
        self.in_flight.append(y)

    def finish(self) -> None:
        mx.eval(self.in_flight.pop(0))

    def peak(self, steps: Sequence[int]) -> float:
        """The memory beyond what the sequence held before, by its KV. The device is busy when the first is launched."""
        limit = mx.set_memory_limit(2**40)  # one that a stage of another test set would end steps before the next
        try:
            return self._peak(steps)
        finally:
            mx.set_memory_limit(limit)

    def _peak(self, steps: Sequence[int]) -> float:
        mx.synchronize()
        mx.clear_cache()
        numbers = mx.random.uniform(shape=(1_000_000,))
        mx.eval(numbers)
        before = mx.get_active_memory() + numbers.nbytes
        mx.reset_peak_memory()
        work = mx.sort(numbers)
        mx.async_eval(work)
        for rows in steps:
            if len(self.in_flight) == 3:
                self.finish()
            self.launch(rows)
        while self.in_flight:
            self.finish()
        return (mx.get_peak_memory() - before) / KV


BEFORE_SOME_GROW = next(
    n for n in range(LENGTH - 4096, LENGTH) if any(room(n + 1, one) > room(n, one) for one in phases_of(1))
)


@pytest.mark.nightly
@pytest.mark.parametrize("length", [BEFORE_SOME_GROW, LENGTH - 4])
@pytest.mark.parametrize("steps", [[16] * 6, [8, 8, 8, 1, 8], [1] * 6], ids=["a prompt", "drafts", "decodes"])
def test_a_long_sequence_is_not_copied(length: int, steps: list[int]):
    assert Ahead(length, waits=True).peak(steps) < 0.4
