"""The two messages between a step's launch and its token, Rows and Result, as lists of their fields.

They are read by hand: where a device computes a token in a few milliseconds, field names and a general validator cost a
lot. The figures of the stages are bytes inside them, which nobody reads before the next launch (``FiguresLater``).
"""

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, cast

import msgpack

from splitinfer.core.codecs import Packing
from splitinfer.core.plan import SampledSlice, SampledToken, StageFigures, TensorSpec
from splitinfer.errors import ProtocolError
from splitinfer.wire.messages import Result, Rows

Fields = Sequence[Any]
READ_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)
_LISTS = {"lacking": int, "written": bytes}


def fields_of(message: Rows | Result) -> Fields:
    """Return a message as a list that msgpack can write."""
    if isinstance(message, Rows):
        spec, packing = message.tensor, message.packing
        tensor = None if spec is None else (spec.dtype, spec.shape)
        return "rows", message.step, tensor, message.figures, packing and (packing.codec, packing.runs), message.masked
    return "result", message.step, [_slice_fields(one) for one in message.sampled], message.figures


def _slice_fields(part: SampledSlice) -> Fields:
    return part.seq_id, [*map(_token_fields, part.tokens)], part.drafts, [*map(_token_fields, part.scored)]


def _token_fields(token: SampledToken) -> int | Fields:
    if token.logprob is None and not token.top:
        return token.token_id
    return token.token_id, token.logprob, token.top


def message_of(given: Fields) -> Rows | Result:
    """Return the message of a list that msgpack has read.

    Raises:
        ValueError: the list is no such message.
    """
    match given:
        case ["rows", step, tensor, figures, packing, masked]:
            spec, packed = _spec(tensor), None if packing is None else Packing(*_packing(packing))
            return Rows(_int(step), spec, _all(bytes, figures), packed, tuple(map(_pair, _tuple(masked))))
        case ["result", step, sampled, figures]:
            return Result(_int(step), tuple(map(_slice, _tuple(sampled))), _all(bytes, figures))
    raise ValueError("such a list is not a message")


def _int(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} stands where a number must be")
    return value


def _tuple(value: object) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise ValueError(f"{value!r:.40} stands where a list must be")
    return value


def _all(kind: type, value: object) -> tuple[Any, ...]:
    for one in _tuple(value):
        if type(one) is not kind:
            raise ValueError(f"{one!r:.40} stands in a list of {kind.__name__}")
    return cast("tuple[Any, ...]", value)


def _pair(value: object) -> tuple[int, int]:
    first, second = _all(int, value)
    return first, second


def _spec(value: object) -> TensorSpec | None:
    if value is None:
        return None
    dtype, shape = _tuple(value)
    if type(dtype) is not str:
        raise ValueError("a dtype has no name")
    return TensorSpec(dtype, _all(int, shape))


def _packing(value: object) -> tuple[str, tuple[tuple[int, int], ...]]:
    codec, runs = _tuple(value)
    if type(codec) is not str:
        raise ValueError("a codec has no name")
    return codec, tuple(map(_pair, _tuple(runs)))


def _slice(value: object) -> SampledSlice:
    seq_id, tokens, drafts, scored = _tuple(value)
    return SampledSlice(
        _int(seq_id), tuple(map(_token, _tuple(tokens))), _all(int, drafts), tuple(map(_token, _tuple(scored)))
    )


def _token(value: object) -> SampledToken:
    if type(value) is int:
        return SampledToken(value)
    token_id, logprob, top = _tuple(value)
    if logprob is not None and type(logprob) is not float:
        raise ValueError("a log probability is not a number")
    for other, likely in map(_tuple, _tuple(top)):
        if type(other) is not int or type(likely) is not float:
            raise ValueError("a log probability is not a number")
    return SampledToken(_int(token_id), logprob, top)


# -- figures -----------------------------------------------------------------------------------------

_FIELDS = tuple((each.name, each.type) for each in fields(StageFigures))
_values = attrgetter(*(name for name, _ in _FIELDS))


def packed(figures: StageFigures) -> bytes:
    """Return a stage's figures as bytes."""
    return bytes(msgpack.packb(_values(figures)))


def read_figures(each: tuple[bytes, ...], stages: Sequence[int]) -> tuple[StageFigures, ...]:
    """Return the figures of ``stages``.

    Raises:
        ProtocolError: the bytes are not the figures of these stages.
    """
    try:
        found = tuple(map(_figures, each))
        if [one.stage for one in found] == list(stages):
            return found
        why = f"of stages {[one.stage for one in found]!r:.80}, not {list(stages)!r:.80}"
    except READ_ERRORS as error:
        why = str(error) or type(error).__name__
    raise ProtocolError(f"a result came with figures that cannot be used ({why})")


def _figures(data: bytes) -> StageFigures:
    values = _tuple(msgpack.unpackb(data, use_list=False))
    for (name, kind), value in zip(_FIELDS, values, strict=True):
        if name in _LISTS:
            _all(_LISTS[name], value)
        elif type(value) is not int and (type(value) is not float or kind is int):
            raise ValueError(f"{name} is not a number")
    figures = StageFigures(*values)
    figures.check()
    return figures
