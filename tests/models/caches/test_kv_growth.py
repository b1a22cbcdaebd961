"""KV grows in blocks, layer after layer: there is room and never much more, and a plan counts what is held."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.kv.growth import BLOCK, mean_room, phase_of, room

lengths = st.integers(1, 300_000)


@given(lengths, st.floats(0, 1, exclude_max=True))
def test_there_is_room_and_never_much_more(length: int, phase: float):
    here = room(length, phase)
    assert here % 16 == 0
    assert length <= here < length + length / 8 + BLOCK


@given(lengths, st.integers(16, 100), st.integers(0, 100))
def test_what_is_counted_is_what_is_held(length: int, num_layers: int, first: int):
    """On any stage of some layers: whole blocks are counted, and the phases are not quite even."""
    held = [room(length, phase_of(i)) for i in range(first, first + num_layers)]
    mean, counted = sum(held) / len(held), mean_room(length)
    assert counted - BLOCK - 0.01 * length <= mean <= counted + 0.01 * length
