"""Every message comes back as it was; whatever else comes in is a ProtocolError and nothing worse. Orders that
contradict themselves do not exist."""

import math
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from random import Random
from typing import Any

import msgpack
import pytest
from every_message import EXAMPLES, mutate
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.core.plan import NewSequence, Slice, StepPlan
from splitinfer.core.sampling_params import MAX_BIASED, MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from splitinfer.core.serving_options import MAX_RUNNING
from splitinfer.errors import ProtocolError
from splitinfer.wire import messages
from splitinfer.wire.headers import decode, encode
from splitinfer.wire.messages import Load, Message, Versions
from transports import LinkOptions

KINDS: tuple[type[Message], ...] = typing.get_args(Message)


def packed(kind: str, **changes: Any) -> bytes:
    """An example's header with some top-level fields replaced."""
    return bytes(msgpack.packb({**msgpack.unpackb(encode(EXAMPLES[kind]), use_list=False), **changes}))


@pytest.mark.parametrize("kind", KINDS)
def test_examples_come_back(kind: type[Message]):
    example = EXAMPLES[kind.__name__.lower()]
    again = decode(encode(example))
    assert again == example
    assert type(again) is kind


def _parts(value: Any) -> Iterator[Any]:
    """A value and all values in it."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    for one in (getattr(value, each.name) for each in fields(value)) if is_dataclass(value) else inner:
        yield from _parts(one)


def test_examples_have_every_field():
    """Or a field could be lost on the way, and nobody would know. Of a form the stages are told nothing."""
    seen: dict[str, bool] = {}
    for part in (each for example in EXAMPLES.values() for each in _parts(example) if is_dataclass(each)):
        for each in fields(part):
            name = f"{type(part).__name__}.{each.name}"
            seen[name] = seen.get(name, False) or getattr(part, each.name) != each.default
    assert [name for name, is_seen in seen.items() if not is_seen] == ["SamplingParams.grammar"]


# -- what a stranger sends -------------------------------------------------------------------------


def is_message(header: bytes) -> bool:
    """Whether the header is a message, which can then also be written; anything else than ProtocolError passes
    through."""
    try:
        message = decode(header)
    except ProtocolError:
        return False
    shown = [repr(one).replace("=-0.0", "=0.0") for one in (message, decode(encode(message)))]
    assert shown[0] == shown[1], "of a zero the sign is lost, and a NaN is equal to none; all else is as it was"
    return True


@given(st.binary(max_size=200))
def test_random_bytes(header: bytes):
    assert not is_message(header)


ODD = (
    None, True, 0, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 1.5, math.nan, math.inf, -math.inf, "", "1", "x" * 300,
    b"", b"\xff\xfe", "\x00", [], {}, [[]], [None], {"a": 1}, {b"a": 1}, [1, "a"], msgpack.ExtType(1, b"a"),
)  # fmt: skip


def _replace_somewhere(random: Random, value: Any) -> Any:
    """``value`` with one part of it, at any depth, turned into something odd."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.15:
        return random.choice(ODD)
    if isinstance(value, dict):
        key = random.choice(list(value))
        return {**value, key: _replace_somewhere(random, value[key])}
    at = random.randrange(len(value))
    return [*value[:at], _replace_somewhere(random, value[at]), *value[at + 1 :]]


def test_any_value_anywhere():
    random = Random(2)
    wholes = [msgpack.unpackb(encode(message)) for message in EXAMPLES.values()]
    for _ in range(10_000):
        is_message(msgpack.packb(_replace_somewhere(random, random.choice(wholes))))


def test_damaged_headers():
    """Many of them, the same every time."""
    chance, count = Random(1), 20_000
    headers = [encode(message) for message in EXAMPLES.values()]
    num_accepted = sum(is_message(mutate(chance.choice(headers), chance)) for _ in range(count))
    assert 0 < num_accepted < 0.3 * count, "some damage gives another legal message: a letter of a name, a digit"


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_header_is_one_whole_message(kind: str):
    header = encode(EXAMPLES[kind])
    assert not any(is_message(header[:n]) for n in range(len(header)))
    assert not is_message(header + b"\xc0")


@pytest.mark.parametrize("depth", [100, 500, 1100, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81\xa4kind"])
def test_deep_nesting(opening: bytes, depth: int):
    assert not is_message(opening * depth + b"\xc0")
    assert not is_message(REFUSE + opening * depth + b"\xc0")


REFUSE = b"\x82\xa4kind\xa6refuse\xa6reason"


@pytest.mark.parametrize(
    "header",
    [
        *[prefix + b"\xff\xff\xff\xff" + b"\x01" * 20 for prefix in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")],
        *[
            REFUSE + msgpack.packb(extension)
            for extension in (
                msgpack.ExtType(5, b"abc"),
                msgpack.ExtType(127, b""),
                msgpack.Timestamp(2**33, 5),
                msgpack.Timestamp(-(2**60), 0),
            )
        ],
        REFUSE + b"\xd6\xff\xff\xff\xff\xff",  # times of any value
        REFUSE + b"\xd7\xff" + b"\xff" * 8,
        REFUSE + b"\xc7\x0c\xff" + b"\xff" * 12,
    ],
)
def test_lengths_that_are_not_there_and_extension_types_are_refused(header: bytes):
    assert not is_message(header)


def refused(header: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(header)
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        *({}, {"kind": 5}, {"kind": None}, {"kind": ["hello"]}, {1: 2}),
        *(None, 1, "hello", [1, 2], [["kind", "connected"]], b"connected"),
    ],
)
def test_a_header_is_a_map_with_a_kind(value: Any):
    refused(msgpack.packb(value))
    assert "of unknown kind 'greeting'" in refused(msgpack.packb({"kind": "greeting"}))


@pytest.mark.parametrize("kind", sorted(EXAMPLES.keys() - {"rows", "result"}))
def test_extra_and_missing_fields_are_refused(kind: str):
    assert f"a {kind} message with a wrong surprise" in refused(packed(kind, surprise=1))
    whole = msgpack.unpackb(encode(EXAMPLES[kind]), use_list=False)
    optional = {each.name for each in fields(EXAMPLES[kind]) if each.default is not MISSING}
    for name in set(whole) - {"kind"} - optional:
        lacking = {key: value for key, value in whole.items() if key != name}
        assert f"a {kind} message with a wrong {name}" in refused(msgpack.packb(lacking))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("hello", "versions", [1, "0.1", "1", "1"]),
        ("hello", "name", 5),
        ("welcome", "free_bytes", "many"),
        ("welcome", "free_bytes", 1.5),
        ("load", "bounds", [0, 20, 20]),
        ("ready", "rewind", "none"),
        ("connect", "codec", "auto"),
        ("probed", "figures", {"latency_p50": math.nan, "latency_p99": 0.1, "down": 1.0, "up": 1.0}),
        ("plan", "waits", "perhaps"),
    ],
)
def test_impossible_values_are_refused(kind: str, name: str, value: Any):
    assert f"the peer sent a {kind} message with a wrong" in refused(packed(kind, **{name: value}))


def _step(**changes: Any) -> bytes:
    plan = msgpack.unpackb(encode(EXAMPLES["plan"]), use_list=False)["plan"]
    return packed("plan", plan={**plan, **changes})


@pytest.mark.parametrize("wrong", [{"start": -1}, {"token_ids": ["a"]}, {"token_ids": 1}])
def test_impossible_slices_are_refused(wrong: dict[str, Any]):
    right = {"seq_id": 1, "start": 0, "token_ids": [1], "num_logits": 1}
    decode(_step(slices=[right]))
    assert "a plan message with a wrong plan.slices.0" in refused(_step(slices=[{**right, **wrong}]))


def test_impossible_parameters_and_fields_deep_inside_are_refused():
    (new,) = msgpack.unpackb(encode(EXAMPLES["plan"]), use_list=False)["plan"]["new"]
    params = {**new["params"], "temperature": -1.0}
    assert "a plan message with a wrong plan.new.0.params" in refused(_step(new=[{**new, "params": params}]))
    assert "wrong plan.surprise" in refused(_step(surprise=1))


def test_the_most_that_requests_can_say_fits_in_a_frame():
    """A worker takes a longer header for damage, and the link ends: no client may be able to make one."""
    params = SamplingParams(
        logit_bias={2**40 + i: 0.1 for i in range(MAX_BIASED)},
        stop=("\U0001f600" * MAX_STOP_LENGTH,) * 16,
        stop_token_ids=range(2**40, 2**40 + MAX_STOPS),  # type: ignore[arg-type]
    )
    new = tuple(NewSequence(i, params.for_stages, 2**64 - 1) for i in range(8 * MAX_RUNNING))
    slices = tuple(Slice(i, 0, (2**31,), 1) for i in range(8 * MAX_RUNNING))
    header = encode(messages.Plan(StepPlan(1, new, slices)))
    assert len(header) < LinkOptions().max_header_bytes


HERE = Versions(1, "0.1.0", "0.32.4", "0.32.2")


def order(stage: int, *bounds: int) -> Load:
    return Load("m", "auto", stage, bounds, Fingerprint("c"), 100, 10, b"", "exact", False)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (Versions(1, "0.1.0", "0.32.4", "0.32.2"), None),
        (Versions(2, "0.1.0", "0.32.4", "0.32.2"), "protocol 1 here, protocol 2 there"),
        (Versions(1, "0.2.0", "0.32.4", "0.32.2"), "splitinfer 0.1.0 here, splitinfer 0.2.0 there"),
        (Versions(1, "0.1.0", "0.33.0", "0.32.2"), "mlx 0.32.4 here, mlx 0.33.0 there"),
        (Versions(1, "0.1.0", "0.32.4", "0.40"), "mlx-lm 0.32.2 here, mlx-lm 0.40 there"),
        (Versions(2, "0.2.0", "0", "0"), "protocol 1 here, protocol 2 there"),
    ],
)
def test_versions_name_their_first_difference(there: Versions, words: str | None):
    assert HERE.difference(there) == words


def test_the_cuts_of_an_order():
    orders = [order(stage, 0, 5, 7, 12) for stage in range(3)]
    assert [(o.start, o.end, o.is_last) for o in orders] == [(0, 5, False), (5, 7, False), (7, 12, True)]
    assert (order(0, 0, 12).start, order(0, 0, 12).end, order(0, 0, 12).is_last) == (0, 12, True)


@pytest.mark.parametrize(
    ("stage", "bounds"),
    [(0, ()), (0, (0,)), (0, (1, 5)), (0, (0, 0)), (0, (0, 5, 5)), (0, (0, 5, 3)), (-1, (0, 5)), (1, (0, 5))],
)
def test_an_order_owns_every_layer_once(stage: int, bounds: tuple[int, ...]):
    with pytest.raises(ValueError, match=rf"stage {stage} of cuts .* does not own every layer once"):
        order(stage, *bounds)
