"""The tree of prefixes: what is found, and what may go."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.kv.block_tree import Block, BlockTree, chained, full_keys
from tests.core.invariants import check_tree

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def put(index: BlockTree, sequence: list[int], size: int = 4) -> list[Block]:
    """Store a sequence as the scheduler does: full blocks, then the rest."""
    path: list[Block] = []
    for start in range(0, len(sequence), size):
        parent, piece = path[-1] if path else None, sequence[start : start + size]
        block = index.child(parent, piece)
        path.append(block if block is not None else index.add(parent, piece)[0])
    return path


def stored(index: BlockTree) -> list[list[int]]:
    return [[token for one in block.path for token in one.tokens] for block in index]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(tokens, max_size=8), tokens)
def test_the_longest_common_prefix_is_found(sequences: list[list[int]], wanted: list[int]):
    index = BlockTree(block=4)
    for sequence in sequences:
        put(index, sequence)
        check_tree(index)
    match = index.find(wanted)
    assert match.num_tokens == max((common(one, wanted[:-1]) for one in stored(index)), default=0)
    held = [token for block in match.blocks for token in block.tokens]
    assert held[: match.num_tokens] == wanted[: match.num_tokens]
    assert not match.blocks or match.blocks[-1].start < match.num_tokens


@given(st.lists(tokens, max_size=8), tokens)
def test_states_are_found_at_the_ends_of_blocks(sequences: list[list[int]], wanted: list[int]):
    index = BlockTree(whole_blocks=True, block=4)
    for sequence in sequences:
        put(index, sequence)
    match = index.find(wanted)
    ends = [one for one in stored(index) if one == wanted[:-1][: len(one)]]
    assert match.num_tokens == max(map(len, ends), default=0)


@given(st.integers(0, 2**32))
def test_leaves_go_first_and_the_least_recently_used_of_them(seed: int):
    pick = Random(seed)
    index = BlockTree(block=2)
    for _ in range(pick.randint(0, 12)):
        put(index, [pick.randrange(2) for _ in range(pick.randint(1, 7))], 2)
        for block in index.find([pick.randrange(2) for _ in range(5)]).blocks[-1:]:
            index.use(block)
        check_tree(index)
    planned = list(index.evictable())
    assert list(index.evictable()) == planned, "asking changes nothing"
    assert len(planned) == len(index)
    for block in planned:
        leaves = [one for one in index if not one.children]
        assert block is min(leaves, key=lambda one: one.last_use)
        index.remove(block)
        check_tree(index)
    assert not len(index)


def test_keys_are_chained():
    a, b, c = (full_keys(*each, 2) for each in ((b"", [1, 1, 2, 2]), (b"", [2, 1, 2, 2]), (b"other", [1, 1, 2, 2])))
    assert len({*a, *b, *c}) == 6
    index = BlockTree(block=2)
    assert [block.key for block in put(index, [1, 1, 2, 2], 2)] == list(a)


@pytest.mark.parametrize(("one", "other"), [([1, 23], [12, 3]), ([1], [1, 0]), ([11], [1, 1])])
def test_keys_do_not_run_together(one: list[int], other: list[int]):
    assert chained(b"", one) != chained(b"", other)
