"""Sequences are opened, saved, rolled back and freed as the plans say, or the plan is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from splitinfer.errors import ProtocolError
from splitinfer.models.caches.caches import CachePlace, WindowKVCache
from splitinfer.models.caches.growing import GrowingKVCache
from splitinfer.models.caches.kv_blocks import layer_by_layer
from splitinfer.models.cut.cut import SequenceCaches
from splitinfer.models.rows import kv_pool
from splitinfer.models.rows.kv_pool import KVPool
from tests.stages import held_in


def pool_of(*kinds: Callable[[], Any]) -> KVPool:
    def make_caches() -> SequenceCaches:
        own = [kind() for kind in kinds]
        return SequenceCaches(own, own, CachePlace())

    model = SimpleNamespace(make_caches=make_caches, kv_places=list(range(len(kinds))))
    return KVPool(model)  # type: ignore[arg-type]


def run(pool: KVPool, seq_id: int, start: int, num: int) -> SequenceCaches:
    caches = pool.at(seq_id, start)
    for cache in caches.own:
        if isinstance(cache, ArraysCache):
            cache[0] = mx.full((1, 4), float(start + num))
        else:
            cache.update_and_fetch(*[mx.zeros((1, 1, num, 4))] * 2)
    caches.place.position += num
    return caches


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as caught:
        call()
    return str(caught.value)


def test_others_begin_with_stored_blocks_until_they_are_dropped():
    pool = pool_of(KVCache)
    pool.open(1)
    run(pool, 1, 0, 20)
    pool.save(7, 1, 0, 16)
    pool.save(8, 1, 16, 20)
    pool.free(1)
    for seq_id, length in ((2, 18), (3, 16), (4, 5)):
        pool.open(seq_id, [7, 8] if length > 16 else [7], length)
        assert pool.at(seq_id, length).place.position == length
        assert [cache.offset for cache in run(pool, seq_id, length, 3).own] == [length + 3]
    pool.drop(8)
    pool.drop(8)
    assert (
        refused(lambda: pool.open(5, [7, 8], 18))
        == "the plan starts a sequence from block 8, but that block is not stored"
    )
    assert "cannot start from blocks [7]" in refused(lambda: pool.open(5, [7], 17))
    assert "cannot start from blocks [7]" in refused(lambda: pool.open(5, [7], 0))
    assert refused(lambda: pool.open(2, [7], 5)) == "sequence 2 was opened twice"
    assert len(pool._entries) == 3


def test_what_a_sequence_left_is_taken_over_by_the_next():
    pool = pool_of(KVCache, lambda: WindowKVCache(8))
    pool.open(1)
    run(pool, 1, 0, 20)
    arrays = [array for cache in pool.at(1, 20).own for array in (cache.keys, cache.values)]
    held = held_in(pool)
    pool.retain(1)
    assert (len(pool._entries), held_in(pool)) == (0, held)
    assert "never opened" in refused(lambda: pool.at(1, 20))
    pool.take_over(2, 1, 18)
    caches = pool.at(2, 18)
    assert caches.place.position == 18
    assert all(a is b for a, b in zip(arrays, [x for c in caches.own for x in (c.keys, c.values)], strict=True))
    assert [cache.offset for cache in run(pool, 2, 18, 3).own] == [21, 21]


def test_what_was_left_is_freed_or_taken_over_once():
    pool = pool_of(KVCache)
    for seq_id in (1, 2):
        pool.open(seq_id)
        run(pool, seq_id, 0, 20)
        pool.retain(seq_id)
    pool.free(1)
    assert "take over 3 tokens of sequence 1" in refused(lambda: pool.take_over(3, 1, 3))
    assert "take over 21 tokens" in refused(lambda: pool.take_over(3, 2, 21))
    assert refused(lambda: pool.retain(9)) == "sequence 9 cannot be retained: it is not open"
    assert held_in(pool) == 0


def test_a_state_that_was_left_is_taken_over_where_it_is():
    pool = pool_of(KVCache, lambda: ArraysCache(1))
    for seq_id, length in ((1, 20), (2, 19)):
        pool.open(seq_id)
        run(pool, seq_id, 0, 20)
        pool.retain(seq_id)
        if length < 20:
            assert "cannot go back 1 tokens" in refused(lambda: pool.take_over(4, 2, 19))
        else:
            pool.take_over(3, 1, 20)
    assert pool.at(3, 20).place.position == 20


def test_a_recurrent_state_goes_back_only_within_a_block():
    pool = pool_of(lambda: ArraysCache(1), KVCache)
    pool.open(1)
    run(pool, 1, 0, 10)
    run(pool, 1, 10, 5)
    assert refused(lambda: pool.at(1, 14)) == "the caches of sequence 1 cannot go back 1 tokens"
    before = pool.at(1, 15).own[0][0].tolist()
    block = pool.begin(1, 3, follows=False)
    assert block is not None
    assert [a.tolist() for a in block.arrays()] == [before]
    after = run(pool, 1, 15, 4).own[0][0].tolist()
    assert after != before
    assert refused(lambda: pool.at(1, 14)) == "the caches of sequence 1 cannot go back 5 tokens"


def test_a_window_goes_back_by_its_slack_counted_from_the_furthest():
    pool = pool_of(lambda: WindowKVCache(24))
    pool.open(1)
    for start in range(0, 3000, 100):
        run(pool, 1, start, 100)
    run(pool, 1, 3000 - WindowKVCache.SLACK, 1)  # now it is at 2745, and was at 3000
    assert refused(lambda: pool.at(1, 2300)) == "the caches of sequence 1 cannot go back 445 tokens"
    assert pool.at(1, 2745).place.position == 2745


def test_a_sequence_that_is_freed_gives_way_to_its_blocks_layer_by_layer():
    """Else all of its KV would be there twice."""
    pool, length, size = pool_of(*[KVCache] * 24), 2048, 256
    pool.open(1)
    for cache in pool.at(1, 0).own:
        cache.update_and_fetch(*(mx.random.normal((1, 1, length, size // 8)) for _ in range(2)))
    pool.at(1, 0).place.position = length
    mx.eval([[cache.keys, cache.values] for cache in pool.at(1, length).own])
    held, beginning = held_in(pool), mx.get_active_memory()
    blocks = [pool.save(start // 256, 1, start, start + 256) for start in range(0, length, 256)]
    pool.free(1)
    mx.reset_peak_memory()
    mx.eval(layer_by_layer(blocks))
    assert mx.get_peak_memory() - beginning < held / 2


def test_a_step_waits_only_where_it_would_copy_too_much(monkeypatch: pytest.MonkeyPatch):
    """Sequence 1 has 4,096 bytes in each array, sequence 2 as many and 3 none; 10,000 may be copied."""
    monkeypatch.setattr(kv_pool, "MAX_COPIED", 10_000)
    pool = pool_of(GrowingKVCache)
    for seq_id in (1, 2, 3):
        pool.open(seq_id)
    for seq_id in (1, 2):
        pool.at(seq_id, 0).own[0].update_and_fetch(*[mx.zeros((1, 1, 1024, 1))] * 2)
    assert pool.must_end_first([1], []) == 0
    assert pool.must_end_first([1], [[2], [3]]) == 0, "other sequences' arrays are other arrays"
    assert pool.must_end_first([1], [[1]]) == 0, "8,192 bytes"
    assert pool.must_end_first([1, 2], [[1, 2]]) == 1
    assert pool.must_end_first([1, 2], [[3], [2, 1], [3]]) == 2
    assert pool.must_end_first([1], [[1], [1], [3]]) == 1, "two copies are live at a time"
    assert pool.must_end_first([3, 9], [[3, 9]]) == 0
