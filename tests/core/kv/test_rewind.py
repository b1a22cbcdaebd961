"""How far the caches of all stages go back together."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.kv.rewind import least_rewind

limits = st.one_of(st.none(), st.integers(-1, 300))


@given(st.lists(limits))
def test_least_rewind_is_allowed_by_every_cache_and_no_less(them: list[int | None]):
    least = least_rewind(iter(them))
    if least is None:
        assert all(limit is None for limit in them)
    else:
        assert least in them
        assert all(limit is None or limit >= least for limit in them)
