"""KV cut into blocks and put together again, kind by kind; and a trial that sees what is wrong."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
)
from stages import loaded
from tiny import Folder

from splitinfer.core.kv.format import format_of
from splitinfer.models.caches.caches import CachePlace, WindowKVCache
from splitinfer.models.caches.cohort import Cohort, SequenceCaches
from splitinfer.models.caches.growing import GrowingKVCache
from splitinfer.models.caches.kv_blocks import KVBlock, PackedTree, block_of, cut, join, parts_of
from splitinfer.models.caches.quantised import QuantisedKVCache
from splitinfer.models.rows import kv_trial
from splitinfer.models.rows.kv_trial import why_no_blocks

BY_TOKEN: dict[str, Callable[[], Any]] = {
    "plain": KVCache,
    "concatenated": ConcatenateKVCache,
    "quantised": lambda: QuantizedKVCache(group_size=32, bits=8),
    "window": lambda: WindowKVCache(100),
    "list": lambda: CacheList(KVCache(), WindowKVCache(64)),
}


def sequence(kind: Callable[[], Any]) -> SequenceCaches:
    own = [kind()]
    return SequenceCaches(own, own, CachePlace())


def leaves(cache: Any) -> list[Any]:
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


def run(caches: SequenceCaches, start: int, end: int, salt: int = 0) -> None:
    for cache in leaves(caches.own[0]):
        kv = [mx.random.normal((1, 2, end - start, 32), key=mx.random.key(1000 * salt + 2 * start + i)) for i in (0, 1)]
        cache.update_and_fetch(*kv)
    caches.place.position = end


def visible(caches: SequenceCaches) -> list[mx.array]:
    found: list[mx.array] = []
    for cache in leaves(caches.own[0]):
        for tree in cache.keys_and_values():
            arrays = tree if isinstance(tree, tuple | list) else (tree,)
            found += [a[..., -getattr(cache, "window", 10**6) :, :] for a in arrays]
    return found


@pytest.mark.parametrize("kind", BY_TOKEN.values(), ids=BY_TOKEN.keys())
@pytest.mark.parametrize("length", [1, 256, 300, 700])
def test_from_blocks_it_goes_on_as_if_nothing_had_happened(kind: Callable[[], Any], length: int):
    source, blocks = sequence(kind), list[KVBlock]()
    for start in range(0, 768, 64):
        run(source, start, start + 64)
        if (start + 64) % 256 == 0:
            blocks.append(cut(source, [0], start - 192, start + 64))
    run(source, 768, 900, salt=5)  # the source goes on
    needed = blocks[: -(-length // 256)]
    kept, straight = sequence(kind), sequence(kind)
    join(kept, [0], needed, length)
    for start in range(0, length, 64):
        run(straight, start, start + 64)
    if length % 64:
        for cache in leaves(straight.own[0]):
            cache.trim(64 - length % 64)
            if isinstance(cache, ConcatenateKVCache):
                cache.keys, cache.values = cache.keys[..., :length, :], cache.values[..., :length, :]
    for caches in (kept, straight):
        run(caches, length, length + 40, salt=9)
    assert kept.place.position == length + 40
    for a, b in zip(visible(kept), visible(straight), strict=True):
        assert a.shape == b.shape
        assert mx.array_equal(a, b)


def test_a_state_is_that_of_the_end():
    source = sequence(lambda: ArraysCache(2))
    source.own[0][0], source.own[0][1] = mx.array([[1.0]]), mx.array([[2.0]])
    block = cut(source, [0], 0, 8)
    source.own[0][0][...] = 9.0  # in place
    kept = sequence(lambda: ArraysCache(2))
    join(kept, [0], [block], 8)
    assert [kept.own[0][i].item() for i in (0, 1)] == [1.0, 2.0]
    kept.own[0][1][...] = 7.0
    again = sequence(lambda: ArraysCache(2))
    join(again, [0], [block], 8)
    assert again.own[0][1].item() == 2.0
    with pytest.raises(ValueError, match="a state at 8 tokens cannot be used at 7"):
        join(sequence(lambda: ArraysCache(2)), [0], [block], 7)


LAGGING = {
    "both behind": ([9, 9], [8, 9, 9, 9]), "the first alone": ([3, 12], [3, 3, 3, 3]),
    "the second": ([8, 3], [8, 8, 8, 8]), "none": ([12, 12], [8, 9, 10, 12]), "none of them": ([0, 0], [0, 0, 0, 0]),
}  # fmt: skip
"""Of two sequences, how far their second caches are; and how many entries there are after 8, 9, 10 and 12 tokens, of
the first one's first block and the second one's second."""


@pytest.mark.parametrize(("reached", "left"), LAGGING.values(), ids=LAGGING)
@pytest.mark.parametrize("way", ["in memory", "on disk"])
def test_a_cache_that_lags_keeps_the_entries_it_has(reached: list[int], left: list[int], way: str):
    """In a list a cache may hold what is made anew if it is behind (GLM-5.3-Flash: keys and values of prompts)."""

    def lagging(of_second: int, end: int = 12) -> SequenceCaches:
        source = sequence(lambda: CacheList(GrowingKVCache(), GrowingKVCache()))
        for cache, count in zip(leaves(source.own[0]), (end, of_second), strict=True):
            if count:
                kv = (mx.random.normal((1, 2, 80, 32), key=mx.random.key(i)) for i in (0, 1))
                cache.update_and_fetch(*(array[:, :, :count] for array in kv))
        source.place.position = end
        return source

    sources = [lagging(count) for count in reached]
    blocks = [cut(sources[0], [0], 0, 8), cut(sources[1], [0], 8, 12)]
    if way == "on disk":
        sample = cut(lagging(64, 65), [0], 0, 65)
        mx.eval([block.arrays() for block in blocks])
        parts = [parts_of(block, [0]) or {} for block in blocks]
        blocks = [block_of(part, [0], [sample], b.start, b.end) for part, b in zip(parts, blocks, strict=True)]
    for length, count in zip((8, 9, 10, 12), left, strict=True):
        kept = sequence(lambda: CacheList(GrowingKVCache(), GrowingKVCache()))
        join(kept, [0], blocks if length > 8 else blocks[:1], length)
        first, second = leaves(kept.own[0])
        assert (first.offset, second.offset) == (length, count)
        if count:
            whole = sources[int(reached[1] == max(reached))].own[0].caches[1]
            assert mx.array_equal(second.keys[:, :, :count], whole.keys[:, :, :count])


def test_a_list_of_which_every_cache_lags_is_refused():
    source = sequence(lambda: CacheList(KVCache(), KVCache()))
    run(source, 0, 10)
    source.place.position = 12
    with pytest.raises(ValueError, match="the blocks lack positions from 10 on"):
        join(sequence(lambda: CacheList(KVCache(), KVCache())), [0], [cut(source, [0], 0, 12)], 12)


@pytest.mark.parametrize("cuts", [[(0, 8)], [(0, 4), (8, 12)], [(4, 8), (8, 12)]], ids=str)
def test_blocks_that_do_not_hold_the_tokens_are_refused(cuts: list[tuple[int, int]]):
    source = sequence(KVCache)
    run(source, 0, 12)
    with pytest.raises(ValueError, match="cannot hold the first 10 tokens"):
        join(sequence(KVCache), [0], [cut(source, [0], *one) for one in cuts], 10)


def test_a_member_of_a_cohort_is_cut_where_it_is():
    members = [sequence(GrowingKVCache) for _ in range(3)]
    for salt, member in enumerate(members):
        run(member, 0, 20, salt)
    alone = [cut(member, [0], 4, 12) for member in members]
    mx.eval([block.arrays() for block in alone])
    cohort = Cohort(members, [0])
    for member, block in zip(members, alone, strict=True):
        inside = cut(member, [0], 4, 12)
        assert member.cohort is cohort
        for a, b in zip(inside.arrays(), block.arrays(), strict=True):
            assert mx.array_equal(a, b)


def test_a_state_on_disk_has_the_form_of_one_sample_with_its_whole_numbers():
    """GLM-5.3-Flash has what is left of a group of tokens, or nothing; Qwen3.8-Flash-Next counts its groups."""

    def state(length: int, *, is_left: bool) -> KVBlock:
        source = sequence(lambda: ArraysCache(3))
        left = mx.full((1, 1, 16), float(length)) if is_left else None
        source.own[0].cache = [mx.full((1, length // 4, 16), 2.0), length // 4, left]
        source.place.position = length
        return cut(source, [0], 0, length)

    samples = [state(64, is_left=False), state(65, is_left=True)]
    for length, is_left in ((16, False), (18, True)):
        block = state(length, is_left=is_left)
        mx.eval(block.arrays())
        read = block_of(parts_of(block, [0]) or {}, [0], samples, 0, length)
        again = sequence(lambda: ArraysCache(3))
        join(again, [0], [read], length)
        groups, count, left = again.own[0].cache
        assert (groups.shape, count, left is not None) == ((1, length // 4, 16), length // 4, is_left)
        assert left is None or left[0, 0, 0].item() == length
        with pytest.raises(ValueError, match="of another kind"):
            block_of(parts_of(block, [0]) or {}, [0], samples[is_left - 1 :][:1], 0, length)


def test_a_block_is_one_array_for_each_layer():
    """On a GPU the number of arrays is limited; quantised keys and values are six."""
    places = [0, 1, 2]
    own = [QuantisedKVCache(format_of("k8v4")), GrowingKVCache(), WindowKVCache(64)]
    source = SequenceCaches(own, own, CachePlace())
    for cache in own:
        cache.update_and_fetch(*[mx.random.normal((1, 2, 40, 64), key=mx.random.key(i)) for i in (0, 1)])
    source.place.position = 40
    block = cut(source, places, 8, 40)
    held = sum(a[..., 8:40, :].nbytes for cache in own for _, a in tree_flatten((cache.keys, cache.values)))
    assert [len(block.arrays()), block.nbytes] == [3, held]
    mx.eval(block.arrays())
    parts = parts_of(block, places) or {}
    assert [len(part.arrays) for part, _ in parts.values()] == [6, 2, 2]
    again = block_of(parts, places, [block], 8, 40)
    for a, b in zip(again.arrays(), block.arrays(), strict=True):
        assert mx.array_equal(a, b)


@given(st.lists(st.sampled_from([mx.bfloat16, mx.uint8, mx.float32, mx.int64, mx.bool_]), max_size=6), st.data())
def test_any_tree_comes_back_from_one_array(dtypes: list[mx.Dtype], data: Any):
    shapes = [tuple(data.draw(st.lists(st.integers(0, 3), max_size=3))) for _ in dtypes]
    arrays = [(mx.random.uniform(shape=shape) * 9).astype(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    tree = (arrays[:2], [None, 7, *arrays[2:]])
    packed = PackedTree.of(tree)
    mx.eval(packed.data)
    for one in (packed, PackedTree.from_buffers(packed.form, packed.buffers())):
        (first, rest) = one.tree()
        assert rest[:2] == [None, 7]
        for a, b in zip([*first, *rest[2:]], arrays, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert mx.array_equal(a, b)


def test_what_a_trial_raises_is_its_reason(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """What it computes is compared in ``test_trials``."""

    def cut_never(*_args: Any) -> KVBlock:
        raise RuntimeError("never seen")

    (stage,) = loaded(tiny_folder("llama"), 2)
    monkeypatch.setattr(kv_trial, "cut", cut_never)
    assert why_no_blocks(stage) == "RuntimeError: never seen"
