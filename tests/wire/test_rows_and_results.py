"""Rows and results are lists: each comes back, and whatever else stands in a place is one sentence."""

import math
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from every_message import EXAMPLES, FIGURES

from splitinfer.core.plan import FiguresLater, SampledSlice, SampledToken, StageFigures, TensorSpec
from splitinfer.errors import ProtocolError
from splitinfer.wire import messages
from splitinfer.wire.headers import decode, encode
from splitinfer.wire.steps import packed, read_figures

ROWS, RESULT = encode(EXAMPLES["rows"]), encode(EXAMPLES["result"])


def refused(fields: list[Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(msgpack.packb(fields))
    return str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        messages.Rows(0, None),
        messages.Rows(2, TensorSpec("float32", (1, 64))),
        messages.Result(0, (), ()),
        messages.Result(1, (SampledSlice(7, (SampledToken(5),)),), (packed(FIGURES),)),
        messages.Result(1, (SampledSlice(7, (SampledToken(5, -0.25, ((5, -0.25), (9, -1.5))),)),), ()),
    ],
)
def test_they_come_back(message: messages.Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("header", [ROWS, RESULT], ids=["rows", "result"])
def test_what_stands_in_a_wrong_place_is_refused(header: bytes) -> None:
    whole = msgpack.unpackb(header)
    assert "message that cannot be read" in refused(whole[:-1])
    assert "message that cannot be read" in refused([*whole, 1])
    for at in range(len(whole)):
        for odd in (1.5, "x", {"a": 1}, [{}], True, -(2**63), [[[]]], b"x"):
            if (at, odd) != (1, -(2**63)):  # any step may be named; the stage compares it with its own
                assert "message that cannot be read" in refused([*whole[:at], odd, *whole[at + 1 :]]), (at, odd)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (2, None),  # rows are packed, and there are none
        (2, ["float32", [4, 64]]),
        (2, ["float32", []]),
        (2, ["float32", [4.5, 64]]),
        (4, ["int8", [[0]]]),
        (4, ["zip", [[0, 2]]]),
        (5, [[1, 2, 3]]),
    ],
)
def test_impossible_rows_are_refused(at: int, value: Any) -> None:
    whole = msgpack.unpackb(ROWS)
    assert "message that cannot be read" in refused([*whole[:at], value, *whole[at + 1 :]])


@pytest.mark.parametrize("token", [[5], [5, "x", []], [5, 1, []], [5, None, [[1]]], [5, None, [[1, 2]]], "a", None])
def test_impossible_tokens_are_refused(token: Any) -> None:
    for place in ([3, [token], [], []], [3, [], [], [token]]):
        assert "message that cannot be read" in refused(["result", 1, [place], []])


@pytest.mark.parametrize("wrong", [
    {"started": math.nan}, {"ended": math.inf}, {"ended": 1.0}, {"received": -math.inf}, {"sent": 1e300},
    {"copying": -1.0}, {"copying": math.nan}, {"fetching": math.inf}, {"drafting": -0.5}, {"bytes_sent": -1},
    {"rows": -1}, {"rows": 1.5}, {"unfit": -1}, {"bytes_copied": -1}, {"lacking": ("x",)}, {"written": (1,)},
    {"stage": 2}, {"started": "x"}, {"rows": True}, {"experts_found": 25},
], ids=str)  # fmt: skip
def test_figures_that_no_stage_has_are_refused(wrong: dict[str, Any]) -> None:
    """Each enters a sum, and a sum with one of these would never be right again."""
    assert read_figures((packed(FIGURES),), [1]) == (FIGURES,)
    later = FiguresLater(lambda: read_figures((packed(replace(FIGURES, **wrong)),), [1]))
    with pytest.raises(ProtocolError, match="a result came with figures that cannot be used"):
        len(later)


def test_figures_have_every_field_and_are_of_every_stage() -> None:
    assert all(getattr(FIGURES, each.name) != each.default for each in fields(StageFigures))
    for each, stages in (
        ((), [1]),
        ((packed(FIGURES),) * 2, [1]),
        ((b"x",), [1]),
        ((b"",), [1]),
        ((b"\x91\x01",), [1]),
    ):
        with pytest.raises(ProtocolError):
            read_figures(each, stages)
