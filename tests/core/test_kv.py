"""What may be reused of KV, and how far the caches of all stages go back together."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.kv import least_rewind, reusable

limits = st.one_of(st.none(), st.integers(0, 300))
counts = st.integers(0, 300)


@given(st.lists(limits))
def test_least_rewind_is_allowed_by_every_cache_and_no_less(them: list[int | None]):
    least = least_rewind(iter(them))
    if least is None:
        assert all(limit is None for limit in them)
    else:
        assert least in them
        assert all(limit is None or limit >= least for limit in them)


@given(st.lists(limits), st.lists(limits))
def test_least_rewind_of_stages_is_that_of_all_their_layers(a: list[int | None], b: list[int | None]):
    assert least_rewind([least_rewind(a), least_rewind(b)]) == least_rewind(a + b)


@given(counts, counts, st.integers(1, 300), limits)
def test_reusable_is_the_most_that_is_allowed(held: int, common: int, wanted: int, rewind: int | None):
    def allowed(n: int) -> bool:
        back = held - n
        return n <= held and n <= common and n < wanted and (rewind is None or back <= rewind)

    kept = reusable(held, common, wanted, rewind)
    assert kept == max((n for n in range(301) if allowed(n)), default=0)


def test_examples():
    assert reusable(100, 100, 132, None) == 100
    assert reusable(100, 100, 132, 0) == 100, "going on needs no going back"
    assert reusable(100, 40, 132, 59) == 0
    assert reusable(100, 40, 132, 60) == 40
    assert reusable(100, 100, 100, 1) == 99, "one token is always computed"
    assert reusable(100, 100, 100, 0) == 0
    assert reusable(0, 0, 1, None) == 0
