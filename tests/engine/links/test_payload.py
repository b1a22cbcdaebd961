"""What comes with a step: hidden states, and masks behind them."""

import numpy as np
import pytest

from splitinfer.core.plan import TensorSpec
from splitinfer.engine.links.connection import payload_of
from splitinfer.engine.stage.masking import read_masks
from splitinfer.errors import ProtocolError
from splitinfer.wire.messages import Rows
from transports import Frame

VOCAB = 70  # three words of 32 bits
ROWS = np.arange(16, dtype=np.float32).reshape(2, 8)
SENT = Rows(1, TensorSpec("float32", (2, 8)), masked=((5, 0), (5, 1)))


def bits(*allowed: int) -> bytes:
    words = np.zeros(96, np.bool_)
    words[list(allowed)] = True
    return np.packbits(words, bitorder="little").tobytes()


def test_masks_lie_behind_the_hidden_states() -> None:
    hidden, raw = payload_of(SENT, Frame(b"", (ROWS.tobytes(), bits(1, 69) + bits(3))))
    assert hidden is not None
    assert np.array(hidden.array()).tolist() == ROWS.tolist()
    masks = read_masks(raw, VOCAB)
    assert {place: np.flatnonzero(mask).tolist() for place, mask in masks.items()} == {
        (5, 0): [1, 69],
        (5, 1): [3],
    }


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ((), "came with 0 payloads"),
        ((ROWS.tobytes(),), "came with 1 payloads"),
        ((ROWS.tobytes(), bits(1) + b"\0"), "13 bytes came as 2 masks of one size"),
        ((ROWS.tobytes(), b""), "a mask has 0 bytes; for 70 tokens it has 12"),
        ((ROWS.tobytes(), bytes(16)), "a mask has 8 bytes; for 70 tokens it has 12"),
        ((ROWS.tobytes(), bytes(2**20)), "a mask has 524,288 bytes; for 70 tokens it has 12"),
    ],
)
def test_masks_of_another_size_are_refused(parts: tuple[bytes, ...], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        read_masks(payload_of(SENT, Frame(b"", parts))[1], VOCAB)
