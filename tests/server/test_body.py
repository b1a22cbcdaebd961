"""Bodies of requests: JSON objects that hold text only where text can be; and JSON within them."""

import asyncio
import json
import threading
from typing import Any

import pytest
from starlette.requests import Request

from splitinfer.server.body import Bodies, Held, parsed, read_json
from splitinfer.server.openai.messages import arguments_of
from splitinfer.server.problem import Problem


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b'{"a": ["x"]}', {"a": ["x"]}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a": "\U0001f600 \\\\ud800"}'.encode(), {"a": "\U0001f600 \\ud800"}),
    ],
)
def test_an_object(raw: bytes, found: dict[str, Any]):
    assert parsed(raw) == found


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"[]", "the body must be a JSON object"),
        (b"{", "the body is not JSON"),
        (b'{"a": Infinity}', "the body is not JSON: Infinity is no number in JSON"),
        (b'{"a": 1e999}', "the body is not JSON: 1e999 is too large a number"),
        (b'{"a": %b}' % (b"9" * 5000), "the body is not JSON: a number has too many digits"),
        (b'{"a": "\\ud800"}', "the body has half a character, which no text can hold"),
        (b'{"\\uDFFF": 1}', "the body has half a character, which no text can hold"),
        (b'{"a": "\xed\xa0\x80"}', "the body is not JSON"),
        (b'{"a": "\xff"}', "the body is not JSON"),
        ('{"a": 1}'.encode("utf-16"), "the body is not JSON"),
        (b'{"a": [' + b"[]," * (1 << 20) + b"[], 1]}", "the body may have 1,048,576 commas"),
    ],
)
def test_what_is_none_is_refused(raw: bytes, sentence: str):
    with pytest.raises(Problem) as caught:
        parsed(raw)
    assert caught.value.status == 400
    assert str(caught.value).startswith(sentence)


def test_what_a_large_body_asks_is_read_beside_the_event_loop():
    def reader(size: int) -> int:
        raw = json.dumps({"a": "x" * size}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        request = Request({"type": "http", "headers": [], "state": {"body": Held(Bodies())}}, receive)
        return asyncio.run(read_json(request, lambda _: threading.get_ident()))

    assert reader(10) == threading.get_ident()
    assert reader(1 << 18) != threading.get_ident()


def test_arguments_of_a_call_are_an_object():
    assert (arguments_of('{"city": "Oslo"}'), arguments_of("")) == ({"city": "Oslo"}, {})
    assert arguments_of('{"a": ' + "[" * 63 + "]" * 63 + "}") == json.loads('{"a": ' + "[" * 63 + "]" * 63 + "}")


@pytest.mark.parametrize(
    "text",
    [
        "{oops",
        "[1]",
        "[" * 100_000,
        '{"a": ' * 5000 + "1" + "}" * 5000,
        '{"a": ' + "[" * 64 + "]" * 64 + "}",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
    ],
)
def test_arguments_that_no_body_could_be_stay_text(text: str):
    assert arguments_of(text) == text
