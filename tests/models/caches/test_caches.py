"""Caches of a stage: a window that forgets without anybody noticing, and ghosts that are only read."""

import itertools
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches

from splitinfer.models.caches.caches import (
    CachePlace,
    WindowKVCache,
    arrays_of,
    make_list,
    own_cache,
    rewind_limit,
    trim,
)
from splitinfer.models.caches.growing import GrowingKVCache

HEADS, DIM, LENGTH = 2, 16, 1500
SLACK, STEP, ALIGN = WindowKVCache.SLACK, WindowKVCache.STEP, WindowKVCache.ALIGN


def made_up(seed: int) -> mx.array:
    """[1, heads, positions, dim]"""
    return mx.random.normal((1, HEADS, LENGTH, DIM), key=mx.random.key(seed))


QUERIES, KEYS, VALUES = made_up(0), made_up(1), made_up(2)
OTHER_KEYS, OTHER_VALUES = made_up(3), made_up(4)  # what was there before a rollback


def attend(cache: WindowKVCache, start: int, end: int, window: int | None = None, wrong: bool = False) -> np.ndarray:
    """Attention of the rows [start, end), as a layer of mlx-lm does it."""
    keys, values = (OTHER_KEYS, OTHER_VALUES) if wrong else (KEYS, VALUES)
    mask = cache.make_mask(end - start, window_size=window)
    k, v = cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
    scale = DIM**-0.5
    out = mx.fast.scaled_dot_product_attention(QUERIES[:, :, start:end], k, v, scale=scale, mask=mask)
    mx.eval(out, cache.keys, cache.values)
    return np.array(out[0]).swapaxes(0, 1)  # [rows, heads, dim]


@cache
def naive(window: int) -> np.ndarray:
    """The definition, in double precision: each row sees itself and the ``window - 1`` before it."""
    q, k, v = (np.array(x[0], dtype=np.float64) for x in (QUERIES, KEYS, VALUES))
    rows = []
    for at in range(LENGTH):
        seen = slice(max(0, at - window + 1), at + 1)
        scores = np.einsum("hd,hkd->hk", q[:, at], k[:, seen]) * DIM**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        rows.append(np.einsum("hk,hkd->hd", weights / weights.sum(axis=1, keepdims=True), v[:, seen]))
    return np.stack(rows)


def chunks(sizes: Sequence[int], length: int = LENGTH) -> list[tuple[int, int]]:
    ends = [min(end, length) for end in itertools.accumulate(itertools.islice(itertools.cycle(sizes), length))]
    ends = ends[: ends.index(length) + 1]
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize(
    ("window", "sizes"),
    [(24, (16,)), (24, (1,)), (100, (300, 7)), (300, (1000, 1, 1, 64)), (300, (LENGTH,)), (1, (50, 1, 3))],
)
def test_attention_is_that_of_a_window_over_everything(window: int, sizes: Sequence[int]):
    cache = WindowKVCache(window)
    out = np.concatenate([attend(cache, start, end) for start, end in chunks(sizes)])
    assert np.abs(out - naive(window)).max() < 1e-5
    assert cache.offset == LENGTH
    assert cache.base > 0 or sizes == (LENGTH,), "nothing was ever dropped"


def test_chunks_change_no_bit():
    outcomes = []
    for sizes in [(16,), (300, 7), (1000, 1, 1, 64), (5, 3)]:
        cache = WindowKVCache(24)
        outcomes.append(np.concatenate([attend(cache, start, end) for start, end in chunks(sizes)]))
    assert all((outcome == outcomes[0]).all() for outcome in outcomes[1:])


def test_a_mask_one_wider_than_the_window_sees_all_it_wants():
    cache = WindowKVCache(23)
    out = np.concatenate([attend(cache, start, end, window=24) for start, end in chunks((100, 1))])
    assert np.abs(out - naive(24)).max() < 1e-5


def test_memory_is_bounded():
    for window, size in ((24, 1), (24, 200), (300, 16)):
        cache = WindowKVCache(window)
        most = window + SLACK + ALIGN + STEP + size  # tokens kept before a drop, and the rows that came
        room = most + STEP  # room grows in steps
        for start, end in chunks((size,)):
            attend(cache, start, end)
            assert cache.size() <= most
            assert sum(array.nbytes for array in arrays_of(cache)) <= 2 * HEADS * DIM * 4 * room
            assert cache.base % ALIGN == 0
            assert cache.size() == cache.offset - cache.base


@pytest.mark.parametrize("seed", range(4))
def test_going_back_within_the_slack_leaves_no_trace(seed: int):
    random = Random(seed)
    window = random.choice([24, 100, 300])
    cache, out = WindowKVCache(window), np.zeros((LENGTH, HEADS, DIM), dtype=np.float32)
    at = furthest = num_trims = 0
    while at < LENGTH - 400:
        if random.random() < 0.4:
            # A wrong turn, which is then taken back, perhaps with some of what came before it.
            wrong = random.choice([0, 1, 5, 100])
            if wrong:
                attend(cache, at, at + wrong, wrong=True)
            furthest = max(furthest, at + wrong)
            back_to = random.randint(max(0, furthest - SLACK, at - 60), at) if furthest - at <= SLACK else at
            assert cache.trim(at + wrong - back_to) == at + wrong - back_to
            at = back_to
            num_trims += 1
        end = at + random.choice([1, 1, 7, 64, 150])
        out[at:end] = attend(cache, at, end)
        at, furthest = end, max(furthest, end)
        assert cache.offset == at
    assert np.abs(out[:at] - naive(window)[:at]).max() < 1e-5
    assert num_trims > 5
    assert cache.base > 0


@pytest.mark.parametrize(("window", "size"), [(1, 16), (24, 700), (300, 16)])
def test_the_slack_is_always_there(window: int, size: int):
    cache = WindowKVCache(window)
    for start, end in chunks((size,)):
        attend(cache, start, end)
        back = min(SLACK, end)
        assert cache.trim(back) == back, f"at {end}"
        assert cache.size() >= min(end - back, window), "the window is whole after going back"
        cache.offset += back  # as if it had not happened: trimming forgets no byte


def test_further_back_than_what_is_left_is_refused_and_changes_nothing():
    cache = WindowKVCache(24)
    for start, end in chunks((100,)):
        attend(cache, start, end)
    before = (cache.offset, cache.base)
    for n in (LENGTH, LENGTH - cache.base, LENGTH - cache.base - 1, LENGTH - cache.base - 23, LENGTH + 1):
        assert cache.trim(n) == 0
        assert (cache.offset, cache.base) == before
        assert not trim(cache, n)


def test_only_a_rotating_cache_becomes_a_window():
    assert isinstance(own_cache(mlx_caches.RotatingKVCache(max_size=24)), WindowKVCache)
    assert own_cache(mlx_caches.RotatingKVCache(max_size=24)).max_size == 24
    kept = mlx_caches.RotatingKVCache(max_size=24, keep=4)
    plain = mlx_caches.KVCache()
    assert own_cache(kept) is kept
    assert isinstance(own_cache(plain), GrowingKVCache)
    both = own_cache(mlx_caches.CacheList(mlx_caches.KVCache(), mlx_caches.RotatingKVCache(max_size=8)))
    assert [type(cache) for cache in both.caches] == [GrowingKVCache, WindowKVCache]


@pytest.mark.parametrize(
    ("cache", "limit"),
    [
        (mlx_caches.KVCache(), None),
        (mlx_caches.QuantizedKVCache(), None),
        (WindowKVCache(24), SLACK),
        (mlx_caches.RotatingKVCache(max_size=24, keep=4), -1),
        (mlx_caches.ArraysCache(2), 0),
        (mlx_caches.CacheList(mlx_caches.KVCache(), WindowKVCache(8)), SLACK),
        (mlx_caches.CacheList(mlx_caches.KVCache(), mlx_caches.ArraysCache(2)), 0),
        (mlx_caches.CacheList(mlx_caches.KVCache(), mlx_caches.KVCache()), None),
    ],
)
def test_rewind_limit(cache: Any, limit: int | None):
    assert rewind_limit(cache) == limit


def fresh() -> list[Any]:
    """Layers 0 and 3 see everything, 1 and 4 a window, 2 and 5 are recurrent."""
    kinds = (mlx_caches.KVCache, lambda: mlx_caches.RotatingKVCache(max_size=24), lambda: mlx_caches.ArraysCache(2))
    return [kind() for kind in kinds * 2]


def test_a_ghost_shows_its_relative_and_cannot_be_written_to():
    full, own = make_list(fresh(), range(2), CachePlace())
    plain, window = own
    plain.update_and_fetch(KEYS[:, :, :70], VALUES[:, :, :70])
    window.update_and_fetch(KEYS[:, :, :70], VALUES[:, :, :70])
    assert (full[3].offset, full[4].offset) == (70, 70)
    assert isinstance(full[3], mlx_caches.KVCache)
    assert full[3].make_mask(5, return_array=False, window_size=None) == "causal"
    assert mx.array_equal(full[4].make_mask(5), window.make_mask(5))
    for ghost in full[3:5]:
        with pytest.raises(AssertionError, match="a layer of another stage wrote to its"):
            ghost.update_and_fetch(KEYS[:, :, :1], VALUES[:, :, :1])
    assert (plain.offset, window.offset) == (70, 70)


def test_a_ghost_without_a_relative_stands_where_the_sequence_stands():
    place = CachePlace()
    full, _ = make_list(fresh(), range(1, 2), place)
    place.position = 42
    assert full[0].offset == full[3].offset == 42
    with pytest.raises(AssertionError, match="a layer of another stage wrote to its"):
        full[0].update_and_fetch(KEYS[:, :, :1], VALUES[:, :, :1])
    with pytest.raises(AssertionError, match="a layer of another stage wrote to its"):
        full[2][0] = KEYS
