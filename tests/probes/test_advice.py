"""Advice that follows from figures: what a token costs, when a codec pays, how large a chunk."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.probes.links import Hidden, LinkAdvice, RowCodec, advise

HIDDEN = Hidden(4096, "bfloat16", "test")  # 8,192 bytes
INT8 = RowCodec("int8", 4096, 4e-6)
FP16 = RowCodec("fp16", 8192, 1e-6)
SLOW = RowCodec("int8", 4096, 120e-6)
WIDE = Hidden(4096, "float32", "")


def on(down: float, codecs: Sequence[RowCodec] = (), hidden: Hidden = HIDDEN, latency: float = 0.0002) -> LinkAdvice:
    return advise(LinkMeasurement(latency, latency, down, down), hidden, codecs)


def test_a_tokens_cost_is_latency_and_its_bytes():
    assert on(117e6).token_seconds == pytest.approx(0.0002 + 8192 / 117e6)
    assert on(math.inf).token_seconds == 0.0002


@pytest.mark.parametrize(
    ("down", "codecs", "hidden", "codec"),
    [
        (0.80e9, [INT8], HIDDEN, "int8"),  # half of the bytes are saved for 4 us: at 0.84 GB/s they take 4.9,
        (0.88e9, [INT8], HIDDEN, "none"),  # and packing is faster by a tenth
        (100e6, [FP16, SLOW], WIDE, "fp16"),
        (100e6, [SLOW, FP16], WIDE, "fp16"),
        (1e6, [FP16, SLOW], WIDE, "int8"),
        (1e3, [FP16], HIDDEN, "none"),  # saves no bytes
        (math.inf, [RowCodec("int8", 1, 0.0)], HIDDEN, "none"),
    ],
)
def test_a_codec_pays_where_the_link_is_slower(down: float, codecs: list[RowCodec], hidden: Hidden, codec: str):
    assert on(down, codecs, hidden).codec == codec


@given(st.floats(1, 1e12) | st.just(math.inf), st.floats(0, 1e-3), st.integers(1, 600))
def test_a_codec_is_never_slower(bandwidth: float, seconds: float, size: int):
    found = on(bandwidth, [RowCodec("a", size, seconds)], Hidden(128, "float32", ""))
    assert found.row_seconds <= found.row_seconds_plain
    assert (found.row_seconds < found.row_seconds_plain) is (found.codec != "none")
