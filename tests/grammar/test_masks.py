"""Masks as differences: what comes out is what went in, in any order; and what is broken is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.plan import RowMask
from splitinfer.errors import ProtocolError
from splitinfer.grammar.masks import NUM_SLOTS, Masked, MaskReceiver, MaskSender

SIZE = 1000


def mask(seed: int) -> bytes:
    """One of many masks: like one of three, but for a few bits."""
    words = np.random.default_rng(seed % 3).integers(0, 2**32, -(-SIZE // 32), np.uint32)
    words[seed % len(words)] ^= seed
    return words.tobytes()


@given(st.lists(st.lists(st.integers(0, 3 * NUM_SLOTS), max_size=6), max_size=40))
def test_a_stage_gets_the_masks_that_were_sent(steps: list[list[int]]) -> None:
    sender, receiver = MaskSender(), MaskReceiver(SIZE)
    for seeds in steps:
        sent = sender.encode(Masked(7, row, mask(seed)) for row, seed in enumerate(seeds))
        got = receiver.decode(sent)
        assert [got[7, row][1].tobytes() for row in range(len(seeds))] == [mask(seed) for seed in seeds]


def test_what_is_there_costs_nothing_and_what_is_near_little() -> None:
    sender = MaskSender()
    first, again, near = sender.encode([Masked(1, 0, mask(3)), Masked(1, 1, mask(3)), Masked(1, 2, mask(6))])
    assert not again.difference
    assert again.slot == first.slot
    assert len(near.difference) < len(first.difference) / 3


@pytest.mark.parametrize(
    "broken",
    [
        RowMask(1, 0, 0, 5, b""),
        RowMask(1, 0, NUM_SLOTS, -1, b""),
        RowMask(1, 0, 0, -1, b"nothing packed"),
        MaskSender().encode([Masked(1, 0, bytes(4))])[0],
        MaskSender().encode([Masked(1, 0, bytes(2**24))])[0],
    ],
)
def test_a_broken_mask_is_refused(broken: RowMask) -> None:
    with pytest.raises(ProtocolError, match="mask"):
        MaskReceiver(SIZE).decode([broken])
