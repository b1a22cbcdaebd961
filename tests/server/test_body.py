"""Bodies of requests: JSON objects that hold text only where text can be."""

from typing import Any

import pytest

from splitinfer.server.body import parsed
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
