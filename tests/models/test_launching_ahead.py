"""What launching ahead may cost in memory: KV grows layer after layer, and a step waits rather than copy too much."""

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
