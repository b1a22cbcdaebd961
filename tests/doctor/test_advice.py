"""Advice that follows from figures: what a token costs, when a codec pays, how large a chunk."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.doctor.advice import Codec, Hidden, advise, choose, pipeline_seconds, rows_of

HIDDEN = Hidden(4096, "bfloat16", "test")  # 8,192 bytes
INT8 = Codec("int8", 4096, 4e-6)
FP16 = Codec("fp16", 8192, 1e-6)


def test_a_tokens_cost_is_latency_and_its_bytes():
    gigabit = LinkMeasurement(0.0002, 0.0004, down=117e6, up=117e6)
    assert advise(gigabit, HIDDEN, []).token_seconds == pytest.approx(0.0002 + 8192 / 117e6)
    unlimited = LinkMeasurement(0.0002, 0.0004, math.inf, math.inf)
    assert advise(unlimited, HIDDEN, []).token_seconds == 0.0002


def test_the_cost_of_a_pipeline_is_every_hop_and_the_way_back():
    ways = [advise(LinkMeasurement(latency, latency, 1e9, 1e9), HIDDEN, []) for latency in (0.001, 0.003)]
    assert pipeline_seconds(ways, back=0.002) == pytest.approx(0.006 + 2 * 8192 / 1e9)


def test_a_codec_pays_on_a_slow_link_and_not_on_a_quick_one():
    """Half of the bytes are saved for 4 us: at 0.84 GB/s they take 4.9, and packing is faster by a tenth."""
    assert choose(0.80e9, HIDDEN, [INT8]).codec == "int8"
    assert choose(0.88e9, HIDDEN, [INT8]).codec == "none"
    slow = choose(100e6, HIDDEN, [INT8])
    assert slow.seconds == pytest.approx(4096 / 100e6 + 4e-6)
    assert slow.seconds_plain == pytest.approx(8192 / 100e6)


def test_the_best_of_several_codecs_is_taken():
    wide = Hidden(4096, "float32", "")
    slow_int8 = Codec("int8", 4096, 120e-6)
    assert choose(100e6, wide, [FP16, slow_int8]).codec == "fp16"
    assert choose(100e6, wide, [slow_int8, FP16]).codec == "fp16"
    assert choose(1e6, wide, [FP16, slow_int8]).codec == "int8"


def test_a_codec_that_saves_no_bytes_is_none():
    assert choose(1e3, HIDDEN, [FP16]).codec == "none"


def test_a_link_too_quick_to_tell_needs_no_codec():
    assert choose(math.inf, HIDDEN, [Codec("int8", 1, 0.0)]).codec == "none"


def test_chunks_last_twenty_latencies():
    link = LinkMeasurement(0.005, 0.01, down=8192e3, up=1e9)  # a row in a millisecond
    found = advise(link, HIDDEN, [])
    assert found.chunk_seconds == pytest.approx(0.1)
    assert found.row_seconds == pytest.approx(0.001)
    assert found.chunk_rows == 100


def test_no_number_of_tokens_is_long_enough_on_a_quick_wire_of_long_latency():
    assert advise(LinkMeasurement(0.01, 0.01, 10e9, 10e9), HIDDEN, []).chunk_rows is None
    assert advise(LinkMeasurement(0.01, 0.01, math.inf, math.inf), HIDDEN, []).chunk_rows is None
    assert rows_of(0.0, 0.001) == 1


@given(st.floats(1, 1e12) | st.just(math.inf), st.floats(0, 1e-3), st.integers(1, 600))
def test_a_codec_is_never_slower(bandwidth: float, seconds: float, size: int):
    found = choose(bandwidth, Hidden(128, "float32", ""), [Codec("a", size, seconds)])
    assert found.seconds <= found.seconds_plain
    if found.codec != "none":
        assert found.seconds < found.seconds_plain
