"""Which rows a rank keeps, and which counts are halved with them."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.halving import counts_to_try, half_of_columns, kept_rows

BOTH = [True] * 4
FIRST, SECOND = [True, True, False, False], [False, False, True, True]


@pytest.mark.parametrize(
    ("first", "second", "axis", "runs"),
    [
        ([FIRST, BOTH], [SECOND, BOTH], -2, (((0, 2),), ((2, 4),))),
        ([BOTH, FIRST], [BOTH, SECOND], -1, (((0, 2),), ((2, 4),))),
        ([[True, False] * 2], [[False, True] * 2], -1, (((0, 1), (2, 3)), ((1, 2), (3, 4)))),
        # A part that both need, as in a fused matrix with latent keys.
        ([[*FIRST, True]], [[*SECOND, True]], -1, (((0, 2), (4, 5)), ((2, 5),))),
        # Rows that nothing depends on.
        ([[*FIRST, False]], [[*SECOND, False]], -1, (((0, 2), (4, 5)), ((2, 5),))),
    ],
)  # fmt: skip
def test_rows_are_halved(first: list[list[bool]], second: list[list[bool]], axis: int, runs: object) -> None:
    kept = kept_rows(first, second)
    assert kept is not None
    assert (kept.axis, kept.runs) == (axis, runs)


@pytest.mark.parametrize(
    "reached",
    [
        ([BOTH, BOTH], [BOTH, BOTH]),  # a norm, a router
        ([[False] * 4], [[False] * 4]),  # an indexer: its choice shows no dependence
        ([FIRST], [[False] * 4]),
        ([[True] * 3 + [False]], [SECOND]),  # ranks would differ in shape
    ],
)
def test_what_is_whole(reached: tuple[list[list[bool]], ...]) -> None:
    assert kept_rows(*reached) is None


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_no_rank_lacks_what_it_depends_on(flags: list[tuple[bool, bool]]) -> None:
    own = [[flag[rank] for flag in flags] for rank in range(2)]
    kept = kept_rows(*([one] for one in own))
    if kept is None:
        return
    rows = [{i for start, end in runs for i in range(start, end)} for runs in kept.runs]
    assert all(i in rows[rank] for rank in range(2) for i, needs in enumerate(own[rank]) if needs)
    assert len(rows[0]) == len(rows[1]) == round(kept.share * len(flags)) < len(flags)


def test_columns() -> None:
    assert [half_of_columns(6, rank) for rank in range(2)] == [(0, 3), (3, 6)]
    with pytest.raises(ValueError, match="7 columns cannot be divided by 2 ranks"):
        half_of_columns(7, 0)


def test_counts_of_heads_are_tried_first_and_none_twice() -> None:
    numbers = {("", "num_heads"): 4, ("", "head_dim"): 8, ("conv", "groups"): 64, ("", "key_dim"): 16, ("", "top_k"): 2}
    tried = list(islice(counts_to_try(numbers, {16}), 400))
    heads = {("", "num_heads"), ("conv", "groups")}
    assert set(tried[0]) == heads
    assert set(tried[1]) == {*heads, ("", "key_dim")}
    assert len(set(tried)) == len(tried)
