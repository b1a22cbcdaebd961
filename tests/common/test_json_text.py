"""What is printed for programs is JSON, whatever was measured."""

import json
import math
from typing import Any

import pytest

from splitinfer.common.json_text import dumps
from splitinfer.server.stream import Document, event, line


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": [1, 2.5, "ü", None, True]}, {"a": [1, 2.5, "ü", None, True]}),
        (math.nan, None),
        ({"a": (1.0, math.inf), "b": {"c": -math.inf}}, {"a": [1.0, None], "b": {"c": None}}),
        ({math.nan: 1}, {"null": 1}),
    ],
)
def test_numbers_that_json_does_not_have_are_null(value: Any, read: Any):
    for indent in (None, 2):
        assert json.loads(dumps(value, indent=indent), parse_constant=refuse) == read
    for sent in (Document(value).body, line({"": value}), event({"": value}).removeprefix(b"data: ")):
        assert json.loads(sent, parse_constant=refuse) in (read, {"": read}), "a server's, too"


def test_text_stays_readable():
    assert dumps("Märchen") == '"Märchen"'
