"""What fits: sums kept in counts are sums of bytes, and the smallest stage decides. KV grows in blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.kv.budget import BLOCK, KVBudget, KVUse, NeverFits, StageKV
from splitinfer.core.kv.growth import mean_room, phase_of, room, spare
from splitinfer.core.kv.rewind import least_rewind

counts = st.integers(0, 50_000)
stages = st.builds(StageKV, st.integers(0, 10**7), st.integers(0, 2000), st.integers(0, 10**5))


def total(lengths: list[int]) -> KVUse:
    use = KVUse()
    for length in lengths:
        use += KVBudget().use_of(length)
    return use


def bytes_by_hand(stage: StageKV, lengths: list[int]) -> int:
    return sum(stage.fixed + stage.per_token * (n + -n % BLOCK + spare(n)) for n in lengths if n)


@given(st.lists(stages, max_size=4), st.lists(counts, max_size=20))
def test_the_smallest_stage_decides(them: list[StageKV], lengths: list[int]):
    fits = all(bytes_by_hand(stage, lengths) <= stage.budget_bytes for stage in them)
    assert KVBudget(tuple(them)).fits(total(lengths)) == fits


@given(counts, counts)
def test_growth_is_the_difference(before: int, more: int):
    assert KVBudget().use_of(before) + KVBudget().growth(before, before + more) == KVBudget().use_of(before + more)
    assert KVBudget().growth(before + more, before) == KVUse()


@given(st.lists(stages, max_size=4), st.integers(1, 10_000))
def test_what_never_fits_is_refused_and_nothing_else(them: list[StageKV], num_tokens: int):
    budget = KVBudget(tuple(them))
    if budget.fits(KVBudget().use_of(num_tokens)):
        budget.check(num_tokens)
        return
    with pytest.raises(NeverFits) as caught:
        budget.check(num_tokens)
    assert caught.value.there == them[caught.value.stage].budget_bytes < caught.value.needed


@given(st.lists(st.one_of(st.none(), st.integers(-1, 300))))
def test_the_least_rewind_is_allowed_by_every_cache_and_no_less(limits: list[int | None]):
    least = least_rewind(iter(limits))
    bounded = [limit for limit in limits if limit is not None]
    assert least == (min(bounded) if bounded else None)


@pytest.mark.parametrize("name", ["budget_bytes", "per_token", "fixed"])
def test_bytes_are_not_negative(name: str):
    with pytest.raises(ValueError, match=f"{name} must not be negative, but is -1"):
        StageKV(**{"budget_bytes": 1, "per_token": 1, name: -1})


@given(st.integers(1, 300_000), st.floats(0, 1, exclude_max=True))
def test_there_is_room_and_never_much_more(length: int, phase: float):
    here = room(length, phase)
    assert here % 16 == 0
    assert length <= here < length + length / 8 + BLOCK


@given(st.integers(1, 300_000), st.integers(16, 100), st.integers(0, 100))
def test_what_is_counted_is_what_is_held(length: int, num_layers: int, first: int):
    """On any stage of some layers: whole blocks are counted, and the phases are not quite even."""
    held = [room(length, phase_of(i)) for i in range(first, first + num_layers)]
    mean, counted = sum(held) / len(held), mean_room(length)
    assert counted - BLOCK - 0.01 * length <= mean <= counted + 0.01 * length
